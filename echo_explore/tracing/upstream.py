"""Which functions of other libraries the tracer replaces or leans on, and as which source it knows them.

A test compares the installed sources with these digests, so that an upgrade is noticed function by function; the
tracing process compares versions before it patches anything.
"""

import hashlib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from echo_explore.core import TraceError
from echo_explore.tracing.torchtitan_import import titan
from echo_explore.tracing.versions import framework_versions

VERSIONS: Mapping[str, tuple[str, ...]] = {"torch": ("2.13", "2.14"), "megatron-core": ("0.16.1",)}
"""Versions (their beginnings) that the patches were written for and tried with, 2026-12-01."""


@dataclass(frozen=True, slots=True)
class Patched:
    """One function or class of another library.

    Attributes:
        target: `module:name`.
        digest: the first 16 hex digits of the SHA-256 of its source.
        where: the module of the tracer that replaces it.
    """

    target: str
    digest: str
    where: str


PATCHED = (
    Patched("megatron.core.transformer.torch_norm:WrappedTorchNorm", "6d92eb61752563e2", "megatron_shims"),
    Patched("megatron.core.distributed.param_and_grad_buffer:shard_buffer", "a2c83a1ecabaf2b5", "megatron_shims"),
    Patched(
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb", "2752798f27ef46ca", "megatron_shims"
    ),
    Patched("megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork", "6821e1e397253d43", "megatron_shims"),
    Patched("megatron.core.tensor_parallel.random:_get_all_rng_states", "0fd22c8e723e13ee", "megatron_shims"),
    Patched("megatron.core.tensor_parallel.random:_set_all_rng_states", "ecfe91a8fe3d8a00", "megatron_shims"),
    Patched("megatron.core.tensor_parallel.random:_fork_rng", "5a75f51c563dd3e2", "megatron_shims"),
    Patched("megatron.core.tensor_parallel.random:CheckpointFunction", "c3a2dcbe8e21e9cd", "recomputation"),
    Patched(
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        "306811df71072b74",
        "megatron_shims",
    ),
    Patched(
        "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch_postprocess",
        "78b473d56be996ec",
        "megatron_shims",
    ),
    Patched(
        "megatron.core.transformer.moe.token_dispatcher:_DeepepManager.dispatch", "a0506e81f028956f", "megatron_shims"
    ),
    Patched(
        "megatron.core.transformer.moe.token_dispatcher:_DeepepManager._indices_to_multihot",
        "95c3363238e6466e",
        "megatron_shims",
    ),
    Patched("megatron.core.transformer.moe.moe_utils:permute", "d0d97b02b3aed778", "megatron_shims"),
    Patched("megatron.core.transformer.moe.moe_utils:unpermute", "ea6cd690cdfdca62", "megatron_shims"),
    Patched(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
        "d884dd41c755342e",
        "latent_attention",
    ),
    Patched(
        "megatron.core.transformer.dot_product_attention:DotProductAttention", "cb919ef68d076f98", "core_attention"
    ),
    Patched("megatron.core.optimizer.clip_grads:get_grad_norm_fp32", "7fa2ba2493d43f1d", "oracles"),
    Patched(
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
        "0cb7a5fb6d0d59d6",
        "oracles",
    ),
    Patched("torch.nn.modules.module:Module._apply", "e50d01ca9c5c9b60", "fake_device"),
    Patched("torch.nn.parallel.distributed:DistributedDataParallel.__init__", "da510ad4ecdf98ae", "native_ddp"),
    Patched("torch.distributed.utils:_verify_param_shape_across_processes", "b5801b015a7904ba", "native_ddp"),
    Patched("torch.distributed.utils:_sync_module_states", "049009bffb5306ee", "native_ddp"),
    Patched(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
        "3f825e430de4cf68",
        "native_rank",
    ),
    Patched("torch.distributed.device_mesh:DeviceMesh", "48fb13244f98dbc2", "script_trace"),
    Patched("torch.distributed.device_mesh:init_device_mesh", "bb02ab8f9e531b0e", "script_trace"),
    Patched("torch.distributed.distributed_c10d:new_group", "8c5521f146902d89", "fake_cluster"),
    Patched("torch.distributed.distributed_c10d:all_gather_object", "df42d97f87f94cbe", "fake_cluster"),
    Patched("torch.distributed.distributed_c10d:gather_object", "a147590828d66983", "fake_cluster"),
    Patched("torch.distributed.distributed_c10d:broadcast_object_list", "8dded86590194276", "fake_cluster"),
    Patched("torch._subclasses.fake_tensor:init_gpu_context", "e6e85bdf66311ef0", "fake_device"),
    Patched("torchtitan.models.llama3.model.model:apply_rotary_emb", "69874cbc5ac57a4a", "torchtitan_model"),
    Patched("torchtitan.models.llama3.model.model:FeedForward", "d3a6d344ed21ffc9", "torchtitan_model"),
    Patched("torchtitan.models.llama3.infra.parallelize:parallelize_llama", "20ff543291f4a468", "torchtitan_model"),
    Patched("torchtitan.models.llama3.infra.parallelize:apply_fsdp", "aac252bf68dd736d", "torchtitan_model"),
    Patched("torch.amp.grad_scaler:GradScaler._maybe_opt_step", "8a0af39ee5d26cdc", "oracles"),
)
"""With torch 2.13.0, megatron-core 0.16.1 and torchtitan 0.2.2."""


def check_versions() -> None:
    """Refuse versions that the patches were not written for.

    Raises:
        TraceError: another version of a framework.
    """
    for name, version in framework_versions().items():
        known = VERSIONS[name]
        if not any(version == k or version.startswith(f"{k}.") for k in known):
            newest = known[-1]
            wanted = newest if newest.count(".") == 2 else f"{newest}.*"
            raise TraceError(
                f"{name} = {version}: the tracer's patches know {', '.join(known)}; fix: pip install {name}=={wanted}"
            )


def digest_of(target: str) -> str:
    """The digest of the installed source.

    Raises:
        AttributeError: it is gone.
        ImportError: its module is gone.
    """
    module, _, path = target.partition(":")
    library, _, inside = module.partition(".")
    value = titan(inside) if library == "torchtitan" else importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return hashlib.sha256(inspect.getsource(value).encode()).hexdigest()[:16]
