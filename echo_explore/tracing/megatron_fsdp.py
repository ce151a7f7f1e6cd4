"""Megatron-FSDP itself (megatron-core 0.16.1, distributed/fsdp) around the chunks of a rank.

Its device meshes are made and read outside of the fake mode, as they hold numbers and no data of the model. Two checks
of how the shards of a DTensor lie, which ask all ranks and serve checkpoints, are left out: they run before the first
step. Everything else is its own: flat buffers, gathers ahead on a stream of theirs, reductions on another.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from echo_explore.graph import Axis
from echo_explore.tracing.latent_attention import DuplicatedLinear
from echo_explore.tracing.megatron_config import Schedule
from echo_explore.tracing.script_meshes import meshes_with_axes


@contextlib.contextmanager
def real_meshes(axes: dict[str, Axis]) -> Iterator[None]:
    """Meshes that say which ranks they hold although tensors are fake."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    mesh_type: Any = DeviceMesh
    adapter: Any = mcore_fsdp_adapter.FullyShardedDataParallel
    buffers: Any = param_and_grad_buffer
    mesh, make = mesh_type.mesh, adapter._init_dist_index
    module: Any = mcore_fsdp_adapter
    linear, random_states = module.TELinear, adapter.sync_rng_states_across_tp_group
    checks = {
        name: getattr(buffers, name) for name in ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata")
    }

    def mesh_outside(self: Any) -> Any:
        with _disable_current_modes():
            return mesh.fget(self)

    def index_outside(self: Any, groups: Any) -> Any:
        with _disable_current_modes():
            return make(self, groups)

    with meshes_with_axes(axes):
        mesh_type.mesh = property(mesh_outside)
        adapter._init_dist_index = index_outside
        adapter.sync_rng_states_across_tp_group = lambda _: None  # before the first step, and random states are none
        module.TELinear = DuplicatedLinear  # of Transformer Engine's linear layers it looks for those that are whole
        for name in checks:
            setattr(buffers, name, lambda *_, **__: None)
        try:
            yield
        finally:
            mesh_type.mesh = mesh
            adapter._init_dist_index = make
            adapter.sync_rng_states_across_tp_group = random_states
            module.TELinear = linear
            for name, check in checks.items():
                setattr(buffers, name, check)


def wrap_sharded(chunk: Any, config: Any, schedule: Schedule, *, reshard: bool) -> Any:
    """A chunk inside Megatron's mixed precision and Megatron-FSDP.

    Args:
        chunk: of `build_chunks`.
        config: of `config_of`.
        schedule: of which only the type of gradients counts; gathers and reductions always overlap.
        reshard: parameters are sharded too (ZeRO-3), not gradients and optimizer states alone (ZeRO-2).
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        data_parallel_sharding_strategy="optim_grads_params" if reshard else "optim_grads",
        grad_reduce_in_fp32=not schedule.narrow_gradients,
    )
    inner = Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk
    return FullyShardedDataParallel(config=config, ddp_config=settings, module=inner)
