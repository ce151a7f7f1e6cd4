"""Each distinct kernel of a graph once: what its price depends on, and which rows are which."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from echo_explore.graph import ExecutionGraph, Phase

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signatures:
    """Distinct kernels of a graph, (num_signatures,) each; `rows` and `inverse` say which rows they are."""

    op_class: npt.NDArray[np.int64]
    dtype: npt.NDArray[np.int64]
    backward: Bools
    dims: Floats
    num_bytes: Floats
    flop: Floats
    rows: npt.NDArray[np.intp]
    inverse: npt.NDArray[np.intp]

    def take(self, mask: Bools) -> "Signatures":
        """The signatures under `mask`; `rows` and `inverse` stay as they are."""
        return replace(
            self,
            op_class=self.op_class[mask],
            dtype=self.dtype[mask],
            backward=self.backward[mask],
            dims=self.dims[mask],
            num_bytes=self.num_bytes[mask],
            flop=self.flop[mask],
        )


def signatures(graph: ExecutionGraph) -> Signatures:
    """Each distinct (class, dtype, backward or not, dims, bytes, FLOP) of the kernels once."""
    rows = np.flatnonzero(graph.is_compute)
    key = np.empty((rows.size, 5 + graph.dims.shape[1]), dtype=np.float64)
    key[:, 0] = graph.op_class[rows]
    key[:, 1] = graph.dtype[rows]
    key[:, 2] = graph.phase[rows] == Phase.BACKWARD
    key[:, 3] = graph.bytes_read[rows] + graph.bytes_written[rows]
    key[:, 4] = graph.flop[rows]
    key[:, 5:] = graph.dims[rows]
    first, inverse = _distinct(key)
    distinct = key[first]
    return Signatures(
        op_class=distinct[:, 0].astype(np.int64),
        dtype=distinct[:, 1].astype(np.int64),
        backward=distinct[:, 2] > 0,
        num_bytes=distinct[:, 3],
        flop=distinct[:, 4],
        dims=distinct[:, 5:],
        rows=rows,
        inverse=inverse,
    )


def _distinct(key: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """First row of each distinct row of `key`, and for every row the number of its like."""
    weights = np.random.default_rng(0).integers(1, 2**63, size=key.shape[1], dtype=np.uint64) | np.uint64(1)
    mixed = (np.ascontiguousarray(key).view(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    if not np.array_equal(key[first][inverse], key):  # two rows mixed to one number: price every row by itself
        return np.arange(key.shape[0]), np.arange(key.shape[0])
    return first, inverse
