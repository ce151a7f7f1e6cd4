"""Bytes of parameters, gradients and optimizer states on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from echo_explore.graph import Parameter, weight_matrices
from echo_explore.specs import Candidate
from echo_explore.specs.optimizer import AdamStates, adam_states

PARAMETER_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "mxfp8": 2.0, "nvfp4": 2.0}
"""Bytes of a parameter by precision; 8- and 4-bit recipes keep bf16 parameters [megatron-core 0.16.1, 2026-11-30]."""
QUANTISED_COPY_BYTES: Final = {"fp8": 2.0, "mxfp8": 2.0625, "nvfp4": 1.125}
"""Bytes a weight of the quantised copies kept for forward and backward (row-wise and column-wise): 1 B each for fp8,
with 1/32 B of scales for mxfp8, 1/2 B and 1/16 B of scales for nvfp4 [Transformer Engine 2.x user guide, 2025]."""
NARROW_PARAMETERS: Final = ("fp8", "mxfp8")
"""Precisions whose weights may have no 16-bit copy [megatron-core 0.16.1, --fp8-param-gather, 2026-12-01]."""
GRADIENT_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
"""Bytes of a main gradient by StackProfile.gradient_dtype."""
ADAM_BYTES: Final = 8.0
"""Both moments of Adam in fp32, a parameter [Kingma and Ba, arXiv 1412.6980, 2014]."""
_WIDE_BYTES: Final = 4.0
"""fp32."""
MUON_BYTES: Final = 4.0
"""Muon's momentum in fp32, a parameter [megatron-core 0.16.1, optimizer/muon.py, 2026-12-01]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticState:
    """Bytes on one rank that stay for the whole step.

    Attributes:
        update_bytes: more than that, alive only while the optimizer runs.
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    update_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes a parameter element for a candidate.

    Attributes:
        matrix_optimizer_bytes: the same of weight matrices where Muon updates them; None: optimizer_bytes.
        dense_shards: ranks over which optimizer states of dense parameters are spread.
        expert_shards: the same for parameters of experts.
        update_bytes: of what is alive only while the optimizer runs, for each weight that a rank updates.
        whole_shards: ranks over which parameters and gradients are spread too (FSDP2; else 1).
        narrow_parameters: weight matrices are kept in their quantised copies only.
        one_orientation: frozen weights are kept in one of the two quantised copies.
    """

    parameter_bytes: float
    quantised_copy_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    dense_shards: int
    expert_shards: int
    matrix_optimizer_bytes: float | None = None
    update_bytes: float = 0.0
    whole_shards: int = 1
    narrow_parameters: bool = False
    one_orientation: bool = False

    @property
    def weight_bytes(self) -> float:
        """Bytes of an element of a weight matrix: its own, and its quantised copies."""
        return (0.0 if self.narrow_parameters else self.parameter_bytes) + self.quantised_copy_bytes

    @property
    def frozen_weight_bytes(self) -> float:
        """The same of a weight that is not trained."""
        return self.weight_bytes - (self.quantised_copy_bytes / 2 if self.one_orientation else 0.0)


def state_bytes(candidate: Candidate) -> StateBytes:
    """Bytes a parameter: 2 + 4 + 12 / shards in mixed precision, 4 + 4 + 8 / shards in fp32.

    With the distributed optimizer (ZeRO stage 1, Rajbhandari et al., arXiv 1910.02054, 2019) shards is dp * cp for
    dense parameters and the size of the expert-data group tp * cp * dp / (etp * ep) for experts, times the copies of
    the model that the schedule keeps; else 1. The gradient takes StackProfile.main_gradient_dtype. Matrices that Muon
    updates have one moment, not two: 4 bytes less. Under a precision-aware Adam moments and main weights take what
    `specs.optimizer.adam_states` says.
    """
    layout, precision = candidate.layout, candidate.recipe.precision
    if candidate.stack.framework != "megatron":
        return _native_state_bytes(candidate)
    mixed = precision != "fp32"
    copies = candidate.schedule.num_copies
    replicas = layout.data_parallel * layout.context_parallel * copies
    states = adam_states(candidate.recipe, candidate.stack)
    master_bytes = states.main_bytes if mixed else 0.0
    sharded = bool(candidate.recipe.distributed_optimizer)
    return StateBytes(
        parameter_bytes=PARAMETER_BYTES[precision],
        quantised_copy_bytes=QUANTISED_COPY_BYTES.get(precision, 0.0),
        gradient_bytes=_gradient_bytes(candidate) if mixed else 4.0,
        optimizer_bytes=states.moment_bytes + master_bytes,
        update_bytes=_update_bytes(candidate, states) if mixed else 0.0,
        matrix_optimizer_bytes=MUON_BYTES + master_bytes if candidate.recipe.optimizer == "muon" else None,
        dense_shards=replicas if sharded else 1,
        expert_shards=layout.expert_data_parallel * copies if sharded else 1,
        narrow_parameters=candidate.stack.narrow_parameters and precision in NARROW_PARAMETERS,
        one_orientation=not candidate.stack.keeps_transposed_weights and precision in NARROW_PARAMETERS,
    )


def _update_bytes(candidate: Candidate, states: AdamStates) -> float:
    """fp32 gradients beside narrow ones, and narrow states in fp32.

    Megatron's table of bytes counts the former: 20 a parameter in fp16 with gradients of fp16, 4 + 16 / d sharded
    (Megatron-LM, docs/source/api-guide/dist_optimizer.md, 2025).
    """
    narrow = candidate.stack.main_gradient_dtype(candidate.recipe.precision) != "fp32"
    casts = narrow and not states.holds_main
    return _WIDE_BYTES * (casts + len(states.widened))


def _gradient_bytes(candidate: Candidate) -> float:
    own = PARAMETER_BYTES[candidate.recipe.precision] if candidate.stack.keeps_model_gradients else 0.0
    return GRADIENT_BYTES[candidate.stack.main_gradient_dtype(candidate.recipe.precision)] + own


def _native_state_bytes(candidate: Candidate) -> StateBytes:
    """FSDP2 (ZeRO stage 3) and DDP: fp32 parameters, gradients and moments, 16 / shards; DDP has buckets of its own.

    DDP's gradients are views of its buckets only where asked for (torch 2.13, gradient_as_bucket_view = False).
    """
    sharded = candidate.stack.fully_sharded
    shards = candidate.num_shards
    copies = 1 if sharded or candidate.layout.data_parallel == 1 else 2
    return StateBytes(
        parameter_bytes=4.0,
        quantised_copy_bytes=0.0,
        gradient_bytes=4.0 * copies,
        optimizer_bytes=ADAM_BYTES,
        dense_shards=shards,
        expert_shards=shards,
        whole_shards=shards,
    )


def _is_quantised(parameter: Parameter) -> bool:
    """Weights of linear layers and of grouped experts, whose narrow copies are kept beside them."""
    grouped = ".experts." in parameter.name and ".weight" in parameter.name
    return grouped or (parameter.tensor_sharded and parameter.name.endswith(".weight"))


def static_state(parameters: Sequence[Parameter], each: StateBytes) -> StaticState:
    """Bytes of the parameters that a rank holds."""
    dense = sum(p.num_elements for p in parameters if not p.expert and p.trainable)
    expert = sum(p.num_elements for p in parameters if p.expert and p.trainable)
    frozen = sum(p.num_elements for p in parameters if not p.trainable)
    quantised = sum(p.num_elements for p in parameters if _is_quantised(p))
    still = sum(p.num_elements for p in parameters if _is_quantised(p) and not p.trainable)
    if each.whole_shards > 1:
        weights_bytes = quantised * each.parameter_bytes / each.whole_shards
    else:
        weights_bytes = (quantised - still) * each.weight_bytes + still * each.frozen_weight_bytes
    optimizer_bytes = (dense / each.dense_shards + expert / each.expert_shards) * each.optimizer_bytes
    if each.matrix_optimizer_bytes is not None:  # whole on every rank
        matrices = sum(p.num_elements for p in weight_matrices(parameters))
        optimizer_bytes -= matrices * (each.optimizer_bytes - each.matrix_optimizer_bytes)
    return StaticState(
        parameters_bytes=(dense + expert + frozen - quantised) * each.parameter_bytes / each.whole_shards
        + weights_bytes,
        gradients_bytes=(dense + expert) * each.gradient_bytes / each.whole_shards,
        optimizer_bytes=optimizer_bytes,
        update_bytes=(dense / each.dense_shards + expert / each.expert_shards) * each.update_bytes,
    )
