import numpy as np
import pytest

from echo_explore.comm.coefficient_file import shipped_coefficients
from echo_explore.comm.coefficients import OneShotCosts
from echo_explore.comm.custom import custom_all_reduce_s, custom_costs, custom_regime, framework_of
from echo_explore.core import MissingCalibration

COSTS = OneShotCosts(
    launch_s=(4e-6, 6e-6),
    rank_s=(0.1e-6, 0.2e-6),
    efficiency=(0.5, 0.5),
    eager_s=20e-6,
    eager_rank_s=1e-6,
    eager_copy_efficiency=2.0,
    own_bytes=(2.0**23, 2.0**23, 2.0**22),
    switch_bytes=(0.0, 0.0, 2.0**23),
    switch_launch_s=10e-6,
    switch_efficiency=0.5,
    most_ranks=8,
    sigma_log=0.1,
)


def test_kernels_change_with_size_and_ranks() -> None:
    ranks = np.array([2.0, 2.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 8.0])
    size = np.array([2.0**20, 2.0**24, 2.0**18, 2.0**19, 2.0**17, 2.0**18, 2.0**24, 1.0, 2.0**23])
    assert custom_regime(ranks, size, COSTS).tolist() == [0, 2, 0, 1, 0, 1, 2, 2, 3]


def test_versions_name_kernels() -> None:
    assert framework_of("custom:SGLang_CustomAllReduce_graph", "sglang 0.5.10") == "sglang"
    assert framework_of("custom:SGLang_CustomAllReduce_graph", "sglang 0.5.14") == "sglang-renewed"
    assert framework_of("custom:TRTLLM", "sglang 0.5.6.post2") == "trtllm"
    assert framework_of("custom:other", "other 1.0") is None


def test_times_are_those_of_the_formula() -> None:
    ranks, size, nccl = np.array([4.0, 4.0, 4.0]), np.array([4096.0, 2.0**20, 2.0**24]), np.full(3, 1e-3)
    times = custom_all_reduce_s(
        ranks, size, nccl, link_bytes_per_s=450e9, costs=COSTS, eager=np.array([False, False, False])
    )
    assert times[0] == pytest.approx(4e-6 + 2 * 0.1e-6 + 3 * 4096 / 225e9)
    assert times[1] == pytest.approx(6e-6 + 2 * 0.2e-6 + 1.5 * 2**20 / 225e9)
    assert times[2] == 1e-3
    switch = custom_all_reduce_s(
        np.array([8.0]), np.array([2.0**23]), nccl[:1], link_bytes_per_s=450e9, costs=COSTS, eager=np.array([False])
    )
    assert switch[0] == pytest.approx(10e-6 + 2**23 / 225e9)
    eager = custom_all_reduce_s(ranks, size, nccl, link_bytes_per_s=450e9, costs=COSTS, eager=np.full(3, True))
    assert eager[0] == pytest.approx(22e-6)
    assert (eager >= times).all()


def test_shipped_constants_exist_for_the_three_frameworks() -> None:
    custom = shipped_coefficients().custom
    for framework in ("vllm", "sglang", "trtllm", "sglang-renewed"):
        assert custom_costs(custom, framework, "nvswitch-h100-sxm5-80gb").most_ranks > 8
    assert custom_costs(custom, "vllm", "abacus") == custom["vllm/default"]
    with pytest.raises(MissingCalibration, match=r"custom.other.abacus: not in the comm calibration"):
        custom_costs(custom, "other", "abacus")
