"""Files of execution graphs: which format a name means, and what is said of a graph."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph import (
    ExecutionGraph,
    RankTrace,
    load_chakra,
    load_chakra_trace,
    save_chakra,
    save_graph,
    save_rank_trace,
)
from echo_explore.graph.rank_trace import trace_of
from echo_explore.graph.storage import load_graph_and_facts

Written = ExecutionGraph | RankTrace


def _save_native(path: Path, graph: Written) -> None:
    with _refused_if_there(path):
        if isinstance(graph, RankTrace):
            save_rank_trace(path, graph, overwrite=False)
        else:
            save_graph(path, graph, overwrite=False)


def _save_chakra(path: Path, graph: Written) -> None:
    with _refused_if_there(path):
        save_chakra(path, graph, overwrite=False)


@contextmanager
def _refused_if_there(path: Path) -> Iterator[None]:
    """Another command may have written the file since `check_out`."""
    try:
        yield
    except FileExistsError:
        raise _there(path) from None


def _there(path: Path) -> SpecError:
    return SpecError("out", str(path), "exists, and nothing is overwritten", "give another file or delete it")


WRITERS: Mapping[str, Callable[[Path, Written], None]] = {"native": _save_native, "chakra": _save_chakra}
_ENDINGS = {".npz": "native", ".et": "chakra"}


def check_out(out: Path) -> None:
    """Refuse a file that is there, or whose folder is not."""
    if out.exists():
        raise _there(out)
    if not out.absolute().parent.is_dir():
        raise SpecError("out", str(out), "its folder does not exist", "make the folder first")


def writer_of(out: Path) -> Callable[[Path, Written], None]:
    """What writes a file of that name."""
    name = _ENDINGS.get(out.suffix)
    if name is None:
        raise SpecError("out", str(out), "must end in .npz (native) or .et (Chakra)", "name the file FILE.npz")
    return WRITERS[name]


def read_graph(path: Path) -> Written:
    """What a native file, a Chakra trace, or a trace of PyTorch's profiler holds, by the ending of its name.

    The trace of a rank where the file names the ranks of its collectives, else a graph.
    """
    if path.suffix == ".npz":
        graph, facts = load_graph_and_facts(path)
        return trace_of(graph, facts) or graph
    if path.suffix == ".et":
        return load_chakra_trace(path) or load_chakra(path)
    if ".json" in path.suffixes[-2:]:
        from echo_explore.calibration.observer_graph import read_observer_trace
        from echo_explore.calibration.observer_nodes import observer_nodes
        from echo_explore.calibration.profiler_graph import read_profiler_graph

        if observer_nodes(path) is not None:
            return read_observer_trace(path)
        return read_profiler_graph(path)
    raise SpecError("file", str(path), "must end in .npz, .et, .json or .json.gz", "rename it after its format")


def read_trace(path: Path) -> RankTrace:
    """As `read_graph`, where a prediction needs to know the ranks.

    Raises:
        SpecError: the file does not name them.
    """
    found = read_graph(path)
    if isinstance(found, RankTrace):
        return found
    if not found.is_collective.any():  # one GPU
        return RankTrace(
            graph=found, rank=0, world_size=1, groups=(), group_of_row=np.full(found.num_ops, -1, dtype=np.int64),
            peak_memory_bytes=float(found.live_bytes.max(initial=0.0)),
        )  # fmt: skip
    raise SpecError("graph", str(path), "does not name the groups of its collectives", "trace a --script again")


def summary(written: Written) -> str:
    """What a graph holds, in one line."""
    graph = written.graph if isinstance(written, RankTrace) else written
    return (
        f"{graph.num_ops:,} rows, {int(graph.is_collective.sum()):,} collectives, "
        f"{graph.flop.sum():.4g} FLOP, {graph.message_bytes.sum():.4g} bytes in messages"
    )
