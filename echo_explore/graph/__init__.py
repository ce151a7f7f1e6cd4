"""Execution graphs as column arrays, traces made of pieces, and passes over them."""

from echo_explore.graph.backward_split import input_rows, select_rows
from echo_explore.graph.chakra import load_chakra, load_chakra_trace, save_chakra
from echo_explore.graph.compose import ChunkShape, backward_graph, chunk_pieces, forward_graph
from echo_explore.graph.decompose import Decomposed, OverlapMethod, decompose
from echo_explore.graph.execution_graph import ExecutionGraph, OpRow, build_graph, concatenate, op_rows
from echo_explore.graph.kinds import DTYPE_BYTES, Axis, Collective, DType, OpClass, OpKind, Phase
from echo_explore.graph.paired import paired_with_products
from echo_explore.graph.rank_trace import RankTrace, groups_of_rows, load_rank_trace, save_rank_trace
from echo_explore.graph.regroup import is_layer, piece_of, with_pieces
from echo_explore.graph.reorder import reordered
from echo_explore.graph.storage import load_graph, load_trace, save_graph, save_trace
from echo_explore.graph.stream_order import Ordered, StreamJoin, order_streams
from echo_explore.graph.timed import TimedGraph
from echo_explore.graph.trace import Parameter, Piece, Trace, tensor_label, weight_matrices

__all__ = [
    "DTYPE_BYTES",
    "Axis",
    "ChunkShape",
    "Collective",
    "DType",
    "Decomposed",
    "ExecutionGraph",
    "OpClass",
    "OpKind",
    "OpRow",
    "Ordered",
    "OverlapMethod",
    "Parameter",
    "Phase",
    "Piece",
    "RankTrace",
    "StreamJoin",
    "TimedGraph",
    "Trace",
    "backward_graph",
    "build_graph",
    "chunk_pieces",
    "concatenate",
    "decompose",
    "forward_graph",
    "groups_of_rows",
    "input_rows",
    "is_layer",
    "load_chakra",
    "load_chakra_trace",
    "load_graph",
    "load_rank_trace",
    "load_trace",
    "op_rows",
    "order_streams",
    "paired_with_products",
    "piece_of",
    "reordered",
    "save_chakra",
    "save_graph",
    "save_rank_trace",
    "save_trace",
    "select_rows",
    "tensor_label",
    "weight_matrices",
    "with_pieces",
]
