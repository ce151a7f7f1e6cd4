"""Traces of ranks as files."""

from pathlib import Path

import numpy as np
import pytest

from echo_explore.core import SpecError
from echo_explore.graph import (
    Axis,
    Collective,
    OpKind,
    OpRow,
    RankTrace,
    build_graph,
    load_rank_trace,
    save_graph,
    save_rank_trace,
)


def trace() -> RankTrace:
    row = OpRow(kind=OpKind.COLLECTIVE, collective=Collective.ALL_REDUCE, axis=Axis.DATA, message_bytes=8.0)
    return RankTrace(
        graph=build_graph([row, OpRow(), row]), rank=3, world_size=16, groups=((0, 4, 8, 12), (1, 2, 5)),
        group_of_row=np.array([1, -1, 0]), peak_memory_bytes=1e9, versions={"torch": "2.13.0"},
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    save_rank_trace(tmp_path / "a.npz", trace())
    got = load_rank_trace(tmp_path / "a.npz")
    assert (got.groups, got.group_of_row.tolist(), got.rank, got.world_size) == (
        ((0, 4, 8, 12), (1, 2, 5)), [1, -1, 0], 3, 16,
    )  # fmt: skip
    assert got.peak_memory_bytes == 1e9
    assert got.graph.num_ops == 3


def test_a_graph_without_groups_is_refused(tmp_path: Path) -> None:
    save_graph(tmp_path / "a.npz", trace().graph)
    with pytest.raises(SpecError, match="does not name the groups of its collectives"):
        load_rank_trace(tmp_path / "a.npz")
