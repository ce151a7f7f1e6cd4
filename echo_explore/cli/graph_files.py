"""Files of execution graphs: which format a name means, and what is said of a graph."""

from collections.abc import Callable, Mapping
from pathlib import Path

from echo_explore.core import SpecError
from echo_explore.graph import ExecutionGraph, load_chakra, load_graph, save_chakra, save_graph

WRITERS: Mapping[str, Callable[[Path, ExecutionGraph], None]] = {"native": save_graph, "chakra": save_chakra}
_ENDINGS = {".npz": "native", ".et": "chakra"}


def check_out(out: Path) -> None:
    """Refuse a file that is there, or whose folder is not."""
    if out.exists():
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file or delete it")
    if not out.absolute().parent.is_dir():
        raise SpecError("out", str(out), "its folder does not exist", "make the folder first")


def writer_of(out: Path) -> Callable[[Path, ExecutionGraph], None]:
    """What writes a file of that name."""
    name = _ENDINGS.get(out.suffix)
    if name is None:
        raise SpecError("out", str(out), "must end in .npz (native) or .et (Chakra)", "name the file FILE.npz")
    return WRITERS[name]


def read_graph(path: Path) -> ExecutionGraph:
    """The graph in a native file, a Chakra trace, or a trace of PyTorch's profiler, by the ending of its name."""
    if path.suffix == ".npz":
        return load_graph(path)
    if path.suffix == ".et":
        return load_chakra(path)
    if ".json" in path.suffixes[-2:]:
        from echo_explore.calibration.profiler_graph import read_profiler_graph

        return read_profiler_graph(path)
    raise SpecError("file", str(path), "must end in .npz, .et, .json or .json.gz", "rename it after its format")


def summary(graph: ExecutionGraph) -> str:
    """What a graph holds, in one line."""
    return (
        f"{graph.num_ops:,} rows, {int(graph.is_collective.sum()):,} collectives, "
        f"{graph.flop.sum():.4g} FLOP, {graph.message_bytes.sum():.4g} bytes in messages"
    )
