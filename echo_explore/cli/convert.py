"""`echo-explore convert`: execution graphs from one file format to another."""

from pathlib import Path
from typing import Annotated

import typer

from echo_explore.cli import graph_files

_INPUT_HELP = (
    "Graph (.npz), Chakra execution trace (.et), or trace of PyTorch's profiler or ExecutionTraceObserver (.json)."
)


def convert_command(
    file: Annotated[Path, typer.Argument(help=_INPUT_HELP)],
    out: Annotated[Path, typer.Option("--out", help="File to write: .npz or .et (Chakra).")],
) -> int:
    """Read a graph in any known format and write it as .npz or as a Chakra execution trace."""
    write = graph_files.writer_of(out)
    graph_files.check_out(out)
    graph = graph_files.read_graph(file)
    write(out, graph)
    print(f"{out.absolute()}: {graph_files.summary(graph)}")
    return 0
