import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_explore.comm import HierarchicalModel
from echo_explore.comm.exchange import OPERATORS, ExchangeRequest
from echo_explore.core import MissingCalibration
from echo_explore.specs import load_cluster
from echo_explore.specs.routing import Routing
from echo_explore.topology import GroupShape

MODEL = HierarchicalModel.shipped()
CLUSTERS = {name: load_cluster(name) for name in ("h100-ndr", "b200-ndr", "gb200-nvl72", "mi300x-roce")}


def request(
    operator: str, *, ranks: int = 8, per_node: int = 8, tokens: int = 4096, width: float = 14336.0
) -> ExchangeRequest:
    """Of DeepSeek-V3's layer: 256 experts, 8 a token."""
    routing = Routing(num_experts=256, experts_per_token=8)
    return ExchangeRequest(
        operator=operator,
        rank_visits=tokens * sum(routing.visits(ranks)),
        domain_visits=tokens * sum(routing.visits(ranks // per_node)),
        token_bytes=width,
        group=GroupShape(num_ranks=ranks, ranks_per_node=per_node, groups_per_node=8 // per_node),
    )


def seconds(operator: str, cluster: str, **rest: float) -> float:
    return MODEL.exchange_time(request(operator, **rest), CLUSTERS[cluster]).time_s  # type: ignore[arg-type]


# DeepEP's normal kernels, 4,096 tokens of 7,168 elements, 8 of 256 experts, 20 SMs: aiconfigurator-core 0.12.0 (2026),
# fp8 with scales in a dispatch (7,392 bytes a token), bf16 in a combine; two hosts: 16 ranks.
@pytest.mark.parametrize(
    ("operator", "cluster", "ranks", "measured_us"),
    [
        ("deep_ep.dispatch", "h100-ndr", 8, 492.2),
        ("deep_ep.combine", "h100-ndr", 8, 972.5),
        ("deep_ep.dispatch", "h100-ndr", 16, 893.2),
        ("deep_ep.combine", "h100-ndr", 16, 2149.5),
        ("deep_ep.dispatch", "h100-ndr", 32, 1860.5),
        ("deep_ep.combine", "b200-ndr", 8, 882.3),
    ],
)
def test_deepep_takes_what_was_measured(operator: str, cluster: str, ranks: int, measured_us: float) -> None:
    width = 7392.0 if operator.endswith("dispatch") else 14336.0
    assert seconds(operator, cluster, ranks=ranks, width=width) * 1e6 == pytest.approx(measured_us, rel=0.2)


# GB/s of all visits, own ranks counted: DeepEP docs/README_Hybrid-EP.md (2025), B200, 16 SMs, kernel alone.
@pytest.mark.parametrize(("operator", "gb_per_s"), [("dispatch", 734.95), ("combine", 673.84)])
def test_hybridep_moves_what_was_published(operator: str, gb_per_s: float) -> None:
    name = f"deep_ep.hybrid_{operator}"
    asked = request(name)
    moved = asked.rank_visits * asked.token_bytes
    assert moved / seconds(name, "b200-ndr") / 1e9 == pytest.approx(gb_per_s, rel=0.15)


def test_a_combine_of_bf16_takes_longer_than_a_dispatch_of_fp8() -> None:
    dispatch = seconds("deep_ep.dispatch", "h100-ndr", width=7392.0)
    assert 1.5 < seconds("deep_ep.combine", "h100-ndr") / dispatch < 2.3


def test_few_sms_are_what_limits_deepep_on_blackwell() -> None:
    assert seconds("deep_ep.dispatch", "b200-ndr") > 1.3 * seconds("deep_ep.hybrid_dispatch", "b200-ndr")


@settings(deadline=None)
@given(
    st.sampled_from(sorted(OPERATORS)),
    st.sampled_from(sorted(CLUSTERS)),
    st.integers(1, 2**16),
    st.floats(1e3, 1e5),
    st.sampled_from([(2, 2), (4, 4), (8, 8), (16, 8), (64, 8)]),
)
def test_time_is_positive_grows_with_tokens_and_stays_below_the_links(
    operator: str, cluster: str, tokens: int, width: float, shape: tuple[int, int]
) -> None:
    ranks, per_node = shape
    low, high = (
        seconds(operator, cluster, tokens=count, width=width, ranks=ranks, per_node=per_node)
        for count in (tokens, 2 * tokens)
    )
    assert 0 < low < high
    asked = request(operator, tokens=tokens, width=width, ranks=ranks, per_node=per_node)
    node = CLUSTERS[cluster].node
    over_links = (1 - 1 / per_node) * asked.rank_visits * width
    assert low >= over_links / node.link_bandwidth_bytes_per_s
    over_cards = (1 - per_node / ranks) * asked.domain_visits * width
    assert low >= over_cards / (node.network_bandwidth_bytes_per_s / node.num_gpus) * (1 - 1e-9)


def test_one_rank_exchanges_nothing() -> None:
    price = MODEL.exchange_time(request("deep_ep.dispatch", ranks=1, per_node=1), CLUSTERS["h100-ndr"])
    assert (price.time_s, price.sigma_log) == (0.0, 0.0)


def test_devices_that_were_not_measured_are_less_sure() -> None:
    sigma = {
        name: MODEL.exchange_time(request("deep_ep.combine"), CLUSTERS[name]).sigma_log
        for name in ("h100-ndr", "mi300x-roce")
    }
    assert 0 < sigma["h100-ndr"] < sigma["mi300x-roce"]


def test_a_calibration_without_exchanges_is_an_error_not_a_guess() -> None:
    c = MODEL.coefficients
    bare = HierarchicalModel(coefficients=type(c)(scale_up=c.scale_up, network=c.network))
    with pytest.raises(MissingCalibration, match=r"exchange.deepep.h100-sxm5-80gb: .*add exchange.deepep.default"):
        bare.exchange_time(request("deep_ep.combine"), CLUSTERS["h100-ndr"])
