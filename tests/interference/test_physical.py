"""Classes of a job's kernels and collectives, and the table of their factors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import Collective, DType, OpClass, OpRow, Phase, build_graph
from echo_explore.interference import PhysicalInterference
from echo_explore.interference.loads import Traffic
from echo_explore.interference.physical import PhysicalPairing, traffic_of, wire_bytes
from echo_explore.specs import load_cluster

DEVICE = load_cluster("a100-80gb-hdr").device
PRODUCT = OpRow(
    op_class=OpClass.GEMM, phase=Phase.FORWARD, dtype=DType.BF16, dims=(1, 8192, 8192, 8192), flop=2 * 8192**3,
    bytes_read=2.7e8, bytes_written=1.3e8,
)  # fmt: skip
NORM = OpRow(op_class=OpClass.NORM, phase=Phase.BACKWARD, dtype=DType.BF16, dims=(8192, 768), bytes_read=5e7)
STREAM = OpRow(op_class=OpClass.ELEMENTWISE, phase=Phase.FORWARD, dtype=DType.BF16, dims=(10**7,), bytes_read=6e7)
REDUCE = OpRow(kind=1, collective=Collective.ALL_REDUCE)  # type: ignore[arg-type]


def reduction(**given: float) -> object:
    """An all-reduce of 8 GPUs over NVLink unless said otherwise."""
    facts = {
        "num_channels": 24, "chunk_bytes": 2.0**19, "message_bytes": 2.0**27, "wire_bytes": 1.75 * 2**27,
        "num_ranks": 8, "in_domain": True, "time_s": 1e-3, "link_bytes_per_s": 3e11,
    }  # fmt: skip
    return traffic_of(**(facts | given))  # type: ignore[arg-type]


def pairing() -> PhysicalPairing:
    """A new job on an A100."""
    return PhysicalInterference().pairing(DEVICE)


def test_equal_kernels_share_a_row_and_others_do_not() -> None:
    job = pairing()
    graph = build_graph((PRODUCT, STREAM, PRODUCT, REDUCE, NORM))
    time_s = np.array([5e-3, 5e-5, 5.01e-3, 1e-3, 1e-4])
    classes = job.kernel_classes(graph, time_s)
    assert classes[0] == classes[2]
    assert classes[3] == 0
    assert len(set(classes.tolist())) == 4
    assert job.kernel_classes(graph, time_s).tolist() == classes.tolist()


def test_products_lose_sms_and_small_norms_wait() -> None:
    job = pairing()
    classes = job.kernel_classes(build_graph((PRODUCT, NORM, STREAM)), np.array([5e-3, 1e-4, 5e-5]))
    column = job.traffic_class(Collective.ALL_REDUCE, reduction())  # type: ignore[arg-type]
    table = job.pair_table()
    assert table.compute.shape == (4, 2)
    assert table.compute[classes[0], column] == pytest.approx(108 / 84, rel=1e-6)
    assert table.compute[classes[1], column] > 1.01
    assert (table.compute[0] == 1).all()
    assert (table.compute[:, 0] == 1).all()


def test_between_hosts_nothing_backs_up_on_sms() -> None:
    job = pairing()
    classes = job.kernel_classes(build_graph((NORM,)), np.array([1e-4]))
    inside = job.traffic_class(Collective.ALL_REDUCE, reduction())  # type: ignore[arg-type]
    across = job.traffic_class(Collective.ALL_REDUCE, reduction(in_domain=False, time_s=1e-2))  # type: ignore[arg-type]
    table = job.pair_table()
    assert table.compute[classes[0], inside] > table.compute[classes[0], across]


def test_what_moves_nothing_has_no_column() -> None:
    job = pairing()
    assert job.traffic_class(Collective.BARRIER, reduction()) == 0  # type: ignore[arg-type]
    assert job.traffic_class(Collective.ALL_REDUCE, reduction(time_s=0.0)) == 0  # type: ignore[arg-type]


@given(st.floats(1e-6, 1e-1), st.floats(1e-6, 1.0), st.integers(1, 64), st.floats(1e3, 1e10))
def test_factors_are_at_least_one(kernel_s: float, traffic_s: float, channels: int, message: float) -> None:
    job = pairing()
    job.kernel_classes(build_graph((PRODUCT, NORM, STREAM)), np.array([kernel_s] * 3))
    facts = {"time_s": traffic_s, "num_channels": channels, "message_bytes": message, "wire_bytes": message}
    job.traffic_class(Collective.ALL_REDUCE, reduction(**facts))  # type: ignore[arg-type]
    table = job.pair_table()
    assert (table.compute >= 1).all()
    assert (table.collective >= 1).all()
    assert np.isfinite(table.compute).all()


def test_wire_bytes_follow_nccl_tests() -> None:
    assert wire_bytes(Collective.ALL_REDUCE, 8.0, 4) == pytest.approx(12.0)
    assert wire_bytes(Collective.ALL_GATHER, 8.0, 4) == pytest.approx(6.0)
    assert wire_bytes(Collective.SEND, 8.0, 2) == 8.0
    assert wire_bytes(Collective.ALL_REDUCE, 8.0, 1) == 0.0


def test_two_channels_fill_pcie_and_fused_exchanges_are_exclusive() -> None:
    over_pcie = traffic(over_pcie=True, link_bytes_per_s=3.15e10)
    assert over_pcie.num_channels == 2
    fused = traffic(fused=True)
    assert fused.exclusive
    assert fused.num_channels == 20
    job = pairing()
    classes = job.kernel_classes(build_graph((STREAM,)), np.array([5e-5]))
    columns = [job.traffic_class(Collective.ALL_TO_ALL, t) for t in (traffic(), fused)]
    table = job.pair_table()
    assert table.compute[classes[0], columns[1]] >= 108 / 88 - 1e-9


def traffic(**given: float) -> Traffic:
    """As `reduction`, typed."""
    found = reduction(**given)
    assert isinstance(found, Traffic)
    return found
