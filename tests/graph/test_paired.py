"""Gathers and scatters that AsyncTP pairs with products, and those that it leaves alone."""

from dataclasses import replace

from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, OpRow, Phase, build_graph, op_rows
from echo_explore.graph.paired import paired_with_products

GATHER = OpRow(
    kind=OpKind.COLLECTIVE, name="_c10d_functional.all_gather_into_tensor", axis=Axis.TENSOR, asynchronous=True,
    collective=Collective.ALL_GATHER, dtype=DType.BF16, message_bytes=1e6, shapes="2x128x64->8x128x64",
)  # fmt: skip
SCATTER = replace(GATHER, name="_c10d_functional.reduce_scatter_tensor", collective=Collective.REDUCE_SCATTER)
CAT = OpRow(name="aten.cat", op_class=OpClass.COPY, bytes_read=1e6, bytes_written=1e6)
MM = OpRow(name="aten.mm", op_class=OpClass.GEMM, dims=(1, 1024, 64, 64))
CAST = OpRow(name="echo.quantise", op_class=OpClass.COPY, bytes_read=2e6, bytes_written=1e6)


def wait(index: int) -> OpRow:
    return OpRow(kind=OpKind.WAIT, name="wait", awaits=index, deps=(index,))


def layer() -> list[OpRow]:
    return [
        GATHER,
        wait(0),
        replace(CAT, deps=(0,)),
        replace(MM, deps=(2,)),
        replace(CAT, deps=(3,)),
        replace(SCATTER, deps=(4,)),
        wait(5),
        OpRow(name="aten.add", op_class=OpClass.ELEMENTWISE, deps=(5,)),
    ]


def test_copies_and_waits_go_and_references_stay() -> None:
    found = op_rows(paired_with_products(build_graph(layer())))
    assert [row.name.rpartition(".")[2] for row in found] == [
        "all_gather_into_tensor", "mm", "reduce_scatter_tensor", "add",
    ]  # fmt: skip
    assert not any(row.asynchronous for row in found)
    assert [row.deps for row in found] == [(), (0,), (1,), (2,)]


def test_a_weight_gradient_reads_rows_in_order_and_other_products_do_not() -> None:
    weight = replace(MM, dims=(1, 64, 64, 1024), phase=Phase.BACKWARD)
    rows = [GATHER, wait(0), replace(CAT, deps=(0,)), replace(weight, deps=(2,)), replace(MM, deps=(2,))]
    found = op_rows(paired_with_products(build_graph(rows)))
    assert [(row.name.rpartition(".")[2], row.deps) for row in found] == [
        ("all_gather_into_tensor", ()), ("cat", (0,)), ("mm", (1,)), ("mm", (0,)),
    ]  # fmt: skip


def test_a_gather_that_is_cast_behind_it_is_not_paired() -> None:
    rows = layer()
    rows[3] = replace(CAST, deps=(2,))
    rows.insert(4, replace(MM, deps=(2, 3)))
    rows[5:] = [replace(CAT, deps=(4,)), replace(SCATTER, deps=(5,)), wait(6)]
    found = op_rows(paired_with_products(build_graph(rows)))
    assert found[0].asynchronous
    assert found[1].awaits == 0
    assert found[2].name == "aten.cat"
    assert [row.name for row in found].count("aten.cat") == 1  # that of the scatter went
    later = [replace(row, phase=Phase.BACKWARD) if row.name == "echo.quantise" else row for row in rows]
    assert not op_rows(paired_with_products(build_graph(later)))[0].asynchronous


def test_a_scatter_of_a_sum_is_not_paired() -> None:
    rows = [MM, MM, OpRow(name="aten.add", op_class=OpClass.ELEMENTWISE, deps=(0, 1))]
    rows += [replace(CAT, deps=(2,)), replace(SCATTER, deps=(3,)), wait(4)]
    assert op_rows(paired_with_products(build_graph(rows))) == op_rows(build_graph(rows))


def test_other_axes_and_synchronous_rows_stay() -> None:
    rows = [replace(GATHER, axis=Axis.CONTEXT), wait(0), replace(MM, deps=(0,)), replace(GATHER, asynchronous=False)]
    assert op_rows(paired_with_products(build_graph(rows))) == op_rows(build_graph(rows))
