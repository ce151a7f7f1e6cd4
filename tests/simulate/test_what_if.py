"""What-if factors: parsing, and what they do to a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.graph import Axis, OpClass
from echo_explore.simulate import Prediction, SimulationOptions, WhatIf, parse_what_if
from echo_explore.simulate.hardware import on_other_hardware
from echo_explore.simulate.what_if import TIMES
from tests.simulate.support import candidate, simulator


def test_factors_multiply() -> None:
    what_if = parse_what_if(["compute=0.5", " gemm = 0.25 ", "communication=2", "tensor=3", "host=0"])
    assert what_if.kernel_factor(OpClass.GEMM) == pytest.approx(0.125)
    assert what_if.kernel_factor(OpClass.NORM) == pytest.approx(0.5)
    assert what_if.axis_factor(Axis.TENSOR) == pytest.approx(6.0)
    assert what_if.axis_factor(Axis.MODEL) == pytest.approx(2.0)
    assert what_if.host_factor == 0.0


@given(st.lists(st.tuples(st.sampled_from(TIMES), st.just(0.0) | st.floats(1e-3, 1e3)), unique_by=lambda pair: pair[0]))
def test_round_trip(pairs: list[tuple[str, float]]) -> None:
    assert parse_what_if([f"{name}={value!r}" for name, value in pairs]).factors == dict(pairs)


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (["tensr=0.5"], "unknown name 'tensr'; fix: did you mean tensor, "),
        (["=0.5"], "unknown name ''"),
        (["tensor=1", "tensor=2"], "tensor is given twice"),
        (["tensor"], "must be a number from 0.001 to 1000, or 0; fix: write tensor=0.5"),
        (["tensor=-1"], "must be a number from 0.001 to 1000, or 0"),
        (["tensor=nan"], "must be a number from 0.001 to 1000, or 0"),
        (["tensor=inf"], "must be a number from 0.001 to 1000, or 0"),
        (
            ["slow_rank=3"],
            "needs STAGE:FACTOR or STAGE:FACTOR:REPLICAS with a factor from 1 to 1000; fix: write slow_rank=3:1.2",
        ),
        (["slow_rank=x:2"], "needs STAGE:FACTOR"),
        (["slow_rank=1:0.5"], "needs STAGE:FACTOR"),
        (["slow_rank=1:2,1:3"], "stage 1 is given twice"),
        (["slow_rank=1:2", "slow_rank=2:3"], "slow_rank is given twice"),
        (["jitter=much"], "needs SIGMA or SIGMA:SEED"),
        (["jitter=0.1:x"], "needs SIGMA or SIGMA:SEED"),
        (["interference=bogus"], "a number from 0.001 to 1000, or none (0); fix: write interference=0.5"),
        (["stragglers=bogus"], "a number from 0.001 to 1000, or none (0); fix: write stragglers=0.5"),
        (["gpu=nope"], "what-if = 'gpu=nope': 'nope' is not a known cluster; fix: "),
        (["mixed_gpu=nope:1"], "what-if = 'mixed_gpu=nope:1': 'nope' is not a known cluster; fix: "),
        (["tensor=2x"], "must be a number from 0.001 to 1000, or 0"),
    ],
)
def test_refused(texts: list[str], rule: str) -> None:
    with pytest.raises(SpecError, match="what-if = ") as error:
        parse_what_if(texts)
    assert rule in str(error.value)


def test_a_slow_rank_and_jitter_hold_the_step_back() -> None:
    job = candidate(layout="tp=8,pp=4,dp=2")
    plain = simulator().predict(job).step_time_s
    slow = simulator().predict(job, SimulationOptions(what_if=parse_what_if(["slow_rank=2:1.2"]))).step_time_s
    noisy = simulator().predict(job, SimulationOptions(what_if=parse_what_if(["jitter=0.05:7"]))).step_time_s
    assert plain * 1.05 < slow < plain * 1.2
    assert plain < noisy < plain * 1.2
    with pytest.raises(SpecError, match=r"the job has stages 0\.\.3"):
        simulator().predict(job, SimulationOptions(what_if=parse_what_if(["slow_rank=9:1.2"])))


def test_free_traffic_leaves_no_trace_of_itself() -> None:
    job = candidate(layout="tp=8,pp=4,dp=2")
    step = simulator().predict(job, SimulationOptions(what_if=WhatIf(factors={"tensor": 0.0, "data": 0.0})))
    assert step.breakdown["tensor_s"] == step.breakdown["data_s"] == 0.0
    plain = simulator().predict(job)
    assert plain.breakdown["tensor_s"] > 0
    assert step.step_time_s < plain.step_time_s


def test_everything_twice_as_slow_takes_twice_as_long() -> None:
    job = candidate(layout="tp=8,pp=4,dp=2")
    twice = WhatIf(factors={"compute": 2.0, "communication": 2.0, "host": 2.0})
    slow = simulator().predict(job, SimulationOptions(what_if=twice))
    assert slow.step_time_s == pytest.approx(2 * simulator().predict(job).step_time_s, rel=1e-9)


def test_interference_none_is_a_factor_of_zero() -> None:
    assert parse_what_if(["interference=none"]).interference_factor == 0.0
    assert parse_what_if(["interference=0.5"]).interference_factor == 0.5
    with pytest.raises(SpecError, match="what-if = 'compute=none'"):
        parse_what_if(["compute=none"])


def test_hardware_figures_are_multiplied() -> None:
    what_if = parse_what_if(["bandwidth=2x", "latency=0.5", "peak_flop=3x"])
    before = candidate()
    after = on_other_hardware(before, what_if.factors, "").cluster
    assert after.node.nic_bandwidth_bytes_per_s == 2 * before.cluster.node.nic_bandwidth_bytes_per_s
    assert after.node.link_bandwidth_bytes_per_s == 2 * before.cluster.node.link_bandwidth_bytes_per_s
    assert after.fabric.latency_s == 0.5 * before.cluster.fabric.latency_s
    assert after.device.peak_flop_per_s["bf16"] == 3 * before.cluster.device.peak_flop_per_s["bf16"]
    assert on_other_hardware(before, {}, "") is before


def test_another_gpu_and_perfect_overlap() -> None:
    what_if = parse_what_if(["gpu=b200-ndr", "overlap=perfect"])
    assert what_if.perfect_overlap
    assert on_other_hardware(candidate(), what_if.factors, what_if.gpu).cluster.device.name.startswith("B200")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu=h999", "what-if = 'gpu=h999': 'h999' is not a known cluster"),
        ("overlap=good", "the value must be perfect; fix: write overlap=perfect"),
        ("bandwidth=0", "must be a number from 0.001 to 1000; fix: write bandwidth=2x"),
        ("bandwidth=1e-308", "must be a number from 0.001 to 1000; fix: write bandwidth=2x"),
        ("bandwidth=1e-300x", "must be a number from 0.001 to 1000; fix: write bandwidth=2x"),
        ("latency=1e-5", "must be a number from 0.001 to 1000, or 0; fix: write latency=0.5"),
        ("compute=1e-200", "must be a number from 0.001 to 1000, or 0; fix: write compute=0.5"),
        ("bandwith=2x", "unknown name 'bandwith'; fix: did you mean bandwidth.*All: compute, communication"),
    ],
)
def test_bad_hardware(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_what_if([text])


def test_an_explanation_is_part_of_the_prediction() -> None:
    prediction = simulator().predict(candidate(layout="tp=8,pp=4,dp=2"), SimulationOptions(explain=True))
    assert prediction.explanation is not None
    assert sum(prediction.explanation["critical_path_s"].values()) == pytest.approx(prediction.step_time_s)
    assert [row["stage"] for row in prediction.to_json()["explanation"]["bubbles"]] == [0, 1, 2, 3]
    assert "explanation" not in simulator().predict(candidate()).to_json()


def _notes(*texts: str, **job: str) -> list[str]:
    return [line for line in _predict(*texts, **job).warnings if "changes nothing" in line]


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("expert=0.5", "tp=8,pp=4,dp=2"),
        ("context=0", "tp=8,pp=4,dp=2"),
        ("broken_link=expert:4:1", "tp=8,pp=4,dp=2"),
        ("broken_link=context+expert:4:2", "tp=8,pp=4,dp=2"),
        ("tensor=2", "tp=1,pp=4,dp=2"),
        ("pipeline=2", "tp=8,pp=1,dp=2"),
        ("data=2", "tp=8,pp=4,dp=1"),
        ("grouped_gemm=2", "tp=8,pp=4,dp=2"),
        ("overlap=perfect", "tp=1,pp=1,dp=1"),
        ("communication=0.5", "tp=1,pp=1,dp=1"),
        ("gpu=a100-80gb-hdr", "tp=8,pp=4,dp=2"),
        ("mixed_gpu=a100-80gb-hdr:1", "tp=8,pp=4,dp=2"),
        ("compute=1", "tp=8,pp=4,dp=2"),
        ("slow_rank=1:1", "tp=8,pp=4,dp=2"),
        ("slow_rank=1:1:1", "tp=8,pp=4,dp=2"),
        ("jitter=0:3", "tp=8,pp=4,dp=2"),
    ],
)
def test_a_what_if_on_nothing_says_so(text: str, layout: str) -> None:
    assert _notes(text, layout=layout) == [f"what-if {text} changes nothing: the job has no time that depends on it"]
    assert _predict(text, layout=layout).step_time_s == _predict(layout=layout).step_time_s
    assert _notes(text, "gemm=2", layout=layout) == _notes(text, layout=layout)  # the other one counts


@pytest.mark.parametrize(
    "text",
    [
        *("tensor=2", "data=0", "pipeline=2", "norm=2", "host=2", "bandwidth=2x", "gpu=b200-ndr", "overlap=perfect"),
        *("slow_rank=0:1.2", "slow_rank=0:1.2:1", "broken_link=data+expert:2:1", "mixed_gpu=b200-ndr:1", "jitter=0.1"),
    ],
)
def test_a_what_if_that_counts_says_nothing(text: str) -> None:
    assert _notes(text) == []


def test_too_many_replicas_and_stages_name_what_was_given() -> None:
    with pytest.raises(SpecError, match=r"what-if = 'slow_rank=0:1.2:3': disturbs 3 data-parallel replicas .* has 2;"):
        _predict("slow_rank=0:1.2:3", "compute=2")
    both = r"what-if = 'slow_rank=0:1.2:1, mixed_gpu=b200-ndr:2': disturbs 3 .*; fix: name 2 at most, or raise dp"
    with pytest.raises(SpecError, match=both):
        _predict("slow_rank=0:1.2:1", "mixed_gpu=b200-ndr:2")
    for text in ("slow_rank=7:1.2", "slow_rank=7:1.2:1"):
        with pytest.raises(SpecError, match=f"what-if = '{text}': the job has stages 0..3; fix: name one of them"):
            _predict(text)


def _predict(*texts: str, **job: str) -> Prediction:
    options = SimulationOptions(what_if=parse_what_if(texts), explain=True)
    return simulator().predict(candidate(**({"layout": "tp=8,pp=4,dp=2"} | job)), options)


def test_a_replica_that_is_slow_holds_the_others_back() -> None:
    plain, all_slow, one_slow = _predict(), _predict("slow_rank=2:1.2"), _predict("slow_rank=2:1.2:1")
    assert (plain.num_rank_classes, all_slow.num_rank_classes, one_slow.num_rank_classes) == (4, 4, 8)
    assert plain.step_time_s * 1.05 < one_slow.step_time_s
    assert one_slow.step_time_s == pytest.approx(all_slow.step_time_s, rel=0.02)
    assert one_slow.hfu == pytest.approx(plain.hfu * plain.step_time_s / one_slow.step_time_s)
    assert one_slow.explanation is not None
    labels = [row["label"] for row in one_slow.explanation["bubbles"]]
    assert labels[2] == "stage 2"
    assert labels[6] == "stage 2, 1.2 x as slow, slow replica"
    assert _predict("slow_rank=2:1:1").step_time_s == plain.step_time_s


def test_a_broken_link_slows_what_shares_it() -> None:
    plain = _predict()
    all_data = _predict("data=4").step_time_s
    assert _predict("broken_link=data:4:1").step_time_s == pytest.approx(all_data, rel=0.005)
    inside = _predict("broken_link=tensor+pipeline:2:1")
    assert plain.step_time_s < inside.step_time_s
    assert inside.num_rank_classes == 8


def test_other_gpus_in_some_replicas() -> None:
    plain, slow = _predict(cluster="h100-ndr"), _predict("gpu=a100-40gb-hdr", cluster="h100-ndr")
    mixed = _predict("mixed_gpu=a100-40gb-hdr:1", cluster="h100-ndr")
    assert plain.step_time_s * 1.5 < mixed.step_time_s == pytest.approx(slow.step_time_s, rel=0.02)
    assert mixed.memory_capacity_bytes == slow.memory_capacity_bytes < plain.memory_capacity_bytes
    peaks = [(p.mfu * p.step_time_s) ** -1 for p in (plain, slow)]
    assert mixed.mfu == pytest.approx(2 / sum(peaks) / mixed.step_time_s)
    both = _predict("mixed_gpu=a100-40gb-hdr:2", cluster="h100-ndr")
    assert both.num_rank_classes == 4
    assert both.step_time_s == pytest.approx(slow.step_time_s, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow_rank=2:1.2:3", "what-if = 'slow_rank=2:1.2:3': disturbs 3 data-parallel replicas"),
        ("slow_rank=9:1.2:1", r"what-if = 'slow_rank=9:1.2:1': the job has stages 0\.\.3"),
        ("slow_rank=2:1.2:0", "the number of replicas must be 1 or more; fix: write slow_rank=3:1.2:1"),
        ("slow_rank=2:1.2:", "the number of replicas must be 1 or more"),
        ("slow_rank=2:1.2,2:1.3:1", "stage 2 is given twice"),
        ("slow_rank=2:1.3:1,2:1.2", "stage 2 is given twice"),
        ("broken_link=data:4", "the number of replicas must be 1 or more; fix: write broken_link=data:4:1"),
        ("broken_link=nvlink:4:1", "needs AXIS:FACTOR:REPLICAS, axes of tensor, context"),
        ("broken_link=data:0.5:1", "a factor from 1 to"),
        ("mixed_gpu=h999:1", "'h999' is not a known cluster; fix: did you mean h100-ndr"),
        ("mixed_gpu=v100-32gb-edr", "the number of replicas must be 1 or more; fix: write mixed_gpu="),
    ],
)
def test_bad_replicas(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _predict(text)
