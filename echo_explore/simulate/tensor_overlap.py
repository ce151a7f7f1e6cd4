"""Pieces of a trace with gathers and scatters of activations decomposed beside their products, and their prices."""

from dataclasses import replace

import numpy as np

from echo_explore.graph import (
    Axis,
    Decomposed,
    ExecutionGraph,
    TimedGraph,
    Trace,
    decompose,
    is_layer,
    paired_with_products,
    select_rows,
)
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate

RESERVED_SMS = 16
"""SMs that the parts of a product leave to pipelined reduce-scatters (Transformer Engine 2.x (2025),
pytorch/module/base.py, get_default_config: num_sm 16, set_sm_margin; NeMo's files of 2024 and 2025 have 8 to 32)."""


class TensorOverlap:
    """What a candidate runs of its trace, priced.

    Layers are decomposed where the recipe overlaps tensor-parallel communication and the group shares scale-up links,
    which the buffers that peers write to need; embedding and head are not (their layers are not among those that
    Transformer Engine's buffers are made for, and torchtitan compiles layer by layer).
    """

    def __init__(self, candidate: Candidate, trace: Trace, pricer: Pricer) -> None:
        self._pricer = pricer
        self._parts: dict[tuple[str, bool], tuple[ExecutionGraph, Decomposed]] = {}
        self.trace = self._decomposed(candidate, trace)

    def _decomposed(self, candidate: Candidate, trace: Trace) -> Trace:
        layout, num_sms = candidate.layout, candidate.cluster.device.num_sms
        self._confined_factor = num_sms / max(num_sms - RESERVED_SMS, 1)
        overlaps = candidate.overlaps_tensor and self._pricer.shape(Axis.TENSOR).num_nodes == 1
        if not overlaps:
            return trace
        pieces = dict(trace.pieces)
        for name, piece in trace.pieces.items():
            if not is_layer(name):
                continue
            graphs = []
            for backward, traced in ((False, piece.forward), (True, piece.backward)):
                graph = paired_with_products(traced) if candidate.stack.tensor_overlap == "async-tp" else traced
                parts = decompose(graph, num_ranks=layout.tensor_parallel, method=candidate.stack.tensor_overlap)
                self._parts[name, backward] = (graph, parts)
                graphs.append(parts.graph)
            pieces[name] = replace(piece, forward=graphs[0], backward=graphs[1])
        return replace(trace, pieces=pieces)

    def price(self, name: str, *, backward: bool) -> TimedGraph:
        """A priced piece.

        The parts of a product run on several streams, so that a part fills the SMs which the last blocks of the part
        before leave idle (Transformer Engine has three, `_stream_compute`, PyTorch two, `backend_stream`): n parts
        occupy the GPU for as long as the whole product, and only the last has a tail of its own. So all but the last
        take 1/n of the whole, the last what its own size takes; parts that leave RESERVED_SMS of S SMs free, longer:
        t_1..t_(n-1) = f T / n, t_n = f max(T / n, t(size / n)), f = 1 or S / (S - RESERVED_SMS).

        # Approximation: f as if every product were bound by arithmetic (over-estimates small ones).
        """
        if (name, backward) not in self._parts:
            piece = self.trace.pieces[name]
            return self._pricer.price(piece.backward if backward else piece.forward)
        graph, parts = self._parts[name, backward]
        is_part = parts.whole >= 0
        mask = np.zeros(graph.num_ops, dtype=np.bool_)
        mask[parts.whole[is_part]] = True
        whole = select_rows(graph, mask)
        whole_s = np.zeros(graph.num_ops)
        whole_s[whole.rows] = self._pricer.price(whole.graph).time_s
        share_s = np.where(is_part, whole_s[parts.whole] / parts.num_parts, np.nan)
        own_s = self._pricer.price(parts.graph, is_aside=parts.is_aside).time_s
        known_s = np.where(parts.is_last, np.fmax(share_s, own_s), share_s)
        known_s = np.where(parts.is_confined, self._confined_factor, 1.0) * known_s
        return self._pricer.price(parts.graph, known_s=known_s, is_aside=parts.is_aside)
