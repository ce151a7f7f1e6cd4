"""Stage graphs from pieces: what one rank runs for one micro-batch of one model chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

from echo_explore.graph.execution_graph import ExecutionGraph, concatenate
from echo_explore.graph.regroup import is_layer, layer_names, num_led, piece_of
from echo_explore.graph.trace import Piece, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """The part of the model that one chunk of one stage holds.

    Attributes:
        first_layer: number of its first transformer layer in the whole model.
        num_layers: transformer layers it holds; may be 0.
        has_embedding: it starts with the embedding.
        has_head: it ends with final norm, logits and loss.
        recomputed: of each of its layers the size of the group that runs again together, 0 where it is kept; empty:
            every layer does as the trace does.
    """

    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    recomputed: tuple[int, ...] = ()

    def piece_names(self, layer_kinds: Sequence[str]) -> tuple[str, ...]:
        """Names of its pieces in forward order."""
        layers = layer_kinds[self.first_layer : self.first_layer + self.num_layers]
        return (
            *(("embedding",) if self.has_embedding else ()),
            *layer_names(layers, self.recomputed),
            *(("head",) if self.has_head else ()),
        )


def chunk_pieces(trace: Trace, shape: ChunkShape) -> tuple[Piece, ...]:
    """The pieces of the chunk in forward order."""
    return tuple(piece_of(trace, name) for name in shape.piece_names(trace.layer_kinds))


def _layer_numbers(trace: Trace, shape: ChunkShape) -> list[int]:
    """Of each piece the number that its rows count layers from."""
    numbers, layer = [], shape.first_layer
    for name in shape.piece_names(trace.layer_kinds):
        numbers.append(layer + 1 - num_led(name) if is_layer(name) else -1)
        layer += is_layer(name)
    return numbers


def forward_graph(trace: Trace, shape: ChunkShape) -> ExecutionGraph:
    """Forward of the chunk for one micro-batch."""
    return concatenate([p.forward for p in chunk_pieces(trace, shape)], layers=_layer_numbers(trace, shape))


def backward_graph(trace: Trace, shape: ChunkShape) -> ExecutionGraph:
    """Backward of the chunk for one micro-batch: the pieces in reverse."""
    pieces = [p.backward for p in reversed(chunk_pieces(trace, shape))]
    return concatenate(pieces, layers=_layer_numbers(trace, shape)[::-1])
