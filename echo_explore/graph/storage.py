"""Graphs and traces as files: `.npz` with one array a column and a JSON header; readable without torch."""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError, canonical_json, write_atomic
from echo_explore.core.hashing import bytes_hash
from echo_explore.core.versions import GRAPH_SCHEMA
from echo_explore.graph.execution_graph import COLUMNS, ExecutionGraph
from echo_explore.graph.trace import Parameter, Piece, Trace

Arrays = dict[str, npt.NDArray[Any]]
_ARRAYS = (*COLUMNS, "dims", "dep_counts", "dep_index")

_ZIP = b"PK"
"""How an archive, and so a .npz, begins."""


def save_graph(
    path: Path, graph: ExecutionGraph, *, facts: Mapping[str, Any] | None = None, overwrite: bool = True
) -> None:
    """Write one graph; readers never see a part of it.

    Args:
        path: of the file.
        graph: what to write.
        facts: plain JSON values to keep with it.
        overwrite: replace a file that is there.

    Raises:
        FileExistsError: it is there, and `overwrite` is false.
    """
    _write(path, {"kind": "graph", "facts": dict(facts or {})}, [graph], overwrite=overwrite)


def load_graph(path: Path) -> ExecutionGraph:
    """The graph that `save_graph` wrote.

    Raises:
        SpecError: the file is missing, damaged, of another kind or of another schema version.
    """
    return load_graph_and_facts(path)[0]


def load_graph_and_facts(path: Path) -> tuple[ExecutionGraph, dict[str, Any]]:
    """The graph that `save_graph` wrote, and what was kept with it.

    Raises:
        SpecError: see `load_graph`.
    """
    header, graphs = _read(path, "graph")
    if len(graphs) != 1:
        raise _damaged(path, f"holds {len(graphs)} graphs")
    return graphs[0], dict(header.get("facts", {}))


def save_trace(path: Path, trace: Trace) -> None:
    """Write one trace; readers never see a part of it."""
    pieces, graphs = [], []
    for name, piece in trace.pieces.items():
        graphs += [piece.forward, piece.backward]
        pieces.append(
            {
                "name": name,
                "parameters": [asdict(p) for p in piece.parameters],
                "saved_bytes": piece.saved_bytes,
                "forward_peak_bytes": piece.forward_peak_bytes,
                "backward_peak_bytes": piece.backward_peak_bytes,
                "saved_tensors": [list(tensor) for tensor in piece.saved_tensors],
            }
        )
    header = {
        "kind": "trace",
        "key": trace.key,
        "request": dict(trace.request),
        "pieces": pieces,
        "layer_kinds": list(trace.layer_kinds),
        "boundary_bytes": trace.boundary_bytes,
        "oracles": [dict(o) for o in trace.oracles],
        "facts": dict(trace.facts),
    }
    _write(path, header, graphs)


def load_trace(path: Path) -> Trace:
    """The trace that `save_trace` wrote.

    Raises:
        SpecError: the file is missing, damaged, of another kind or of another schema version.
    """
    header, graphs = _read(path, "trace")
    try:
        pieces = {
            entry["name"]: Piece(
                forward=graphs[2 * i],
                backward=graphs[2 * i + 1],
                parameters=tuple(_parameter(p) for p in entry["parameters"]),
                saved_bytes=entry["saved_bytes"],
                forward_peak_bytes=entry["forward_peak_bytes"],
                backward_peak_bytes=entry["backward_peak_bytes"],
                saved_tensors=tuple((name, size) for name, size in entry["saved_tensors"]),
            )
            for i, entry in enumerate(header["pieces"])
        }
        return Trace(
            key=header["key"],
            request=header["request"],
            pieces=pieces,
            layer_kinds=tuple(header["layer_kinds"]),
            boundary_bytes=header["boundary_bytes"],
            oracles=tuple(header["oracles"]),
            facts=header["facts"],
        )
    except (KeyError, IndexError, TypeError) as error:
        raise _damaged(path, repr(error)) from error


def _parameter(entry: dict[str, Any]) -> Parameter:
    return Parameter(**entry | {"shape": tuple(entry.get("shape", ()))})


def _write(path: Path, header: dict[str, Any], graphs: Sequence[ExecutionGraph], *, overwrite: bool = True) -> None:
    arrays: Arrays = {}
    for name in _ARRAYS:
        if name == "dep_counts":
            parts = [np.diff(g.dep_offsets).astype(np.int32) for g in graphs]
        else:
            parts = [getattr(g, name) for g in graphs]
        arrays[name] = np.concatenate(parts)
    header |= {
        "schema": GRAPH_SCHEMA,
        "num_ops": [g.num_ops for g in graphs],
        "num_deps": [int(g.dep_index.shape[0]) for g in graphs],
        "strings": [list(g.strings) for g in graphs],
    }
    text = canonical_json(header).encode()
    arrays["header"] = np.frombuffer(text, dtype=np.uint8)
    arrays["digest"] = np.frombuffer(_digest(text, arrays).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomic(path, buffer.getvalue(), overwrite=overwrite)


def _digest(header: bytes, arrays: Arrays) -> str:
    return bytes_hash(header + b"".join(arrays[name].tobytes() for name in _ARRAYS))


def _read(path: Path, kind: str) -> tuple[dict[str, Any], list[ExecutionGraph]]:
    try:
        data = path.read_bytes()
        if not data.startswith(_ZIP):
            raise _foreign(path, "it is no .npz")
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise _damaged(path, f"cut off after {len(data):,} bytes, before the table of contents that ends a .npz")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            absent = next((name for name in (*_ARRAYS, "header", "digest") if name not in file.files), None)
            if absent is not None:
                raise _foreign(path, f"it holds no array {absent!r}")
            arrays: Arrays = {name: file[name] for name in (*_ARRAYS, "header", "digest")}
        text = arrays["header"].tobytes()
        header = json.loads(text)
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except SpecError:  # a ValueError too
        raise
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError) as error:
        raise _damaged(path, str(error)) from error
    if _digest(text, arrays) != arrays["digest"].tobytes().decode(errors="replace"):
        raise _damaged(path, "its contents do not fit its hash")
    if header.get("schema") != GRAPH_SCHEMA or header.get("kind") != kind:
        found = f"{header.get('kind')} of schema {header.get('schema')}"
        raise SpecError("file", str(path), f"is a {found}, not a {kind} of schema {GRAPH_SCHEMA}", "trace again")
    return header, _split(arrays, header)


def _damaged(path: Path, why: str) -> SpecError:
    return SpecError("file", str(path), f"is damaged ({why})", "copy it or trace again")


def _foreign(path: Path, why: str) -> SpecError:
    return SpecError(
        "file",
        str(path),
        f"is no trace or graph of Echo Explore ({why})",
        "give a file that `trace` or `convert` wrote",
    )


def _split(arrays: Arrays, header: dict[str, Any]) -> list[ExecutionGraph]:
    graphs, row, dep = [], 0, 0
    for num_ops, num_deps, strings in zip(header["num_ops"], header["num_deps"], header["strings"], strict=True):
        rows = slice(row, row + num_ops)
        columns: dict[str, Any] = {name: arrays[name][rows] for name in (*COLUMNS, "dims")}
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(arrays["dep_counts"][rows], dtype=np.int64)])
        index = arrays["dep_index"][dep : dep + num_deps]
        graphs.append(ExecutionGraph(**columns, dep_offsets=offsets, dep_index=index, strings=tuple(strings)))
        row, dep = row + num_ops, dep + num_deps
    return graphs
