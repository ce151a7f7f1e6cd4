"""One rank of a fake cluster with Megatron's process groups, each known by its axis."""

from dataclasses import dataclass
from typing import Any

from echo_explore.graph import Axis
from echo_explore.tracing import fake_cluster, fused_dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of parallelism of a job, and the rank that is played."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    rank: int = 0
    num_gpus: int | None = None

    @property
    def world_size(self) -> int:
        """GPUs of the job; what the degrees make, unless given."""
        return self.num_gpus or self.tensor * self.pipeline * self.context * self.data


def start_cluster(degrees: Degrees) -> dict[str, Axis]:
    """Be one rank of a fake cluster; the axis of every process group by its name."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a, moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    parallel_state.destroy_model_parallel()
    fused_dispatch.forget_buffers(fused_a2a)
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None  # a fake tensor of the trace before
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    MTPLossLoggingHelper.tracker = {}
    fake_cluster.start(degrees.rank, degrees.world_size)
    parallel_state.initialize_model_parallel(
        degrees.tensor,
        degrees.pipeline,
        degrees.virtual if degrees.virtual > 1 else None,
        context_parallel_size=degrees.context,
        expert_model_parallel_size=degrees.expert,
        expert_tensor_parallel_size=degrees.expert_tensor,
        create_gloo_process_groups=False,
    )
    return _axes(parallel_state)


def _axes(parallel_state: Any) -> dict[str, Axis]:
    whole = parallel_state.get_expert_tensor_parallel_world_size() == 1
    groups = {
        Axis.TENSOR: [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_and_context_parallel_group(),
        ],
        Axis.CONTEXT: [parallel_state.get_context_parallel_group()],
        Axis.PIPELINE: [parallel_state.get_pipeline_model_parallel_group()],
        # With the distributed optimizer the gradient norm is summed over replicas too.
        Axis.MODEL: [
            parallel_state.get_model_parallel_group(),
            parallel_state.get_intra_distributed_optimizer_instance_group(check_initialized=False),
        ],
        # Where experts are whole on their rank, the group of the axis EXPERT_MODEL is that of EXPERT.
        Axis.EXPERT_MODEL: [parallel_state.get_expert_tensor_and_model_parallel_group()],
        Axis.EXPERT_TENSOR: [parallel_state.get_expert_tensor_parallel_group()],
        Axis.EXPERT: [
            parallel_state.get_expert_model_parallel_group(),
            *([parallel_state.get_expert_tensor_and_model_parallel_group()] if whole else []),
        ],
        Axis.EXPERT_DATA: [
            parallel_state.get_expert_data_parallel_group(),
            parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
        ],
        Axis.EMBEDDING: [
            parallel_state.get_embedding_group(check_initialized=False),
            parallel_state.get_position_embedding_group(check_initialized=False),
        ],
        Axis.DATA: [
            parallel_state.get_data_parallel_group(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        ],
    }
    return {
        group.group_name: axis
        for axis, listed in groups.items()
        for group in listed
        if group is not None and group.size() > 1
    }
