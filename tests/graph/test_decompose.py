"""Products beside gathers and scatters in parts: nothing is lost, and a step takes what the closed forms say."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import (
    Axis,
    Collective,
    DType,
    ExecutionGraph,
    OpClass,
    OpKind,
    OpRow,
    OverlapMethod,
    Phase,
    TimedGraph,
    build_graph,
    decompose,
    op_rows,
)
from echo_explore.testing.strategies import equal_stages_job, interference
from echo_explore.timeline import simulate_step
from tests.examples import examples
from tests.graph import support

N, TOKENS, WIDTH, OUT = 4, 2048, 1024, 512


def collective(kind: Collective, *deps: int, asynchronous: bool = False) -> OpRow:
    whole, part = f"{TOKENS}x1x{WIDTH}", f"{TOKENS // N}x1x{WIDTH}"
    gathers = kind is Collective.ALL_GATHER
    return OpRow(
        kind=OpKind.COLLECTIVE,
        name="collective",
        collective=kind,
        axis=Axis.TENSOR,
        dtype=DType.BF16,
        shapes=f"{part}->{whole}" if gathers else f"{whole}->{part}",
        message_bytes=2.0 * TOKENS * WIDTH,
        asynchronous=asynchronous,
        deps=deps,
    )


def product(m: int, n: int, k: int, *deps: int, name: str = "aten.mm", phase: Phase = Phase.FORWARD) -> OpRow:
    return OpRow(
        op_class=OpClass.GEMM,
        name=name,
        phase=phase,
        dims=(1, m, n, k),
        flop=2.0 * m * n * k,
        bytes_read=2.0 * (m * k + k * n),
        bytes_written=2.0 * m * n,
        host_calls=3,
        deps=deps,
    )


def norm(*deps: int) -> OpRow:
    return OpRow(op_class=OpClass.NORM, name="norm", dims=(TOKENS // N, WIDTH), deps=deps)


def gathered() -> ExecutionGraph:
    return build_graph([norm(), collective(Collective.ALL_GATHER, 0), product(TOKENS, OUT, WIDTH, 1), norm(2)])


def scattered() -> ExecutionGraph:
    return build_graph([norm(), product(TOKENS, WIDTH, OUT, 0), collective(Collective.REDUCE_SCATTER, 1), norm(2)])


def step_s(graph: ExecutionGraph, times: dict[str, float]) -> float:
    """A forward alone, its rows as long as their names say; parts of a product as given in turn."""
    time_s = np.array([times.get(row.name, 0.0) for row in op_rows(graph)])
    timed = TimedGraph(graph=graph, time_s=time_s, sigma_log=np.zeros(graph.num_ops))
    job = equal_stages_job(num_stages=1, num_micro_batches=1, backward=[("gemm", 0.0)])
    chunk = replace(job.stages[0].chunks[0], forward=timed)
    job = replace(job, stages=(replace(job.stages[0], chunks=(chunk,)),))
    return simulate_step(job, interference=interference(), fidelity="kernel").step_time_s


def renamed(graph: ExecutionGraph) -> ExecutionGraph:
    """The last part of a product by another name."""
    rows = op_rows(graph)
    last = max(i for i, row in enumerate(rows) if row.op_class is OpClass.GEMM)
    rows[last].name = "last"
    return build_graph(rows)


@pytest.mark.parametrize(("copy_s", "part_s", "last_s"), [(1.0, 3.0, 3.5), (3.0, 1.0, 1.5), (2.0, 2.0, 2.0)])
def test_a_gather_takes_its_copies_or_the_product_and_one_part_more(
    copy_s: float, part_s: float, last_s: float
) -> None:
    """T = t_last + (n - 1) max(copy, part): either the copies or the parts follow one another without a gap."""
    parts = decompose(gathered(), num_ranks=N, method="userbuffers")
    took = step_s(renamed(parts.graph), {"copy": copy_s, "aten.mm": part_s, "last": last_s})
    assert took == pytest.approx(last_s + (N - 1) * max(copy_s, part_s), rel=1e-12)


@pytest.mark.parametrize(("scatter_s", "part_s", "last_s"), [(1.0, 3.0, 3.5), (3.0, 1.0, 1.5), (2.0, 2.0, 6.0)])
def test_a_scatter_takes_its_parts_behind_the_first_or_the_product_and_one(
    scatter_s: float, part_s: float, last_s: float
) -> None:
    parts = decompose(scattered(), num_ranks=N, method="userbuffers")
    took = step_s(renamed(parts.graph), {"collective": scatter_s, "aten.mm": part_s, "last": last_s})
    s = 4
    closed = max(part_s + s * scatter_s, (s - 1) * part_s + max(2 * scatter_s, last_s + scatter_s))
    assert took == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize(("copy_s", "part_s", "last_s"), [(1.0, 3.0, 3.5), (3.0, 1.0, 1.5)])
def test_a_scatter_by_copies_adds_up_at_the_end(copy_s: float, part_s: float, last_s: float) -> None:
    parts = decompose(scattered(), num_ranks=N, method="async-tp")
    times = {"copy": copy_s, "aten.mm": part_s, "last": last_s, "sum of parts": 0.5}
    took = step_s(renamed(parts.graph), times)
    copies = max(part_s + (N - 1) * copy_s, (N - 1) * part_s + copy_s)
    assert took == pytest.approx(max(copies, (N - 1) * part_s + last_s) + 0.5, rel=1e-12)


@pytest.mark.parametrize(("method", "stays"), [("userbuffers", True), ("async-tp", False)])
def test_userbuffers_leave_scatters_of_gradients_whole(method: OverlapMethod, *, stays: bool) -> None:
    backward = build_graph([replace(row, phase=Phase.BACKWARD) for row in op_rows(scattered())])
    assert (decompose(backward, num_ranks=N, method=method).graph.num_ops == backward.num_ops) is stays


@pytest.mark.parametrize(("method", "stays"), [("userbuffers", True), ("async-tp", False)])
def test_userbuffers_leave_what_an_adapter_reads_whole(method: OverlapMethod, *, stays: bool) -> None:
    adapter = replace(product(TOKENS, 16, WIDTH, 1), module="decoder.layers.N.linear_qkv.lora.linear_in")
    graph = build_graph([*op_rows(gathered()), adapter])
    assert (decompose(graph, num_ranks=N, method=method).graph.num_ops == graph.num_ops) is stays


@pytest.mark.parametrize("method", ["userbuffers", "async-tp"])
@pytest.mark.parametrize("graph", [gathered(), scattered()])
def test_nothing_is_lost(graph: ExecutionGraph, method: OverlapMethod) -> None:
    parts = decompose(graph, num_ranks=N, method=method)
    new = parts.graph
    assert new.flop.sum() == pytest.approx(graph.flop.sum(), rel=1e-15)
    assert new.host_calls.sum() == graph.host_calls.sum()
    whole = float(graph.message_bytes.sum())
    copies = float(new.message_bytes[new.collective == Collective.SEND].sum())
    assert copies in (0.0, whole * (N - 1) / N)
    assert float(new.message_bytes.sum()) - copies in (0.0, whole)
    products = new.op_class == OpClass.GEMM
    written = new.bytes_written[products].sum()
    assert written == graph.bytes_written[graph.op_class == OpClass.GEMM].sum()
    assert (parts.whole[products] == np.flatnonzero(graph.op_class == OpClass.GEMM)[0]).all()
    assert parts.is_last.sum() == 1
    assert parts.num_parts[products].tolist() == [int(products.sum())] * int(products.sum())
    for row, own in enumerate(op_rows(new)):
        assert all(dep < row for dep in own.deps)
    assert new.collective[new.awaits[new.kind == OpKind.WAIT]].all()


def test_what_reads_gathered_rows_runs_in_parts_but_a_weight_gradient_behind() -> None:
    """As PyTorch's backward has it: the weight gradient first, and two products of one gather."""
    rows = [
        norm(),
        collective(Collective.ALL_GATHER, 0),
        product(WIDTH, OUT, TOKENS, 1, phase=Phase.BACKWARD),
        product(TOKENS, OUT, WIDTH, 1, phase=Phase.BACKWARD),
        product(TOKENS, OUT, WIDTH, 1, phase=Phase.BACKWARD),
        norm(3, 4),
    ]
    parts = decompose(build_graph(rows), num_ranks=N, method="async-tp")
    assert [parts.whole.tolist().count(row) for row in (2, 3, 4)] == [0, N, N]
    weights = (parts.graph.op_class == OpClass.GEMM) & (parts.whole < 0)
    assert np.flatnonzero(weights).tolist() == [np.flatnonzero(parts.whole >= 0).max() + 1]
    assert parts.graph.dims[parts.whole == 3, 1].tolist() == [TOKENS // N] * N


def test_a_cast_between_gather_and_product_runs_in_parts() -> None:
    cast = OpRow(op_class=OpClass.QUANTISE, name="cast", dims=(TOKENS, WIDTH), bytes_read=8.0, deps=(1,))
    rows = [norm(), collective(Collective.ALL_GATHER, 0), cast, product(TOKENS, OUT, WIDTH, 1, 2), norm(3)]
    new = decompose(build_graph(rows), num_ranks=N, method="userbuffers").graph
    casts = new.op_class == OpClass.QUANTISE
    assert new.dims[casts, 0].tolist() == [TOKENS // N] * N
    assert new.bytes_read[casts].sum() == 8.0


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            [norm(), collective(Collective.ALL_GATHER, 0, asynchronous=True), product(TOKENS, OUT, WIDTH, 0)],
            id="beside another product already",
        ),
        pytest.param([norm(), collective(Collective.ALL_GATHER, 0), norm(1)], id="no product"),
        pytest.param(
            [
                product(TOKENS, WIDTH, OUT),
                product(TOKENS, WIDTH, OUT),
                norm(0, 1),
                collective(Collective.REDUCE_SCATTER, 2),
            ],
            id="a sum of products",
        ),
        pytest.param(
            [product(TOKENS, WIDTH, OUT), norm(), collective(Collective.REDUCE_SCATTER, 0)], id="not right ahead"
        ),
    ],
)
@pytest.mark.parametrize("method", ["userbuffers", "async-tp"])
def test_the_rest_stays(rows: list[OpRow], method: OverlapMethod) -> None:
    graph = build_graph(rows)
    parts = decompose(graph, num_ranks=N, method=method)
    assert op_rows(parts.graph) == op_rows(graph)
    assert (parts.whole == -1).all()


def test_waits_and_forward_ops_keep_their_rows() -> None:
    rows = [
        *op_rows(gathered()),
        collective(Collective.ALL_GATHER, 3, asynchronous=True),
        OpRow(kind=OpKind.WAIT, awaits=4, deps=(4,)),
        replace(norm(4), forward_op=2),
    ]
    graph = decompose(build_graph(rows), num_ranks=N, method="userbuffers").graph
    *_, wait, last = op_rows(graph)
    assert graph.asynchronous[wait.awaits]
    assert graph.collective[wait.awaits] == Collective.ALL_GATHER
    assert graph.op_class[last.forward_op] == OpClass.GEMM
    assert graph.op_class[last.forward_op + 1] == OpClass.NORM


@examples(50)
@given(rows=support.op_rows(), method=st.sampled_from(["userbuffers", "async-tp"]))
def test_rows_and_graphs_are_the_same(rows: list[OpRow], method: OverlapMethod) -> None:
    graph = build_graph(rows)
    again = build_graph(op_rows(graph))
    assert op_rows(again) == op_rows(graph)
    parts = decompose(graph, num_ranks=N, method=method)  # no shapes in these: nothing to decompose
    assert op_rows(parts.graph) == op_rows(graph)
