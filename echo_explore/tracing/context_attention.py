"""Attention over a sequence that is split over the context-parallel group, as Transformer Engine runs it.

Every rank holds two of 2 cp equal chunks of the sequence, chunk r and chunk 2 cp - 1 - r, so that all have the same
causal work. Tensors are [seq, batch, heads, head_dim] of this rank.

* p2p: keys and values go round a ring. Step 0 is causal on the diagonal; of what comes later a rank needs the first
  half of the keys for all its queries, or all of the keys for the second half of its queries. The next transfer runs
  beside the attention of this step. Parts are merged by their log-sum-exp. The backward goes the other way round and
  carries the gradients of keys and values along.
* all_gather: keys and values of all ranks are gathered, both chunks of queries attend to what precedes them; gradients
  are reduce-scattered.
* a2a: four exchanges turn a split of the sequence into a split of the heads and back (DeepSpeed-Ulysses).

References:
    Transformer Engine 2.8 (2025), pytorch/attention/dot_product_attention/context_parallel.py: AttnFuncWithCPAndKVP2P,
    AttnFuncWithCPAndKVAllGather, AttnFuncWithCPAndQKVOA2A. Rings: arXiv 2310.01889 (2023); Ulysses: 2309.14509.
"""

from typing import Any

import torch
import torch.distributed as dist

from echo_explore.tracing.fused_ops import attention_backward, attention_forward, sink_gradient

Tensor = torch.Tensor


def _send_and_receive(send: Tensor, receive: Tensor, group: Any, *, forwards: bool) -> list[Any]:
    """Start sending to the next rank of the ring and receiving from the one before."""
    size, rank = group.size(), group.rank()
    step = 1 if forwards else -1
    to, source = (dist.get_global_rank(group, (rank + d) % size) for d in (step, -step))
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, send, to, group), dist.P2POp(dist.irecv, receive, source, group)]
    )


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _joined(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _parted(joined: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    split = key.numel()
    return joined[:split].view(key.shape), joined[split:].view(value.shape)


def _half(tensor: Tensor, second: bool) -> Tensor:
    """First or second chunk of this rank."""
    half = tensor.shape[0] // 2
    return tensor[half:] if second else tensor[:half]


class RingAttention(torch.autograd.Function):
    """cp_comm_type p2p, causal."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float, window: int, group: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        size, rank, half = group.size(), group.rank(), query.shape[0] // 2
        message = _joined(key, value)
        works: list[Any] = []
        parts: list[tuple[Tensor, Tensor]] = []
        states: list[Tensor] = []
        for step in range(size):
            _wait(works)
            current = message
            if step < size - 1:
                message = torch.empty_like(current)
                works = _send_and_receive(current, message, group, forwards=True)
            keys, values = _parted(current, key, value)
            queries = query
            if 0 < step <= rank:
                keys, values = _half(keys, False), _half(values, False)
            elif step > rank:
                queries = _half(query, True)
            out, lse, rng = attention_forward(queries, keys, values, dropout, step == 0, scale, 0)
            if step == 0:
                total = lse.clone()
            else:
                torch.ops.echo.merge_lse(total[..., half:] if step > rank else total, lse)
            parts.append((out, lse))
            states.append(rng)
        merged = torch.empty_like(parts[0][0])
        for step, (out, lse) in enumerate(parts):
            late = step > rank
            target, weight = (_half(merged, True), total[..., half:]) if late else (merged, total)
            if step == 0:
                torch.ops.echo.merge_attention_first(target, out, weight, lse)
            else:
                torch.ops.echo.merge_attention(target, out, weight, lse)
        ctx.save_for_backward(query, message, merged, total, *states)
        ctx.shapes = (torch.empty_like(key, device="meta"), torch.empty_like(value, device="meta"))
        ctx.settings = (dropout, scale, group)
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: D102
        query, message, merged, total, *states = ctx.saved_tensors
        (dropout, scale, group), (key, value) = ctx.settings, ctx.shapes
        size, rank, half = group.size(), group.rank(), query.shape[0] // 2
        buffers = [message.new_empty((2, *message.shape)) for _ in range(2)]
        buffers[0][0].copy_(message)
        late_lse = total[..., half:].contiguous() if rank < size - 1 else total
        grad_query = torch.empty_like(query)
        works: list[Any] = []
        for step in range(size):
            _wait(works)
            sent, received = buffers[step % 2], buffers[(step + 1) % 2]
            part = slice(0, 1) if step == 0 else slice(1, 2) if step == size - 1 else slice(0, 2)
            works = _send_and_receive(sent[part], received[part], group, forwards=False)
            keys, values = _parted(sent[0], key, value)
            last, early = step == size - 1, step >= size - rank - 1
            rng = states[size - 1 - step]
            if last:
                arguments = (grad, query, keys, values, merged, total, rng)
            elif early:
                arguments = (grad, query, _half(keys, False), _half(values, False), merged, total, rng)
            else:
                late = (_half(t, True) for t in (grad, query, merged))
                late_grad, late_query, late_out = late
                arguments = (late_grad, late_query, keys, values, late_out, late_lse, rng)
            gq, gk, gv = attention_backward(*arguments, dropout, last, scale, 0)
            _add_query_gradient(grad_query, gq, step, size - rank - 1, size)
            _wait(works)
            works = []
            _add_key_gradient(received[1], gk, gv, key, value, step, rank, size)
        grad_key, grad_value = _parted(buffers[size % 2][1], key, value)
        return grad_query, grad_key, grad_value, None, None, None, None, None


def _add_query_gradient(total: Tensor, part: Tensor, step: int, turn: int, size: int) -> None:
    """Halves are copied where they come first; from step `turn` on gradients are of all queries."""
    if step > turn:
        total.add_(part)
    elif step == turn:
        if step == 0:
            total.copy_(part)
        else:
            _half(total, False).copy_(_half(part, False))
            _half(total, True).add_(_half(part, True))
    elif step > 0:
        _half(total, True).add_(part)
    else:
        _half(total, True).copy_(part)


def _add_key_gradient(
    total: Tensor, part_key: Tensor, part_value: Tensor, key: Tensor, value: Tensor, step: int, rank: int, size: int
) -> None:
    """Add the gradients of keys and values of one step to what came round the ring."""
    part = _joined(part_key, part_value)
    if step < size - 1 and step >= size - rank - 1:
        first_key, first_value = (_half(t, False) for t in _parted(total, key, value))
        split = part_key.numel()
        pieces = ((first_key, part[:split].view(part_key.shape)), (first_value, part[split:].view(part_value.shape)))
        for target, piece in pieces:
            if step == 0:
                target.copy_(piece)
            else:
                target.add_(piece)
        if step == 0:
            for whole in _parted(total, key, value):
                _half(whole, True).zero_()
    elif step == 0:
        total.copy_(part)
    else:
        total.add_(part)


class GatheredAttention(torch.autograd.Function):
    """cp_comm_type all_gather, causal."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float, window: int, group: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        keys, values = (_in_order(_gather(t, group), group) for t in (key, value))
        merged = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        saved: list[Tensor] = []
        for second in (False, True):
            seen = _seen(query.shape[0] // 2, second, window, group)
            out, lse, rng = attention_forward(
                _half(query, second), keys[seen], values[seen], dropout, True, scale, window
            )
            _half(merged, second).copy_(out)
            saved += [out, lse, rng]
        ctx.save_for_backward(query, key, value, *saved)
        ctx.settings = (dropout, scale, window, group)
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: D102
        query, key, value, *saved = ctx.saved_tensors
        dropout, scale, window, group = ctx.settings
        keys, values = (_in_order(_gather(t, group), group) for t in (key, value))
        grad_query = torch.empty_like(query)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for second in (False, True):
            seen = _seen(query.shape[0] // 2, second, window, group)
            out, lse, rng = saved[3:] if second else saved[:3]
            gq, gk, gv = attention_backward(
                _half(grad, second), _half(query, second), keys[seen], values[seen], out, lse, rng,
                dropout, True, scale, window,
            )  # fmt: skip
            _half(grad_query, second).copy_(gq)
            grad_keys[seen].add_(gk)
            grad_values[seen].add_(gv)
        own = [_scatter(_in_order(g, group), group) for g in (grad_keys, grad_values)]
        return grad_query, *own, None, None, None, None, None


def _seen(chunk: int, second: bool, window: int, group: Any) -> slice:
    """Keys that a chunk of queries attends to, of the whole sequence in order."""
    number = 2 * group.size() - 1 - group.rank() if second else group.rank()
    start = max(0, number * chunk - window) if window else 0
    return slice(start, (number + 1) * chunk)


def _gather(tensor: Tensor, group: Any) -> Tensor:
    out = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
    dist.all_gather_into_tensor(out, tensor.contiguous(), group=group)
    return out


def _scatter(tensor: Tensor, group: Any) -> Tensor:
    out = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    dist.reduce_scatter_tensor(out, tensor, group=group)
    return out


def _in_order(tensor: Tensor, group: Any) -> Tensor:
    """Chunks by rank put into the order of the sequence, or back: one copy."""
    chunks = 2 * group.size()
    order = torch.empty((chunks,), dtype=torch.int64, device=tensor.device)
    parted = tensor.view(chunks, tensor.shape[0] // chunks, *tensor.shape[1:])
    return torch.index_select(parted, 0, order).view(tensor.shape)


class HeadExchangeAttention(torch.autograd.Function):
    """cp_comm_type a2a, causal."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float, window: int, group: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        queries, keys, values = (_to_heads(t, group) for t in (query, key, value))
        out, lse, rng = attention_forward(queries, keys, values, dropout, True, scale, window)
        ctx.save_for_backward(queries, keys, values, out, lse, rng)
        ctx.settings = (dropout, scale, window, group)
        ctx.sinks = sink_gradient(sinks)
        return _to_sequence(out, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: D102
        dropout, scale, window, group = ctx.settings
        grads = attention_backward(_to_heads(grad, group), *ctx.saved_tensors, dropout, True, scale, window)
        return *(_to_sequence(g, group) for g in grads), None, None, None, None, ctx.sinks()


def _to_heads(tensor: Tensor, group: Any) -> Tensor:
    """From this rank's tokens with all heads to all tokens with this rank's heads."""
    size = group.size()
    seq, batch, heads, width = tensor.shape
    sent = tensor.view(seq, batch, size, heads // size, width).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return _in_order(received.view(size * seq, batch, heads // size, width), group)


def _to_sequence(tensor: Tensor, group: Any) -> Tensor:
    """Back again."""
    size = group.size()
    seq, batch, heads, width = tensor.shape
    sent = _in_order(tensor, group).view(size, seq // size, batch, heads, width)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 2).reshape(seq // size, batch, size * heads, width)


CONTEXT_ATTENTION: dict[str, Any] = {
    "p2p": RingAttention,
    "all_gather": GatheredAttention,
    "a2a": HeadExchangeAttention,
}
"""By how keys and values travel; names of Megatron's cp_comm_type."""
