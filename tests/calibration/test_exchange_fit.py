from dataclasses import replace

import numpy as np
import pytest

from echo_explore.calibration.exchange_fit import BOUNDS, START, exchange_samples, fit_exchange, hybrid_samples
from echo_explore.comm.coefficients import ExchangeCosts

TRUTH = replace(START, launch_s=30e-6, byte_s=1e-9, visit_s=250e-9, sm_bytes_per_s=25e9)


def rows(phase: str, nodes: int = 1) -> list[dict[str, str]]:
    return [
        {
            "tokens": str(tokens), "ep": str(8 * nodes), "nodes": str(nodes), "experts": "256", "topk": str(topk),
            "hidden": str(hidden), "sms": str(sms), "phase": phase, "latency_us": "1",
        }
        for tokens in (16, 256, 4096, 32768)
        for topk in (4, 8)
        for hidden in (2048, 7168)
        for sms in (12, 20, 24)
    ]  # fmt: skip


def measured(phase: str, truth: ExchangeCosts, nodes: int = 1) -> tuple[ExchangeCosts, float]:
    """What a fit to times of known constants finds, and its mean error."""
    samples = exchange_samples(rows(phase, nodes), link_bytes_per_s=450e9, gpu_network_bytes_per_s=50e9)
    samples = replace(samples, time_s=samples.modelled_s(truth))
    found = fit_exchange(samples)
    return found, float(np.mean(np.abs(samples.modelled_s(found) / samples.time_s - 1)))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_fit_finds_the_constants_that_made_the_times(phase: str, nodes: int) -> None:
    found, error = measured(phase, TRUTH, nodes)
    assert error < 0.02
    assert found.launch_s == pytest.approx(TRUTH.launch_s, rel=0.1)
    assert found.sm_bytes_per_s == pytest.approx(TRUTH.sm_bytes_per_s, rel=0.15)
    assert found.sigma_log < 0.05


def test_a_dispatch_carries_fp8_and_its_scales_a_combine_bf16() -> None:
    widths = {
        phase: exchange_samples(rows(phase), link_bytes_per_s=1e9, gpu_network_bytes_per_s=1e9).token_bytes.max()
        for phase in ("dispatch", "combine")
    }
    assert widths == {"dispatch": 7168 + 56 * 4, "combine": 14336}


def test_constants_stay_within_what_physics_permits() -> None:
    found, _ = measured("dispatch", replace(TRUTH, sm_bytes_per_s=1e15, visit_s=1e-12))
    for name, (least, most) in BOUNDS.items():
        assert least * (1 - 1e-9) <= getattr(found, name) <= most * (1 + 1e-9)


def test_published_bandwidths_of_eight_hosts_leave_cards_of_400_gbit_per_s_their_bandwidth() -> None:
    samples = hybrid_samples("hopper", "dispatch")
    leaving = (1 - 1 / samples.num_nodes) * samples.domain_visits * samples.token_bytes
    assert (leaving / samples.time_s < 50e9).all()
