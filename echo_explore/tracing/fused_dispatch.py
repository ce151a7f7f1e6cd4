"""A stand-in for the package deep_ep: the fused exchanges of DeepEP and HybridEP, which Megatron's `flex` calls.

What each call launches follows deep_ep's Buffer (1.2, 2025) and HybridEPBuffer (branch hybrid-ep, 2025): a token goes
once to each rank that it visits, however many of that rank's experts it visits. The exchange is one collective row
whose `dims` hold tokens, bytes a token, experts, experts a token, groups and groups a token: hosts that it crosses are
known only where it is priced.
"""

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echo_explore.specs.routing import Routing
from echo_explore.tracing import expert_ops, fake_device
from echo_explore.tracing.recorder import Recorder

Tensor = torch.Tensor
Recorders = Callable[[], Sequence[Recorder]]
_recorders: Recorders = tuple

SCHEMAS = (
    "dispatch_layout(Tensor indices, int ranks, int experts) -> (Tensor, Tensor)",
    "hybrid_metadata(Tensor map) -> Tensor",
    "expand_tokens(Tensor tokens, int count) -> Tensor",
    "reduce_tokens(Tensor tokens, int count) -> Tensor",
)
IMPLEMENTATIONS: dict[str, Any] = {
    "dispatch_layout": lambda indices, ranks, experts: (
        indices.new_empty((experts,), dtype=torch.int32),
        indices.new_empty((indices.shape[0], ranks), dtype=torch.bool),
    ),
    "hybrid_metadata": lambda routing: routing.new_empty(routing.shape, dtype=torch.int32),
    "expand_tokens": lambda tokens, count: tokens.new_empty((count, tokens.shape[1])),
    "reduce_tokens": lambda tokens, count: tokens.new_empty((count, tokens.shape[1])),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one rank of a group exchanges: tokens it has, visits that reach it, rows that its experts compute."""

    group: Any
    num_tokens: int
    num_visits: int
    num_rows: int
    num_columns: int
    sent: float
    routing: Routing

    @property
    def tokens_per_expert(self) -> Any:
        """Rows that each expert of this rank computes, as an array of the host."""
        import numpy as np

        experts = self.num_columns // self.group.size()
        each = np.full(experts, self.num_rows // experts)
        each[0] += self.num_rows - each.sum()
        return each


def _plan(group: Any, num_tokens: int, num_columns: int, num_rows: int | None = None) -> _Plan:
    """The plan of the rank that is played.

    Args:
        group: expert and expert-tensor ranks together.
        num_tokens: of this rank.
        num_columns: experts, counted once for each expert-tensor rank, as Megatron lays out its routing map.
        num_rows: rows for experts of this rank where padding fixes them.
    """
    routing = expert_ops.current_routing()
    ranks, copies = group.size(), num_columns // routing.num_experts
    units, local = ranks // copies, num_columns // ranks
    visits, unit = routing.visits(units), group.rank() // copies
    counts = routing.counts(num_tokens)[unit * local : (unit + 1) * local]
    return _Plan(
        group=group,
        num_tokens=num_tokens,
        num_visits=max(1, round(ranks * num_tokens * visits[unit])),
        num_rows=ranks * sum(counts) if num_rows is None else num_rows,
        num_columns=num_columns,
        sent=num_tokens * copies * sum(visits),
        routing=routing,
    )


def _exchange(name: str, plan: _Plan, given: Tensor, got: Tensor) -> None:
    """The row of an exchange; its size is what the busier of sending and receiving moves."""
    width = given.shape[1] * given.element_size()
    facts = plan.routing
    dims = (
        plan.num_tokens, width, facts.num_experts, facts.experts_per_token, facts.num_groups, facts.groups_per_token,
    )  # fmt: skip
    for recorder in _recorders():
        recorder.exchange(
            name, plan.group, given, got, message_bytes=max(plan.sent, plan.num_visits) * width, dims=dims
        )


class EventHandle:
    """deep_ep's CUDA event."""


class EventOverlap:
    """deep_ep's handle of something that runs on its communication stream."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """The exchange's row is one that the compute stream waits for."""


class _Config:
    def get_nvl_buffer_size_hint(self, *_: Any) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    """deep_ep.Buffer: high-throughput kernels over NVLink and the network."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(count: int) -> None:
        """Nothing of a trace depends on it."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> _Config:
        """Of deep_ep's tables."""
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """One kernel."""
        per_expert, in_rank = torch.ops.echo.dispatch_layout(indices, self.group.size(), num_experts)
        return per_expert, None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self, x: Tensor, handle: Any = None, topk_idx: Any = None, topk_weights: Any = None, **rest: Any
    ) -> Any:
        """Tokens to the ranks of their experts; without the handle of an earlier call the host waits for the counts."""
        if handle is None:
            fake_device.host_sync("deep_ep.dispatch: how many tokens arrive")
            columns = rest["num_tokens_per_expert"].shape[0]
            handle = _plan(self.group, x.shape[0], columns)
        got = x.new_empty((handle.num_visits, x.shape[1]))
        _exchange("deep_ep.dispatch", handle, x, got)
        if topk_idx is None:
            return got, None, None, None, handle, EventOverlap()
        indices = topk_idx.new_empty((handle.num_visits, topk_idx.shape[1]))
        weights = topk_weights.new_empty((handle.num_visits, topk_idx.shape[1]))
        return got, indices, weights, handle.tokens_per_expert.tolist(), handle, EventOverlap()

    def combine(self, x: Tensor, handle: _Plan, topk_weights: Any = None, **_: Any) -> Any:
        """Results back to the ranks of their tokens, summed on the way."""
        got = x.new_empty((handle.num_tokens, x.shape[1]))
        _exchange("deep_ep.combine", handle, x, got)
        weights = None
        if topk_weights is not None:
            weights = topk_weights.new_empty((handle.num_tokens, topk_weights.shape[1]))
        return got, weights, EventOverlap()


class HybridEPBuffer:
    """deep_ep.HybridEPBuffer: exchanges with the permutation of tokens for experts behind them."""

    def __init__(self, *, group: Any, num_local_experts: int, **_: Any) -> None:
        self._group, self._experts = group, num_local_experts

    def dispatch_with_permute(
        self, *, hidden: Tensor, handle: Any = None, routing_map: Any = None, probs: Any = None,
        num_permuted_tokens: Any = None, non_blocking: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        """Tokens to ranks, then a copy for each expert; without a known size the host waits for the counts."""
        if handle is None:
            everyone = routing_map.new_empty((routing_map.shape[0] * self._group.size(), routing_map.shape[1]))
            torch.distributed.all_gather_into_tensor(everyone, routing_map, group=self._group)
            torch.ops.echo.hybrid_metadata(everyone)
            counted = fake_device.FakeEvent()
            counted.record()
            rows = int(num_permuted_tokens) if non_blocking else None
            handle = _plan(self._group, hidden.shape[0], routing_map.shape[1], rows)
        got = hidden.new_empty((handle.num_visits, hidden.shape[1]))
        _exchange("deep_ep.hybrid_dispatch", handle, hidden, got)
        if routing_map is not None and not non_blocking:
            fake_device.host_sync("deep_ep.hybrid_dispatch: how many tokens arrive", counted)
        rows = torch.ops.echo.expand_tokens(got, handle.num_rows)
        weights = None if probs is None else probs.new_empty((handle.num_rows,), dtype=torch.float32)
        counts = torch.empty(self._experts, dtype=torch.int64)
        return rows, weights, None, counts, handle

    def combine_with_unpermute(self, *, hidden: Tensor, handle: _Plan, probs: Any = None, **_: Any) -> Any:
        """The sum of each rank's experts, then results back to the ranks of their tokens, summed on the way."""
        visits = torch.ops.echo.reduce_tokens(hidden, handle.num_visits)
        got = hidden.new_empty((handle.num_tokens, hidden.shape[1]))
        _exchange("deep_ep.hybrid_combine", handle, visits, got)
        weights = None
        if probs is not None:
            weights = hidden.new_empty((handle.num_tokens, handle.num_columns), dtype=torch.float32)
        return got, weights


def modules(recorders: Recorders) -> dict[str, dict[str, Any]]:
    """Members of the modules to install; exchanges are told to what `recorders` gives."""
    global _recorders
    _recorders = recorders
    members: dict[str, Any] = {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer}
    return {"deep_ep": members, "deep_ep.utils": {"EventHandle": EventHandle, "EventOverlap": EventOverlap}}


def forget_buffers(fused_a2a: types.ModuleType) -> None:
    """Let Megatron make its buffers anew: those of the trace before belong to another cluster."""
    for name in ("_buffer", "_hybrid_ep_buffer"):
        setattr(fused_a2a, name, None)
