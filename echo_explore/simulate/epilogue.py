"""The end of a step as Megatron-core runs it: the last gradient sums, gradient norm, clipping, update, copies.

Follows megatron-core 0.16.1 (finalize_model_grads.py, optimizer/optimizer.py, distrib_optimizer.py; 2026-11-30). The
sizes follow from the parameters of the stage; the traced whole-rank graph is the check (tests/tracing).
"""

from dataclasses import dataclass, field, replace

from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, OpClass, OpKind, OpRow, Phase, build_graph
from echo_explore.simulate.muon import MuonUpdate
from echo_explore.specs.optimizer import STATE_BYTES, AdamStates


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueFacts:
    """What the end of the step of one stage depends on; sizes are elements on this rank.

    Attributes:
        num_elements: parameters of the stage.
        num_shard_elements: parameters that this rank updates (all, or its data-parallel share).
        sequence_parallel_elements: replicated parameters whose gradients are summed over the tensor-parallel group.
        embedding_elements: tied word embedding shared by the first and last stage; 0 elsewhere.
        gather_elements: padded sizes of the parameter buckets gathered here, after the update (none when overlapped).
        parameter_bytes: bytes of an element of the parameters.
        gradient_bytes: bytes of an element of the main gradients.
        states: in which types Adam keeps its states; without holds_main narrow gradients are cast to fp32 ahead of it.
        master_copy: parameters have an FP32 master copy.
        loss_scaling: gradients are checked for overflow first (FP16).
        model_ranks: ranks that agree on the gradient norm.
        data_ranks: ranks whose gradients are averaged.
        num_updated: parameter tensors of which this rank updates all or a part.
        expert_gather_elements: as gather_elements, of routed experts over the expert-data group.
        muon: updates of matrices by Muon, ahead of Adam's of everything else.
    """

    num_elements: int
    num_shard_elements: int
    sequence_parallel_elements: int
    embedding_elements: int
    gather_elements: tuple[int, ...]
    parameter_bytes: float
    gradient_bytes: float
    master_copy: bool
    loss_scaling: bool
    tensor_parallel: int
    model_ranks: int
    data_ranks: int
    num_updated: int = 0
    expert_gather_elements: tuple[int, ...] = ()
    muon: tuple[MuonUpdate, ...] = ()
    states: AdamStates = field(default_factory=AdamStates)

    @property
    def update_gradient_bytes(self) -> float:
        """Bytes of an element of the gradients that norm, clipping and update read."""
        return self.gradient_bytes if self.states.holds_main else 4.0


def epilogue_graph(facts: EpilogueFacts) -> ExecutionGraph:
    """Rows from the end of the last backward to the end of the step.

    `host_calls` counts parameters that the host handles, all at the update: what it does ahead of the gradient norm
    lies beside the last backward where kernels are the slower (under-estimates where the host is).
    """
    rows: list[OpRow] = []
    if facts.data_ranks > 1:
        # Approximation: Megatron divides each bucket before its reduction; here all are divided at the end of the
        # backward, which over-estimates where reductions wait for later buckets anyway.
        size = facts.num_elements * facts.gradient_bytes
        rows.append(_pass(OpClass.ELEMENTWISE, "divide_gradients", facts.num_elements, size, size))
    if facts.embedding_elements:
        size = facts.embedding_elements * facts.gradient_bytes
        rows.append(_sum(Axis.EMBEDDING, size, "embedding gradients"))
    if facts.sequence_parallel_elements and facts.tensor_parallel > 1:
        size = facts.sequence_parallel_elements * facts.gradient_bytes
        rows += [_pass(OpClass.COPY, "flatten", facts.sequence_parallel_elements, size, size)]
        rows += [_sum(Axis.TENSOR, size, "norm gradients")]
        rows += [_pass(OpClass.COPY, "unflatten", facts.sequence_parallel_elements, size, size)]
    shard, gradient = facts.num_shard_elements, facts.num_shard_elements * facts.update_gradient_bytes
    if facts.gradient_bytes < facts.update_gradient_bytes:
        rows.append(_pass(OpClass.COPY, "gradients_to_fp32", shard, shard * facts.gradient_bytes, gradient))
    if facts.loss_scaling:
        rows.append(_pass(OpClass.ELEMENTWISE, "unscale_and_check", shard, gradient, gradient))
        rows += _agree(facts, "found_inf")
    rows.append(_pass(OpClass.REDUCTION, "multi_tensor_l2norm", shard, gradient, 4.0))
    rows += _agree(facts, "gradient norm")
    rows.append(_pass(OpClass.ELEMENTWISE, "multi_tensor_scale", shard, gradient, gradient))
    rows += _updates(facts)
    for elements in facts.gather_elements:
        rows.append(_gather(elements * facts.parameter_bytes, Axis.DATA))
    for elements in facts.expert_gather_elements:
        rows.append(_gather(elements * facts.parameter_bytes, Axis.EXPERT_DATA))
    rows.append(
        _pass(OpClass.COPY, "zero_gradients", facts.num_elements, 0.0, facts.num_elements * facts.gradient_bytes)
    )
    return build_graph(rows)


def _updates(facts: EpilogueFacts) -> list[OpRow]:
    """Muon's matrices and their copies, then Adam's shard and its copy."""
    rows: list[OpRow] = []
    for update in facts.muon:
        for block in update.blocks:
            for kind, size, dtype in block.messages:
                rows += update.count * [_exchange(kind, size, dtype, update.axis)]
        rows.append(update.row())
    orthogonal = sum(update.num_elements for update in facts.muon)
    if orthogonal and facts.master_copy:
        rows.append(_to_model(facts, orthogonal))
    rest = facts.num_shard_elements - orthogonal
    return rows + _adam(facts, rest)


def _adam(facts: EpilogueFacts, elements: int) -> list[OpRow]:
    """Adam of `elements` weights, with the casts of narrow states around it.

    What the kernel reads and writes of every state is fp32; it completes bf16 weights, or writes them.

    # Approximation: the host's part of the casts, three launches a state and parameter, is left out (under-estimates).
    """
    states = facts.states
    main = 2.0 if states.completes else 4.0
    moved = elements * (8.0 + main)  # both moments and the main weight
    own = facts.parameter_bytes * elements if states.holds_main else 0.0
    gradient = facts.update_gradient_bytes * elements
    read = gradient + moved + (own if states.completes else 0.0)
    update = _pass(OpClass.OPTIMIZER, "adam", elements, read, moved + own)
    rows = [*_casts(states, elements, back=False), replace(update, host_calls=facts.num_updated)]
    rows += _casts(states, elements, back=True)
    return [*rows, _to_model(facts, elements)] if facts.master_copy and not states.holds_main else rows


def _casts(states: AdamStates, elements: int, *, back: bool) -> list[OpRow]:
    """Passes over narrow states, as Transformer Engine launches them.

    A state of fp16 is cast and multiplied by its scale; back, its maximum is found, it is divided and cast. One of fp8
    is cast; back, its maximum is found and it is cast. One of bf16 is cast; back it is cast and copied. (Commit
    04912bf, 2025, pytorch/optimizers/fused_adam.py, get_unscaled_state and _apply_scale.)
    """
    rows = []
    for kind in states.widened:
        narrow, wide = STATE_BYTES[kind] * elements, 4.0 * elements
        if not back:
            rows.append(_pass(OpClass.COPY, "widen_state", elements, narrow, wide))
        elif kind != "bf16":
            rows.append(_pass(OpClass.REDUCTION, "largest_of_state", elements, wide, 0.0))
        if kind == "fp16":
            rows.append(_pass(OpClass.ELEMENTWISE, "scale_state", elements, wide, wide))
        if back:
            rows.append(_pass(OpClass.COPY, "narrow_state", elements, wide, narrow))
        if back and kind == "bf16":
            rows.append(_pass(OpClass.COPY, "copy_state", elements, narrow, narrow))
    return rows


def _to_model(facts: EpilogueFacts, elements: int) -> OpRow:
    return _pass(OpClass.COPY, "master_to_model", elements, 4.0 * elements, facts.parameter_bytes * elements)


def _exchange(kind: str, message_bytes: float, dtype: DType, axis: Axis) -> OpRow:
    total = replace(_sum(axis, message_bytes, "muon"), dtype=dtype)
    if kind == "sum":
        return total
    return replace(total, name="c10d.allgather_", collective=Collective.ALL_GATHER)


def _pass(op_class: OpClass, name: str, elements: int, read: float, written: float) -> OpRow:
    dims = (elements, 1) if op_class == OpClass.REDUCTION else (elements,)
    return OpRow(
        op_class=op_class,
        phase=Phase.OPTIMIZER,
        dtype=DType.FP32,
        name=name,
        module="optimizer",
        dims=dims,
        bytes_read=read,
        bytes_written=written,
        host_calls=0,
    )


def _sum(axis: Axis, message_bytes: float, what: str) -> OpRow:
    return OpRow(
        kind=OpKind.COLLECTIVE,
        phase=Phase.OPTIMIZER,
        dtype=DType.FP32,
        name="c10d.allreduce_",
        module=what,
        axis=axis,
        collective=Collective.ALL_REDUCE,
        message_bytes=message_bytes,
        host_calls=0,
    )


def _agree(facts: EpilogueFacts, what: str) -> list[OpRow]:
    sync = OpRow(kind=OpKind.HOST_SYNC, phase=Phase.OPTIMIZER, name="item", module=what, host_calls=0)
    return [*([_sum(Axis.MODEL, 4.0, what)] if facts.model_ranks > 1 else []), sync]


def _gather(message_bytes: float, axis: Axis) -> OpRow:
    return OpRow(
        kind=OpKind.COLLECTIVE,
        phase=Phase.OPTIMIZER,
        dtype=DType.BF16,
        name="c10d._allgather_base_",
        module="parameters",
        axis=axis,
        collective=Collective.ALL_GATHER,
        message_bytes=message_bytes,
        host_calls=0,
    )
