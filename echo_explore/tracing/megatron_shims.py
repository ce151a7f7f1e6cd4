"""What megatron-core 0.16.1 needs before it runs on fake tensors: stand-ins for extensions that are built for a GPU.

`before_import` must run before the first import of megatron, `after_import` after it. Each replacement says what it
stands for; none changes which kernels the program launches, except where it names the library that launches them.
"""

import contextlib
import functools
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from echo_explore.tracing import (
    emerging_stand_in,
    expert_ops,
    fused_dispatch,
    fused_ops,
    latent_attention,
    recomputation,
    router_ops,
)
from echo_explore.tracing.recorder import Recorder

_active: list[Recorder] = []


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let fused regions of Megatron report to `recorder`."""
    _active.append(recorder)
    try:
        with recorder:
            yield
    finally:
        _active.pop()


def recorders() -> tuple[Recorder, ...]:
    """The recorder that fused regions report to now; empty outside of a trace."""
    return tuple(_active[-1:])


def _compile_marker(function: Any = None, *_: Any, **__: Any) -> Any:
    """Instead of torch.compile (Megatron's jit_fuser): the function runs as it is, its kernels count as one."""
    if function is None:
        return _compile_marker
    if not isinstance(function, types.FunctionType):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _active:
            return function(*args, **kwargs)
        recorder = _active[-1]
        recorder.open_region(function.__name__)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            recorder.abandon_region()
            raise
        recorder.close_region()
        return result

    return call


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


class _FusedAdam(torch.optim.AdamW):
    """apex.optimizers.FusedAdam: one multi-tensor kernel a parameter group."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


class _FusedLayerNorm:
    """apex's FusedLayerNormAffineFunction: the kernel of torch's layer norm."""

    @staticmethod
    def forward(tensor: Any, weight: Any, bias: Any, shape: Any, eps: float, memory_efficient: bool = False) -> Any:
        return torch.nn.functional.layer_norm(tensor, tuple(shape), weight, bias, eps)

    apply = forward


def _batch_per_block(seq_q: int, seq_k: int, batch: int, heads: int) -> int:
    """Of Megatron's fused softmax kernel (Megatron-LM, scaled_masked_softmax_cuda.cu, get_batch_per_block)."""
    power = 1 << max(seq_k - 1, 1).bit_length()
    warp = min(power, 32)
    return (128 // warp) * (2 if power <= 128 else 1)


def _softmax(scores: Any, *_: Any) -> Any:
    return torch.ops.echo.scaled_causal_softmax(scores, 1.0)


def _softmax_backward(grad: Any, probabilities: Any, scale: Any) -> Any:
    """The extension writes its result over the incoming gradient."""
    torch.ops.echo.scaled_causal_softmax_backward(grad, probabilities, 1.0)
    return grad


def _apply_multi_tensor(op: Any, overflow: Any, lists: Any, *rest: Any) -> Any:
    return op(65536, overflow, lists, *rest)


def before_import() -> None:
    """Stand-ins for apex, amp_C and Megatron's CUDA extensions; torch.compile becomes a marker."""
    fused_ops.register()
    ops = torch.ops.echo
    library: Any = torch
    library.compile = _compile_marker
    _module(
        "fused_weight_gradient_mlp_cuda",
        wgrad_gemm_accum_fp32=ops.wgrad_gemm_accumulate,
        wgrad_gemm_accum_fp16=ops.wgrad_gemm_accumulate,
    )
    for name in ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"):
        _module(name, forward=_softmax, backward=_softmax_backward, get_batch_per_block=_batch_per_block)
    _module(
        "amp_C",
        multi_tensor_l2norm=lambda chunk, overflow, lists, per_tensor=False: (ops.multi_tensor_l2norm(lists[0]), None),
        multi_tensor_scale=lambda chunk, overflow, lists, scale: ops.multi_tensor_scale(*lists[:2], float(scale)),
    )
    _module("grouped_gemm", ops=types.SimpleNamespace(gmm=expert_ops.gmm))
    for name, members in (fused_dispatch.modules(recorders) | emerging_stand_in.modules()).items():
        _module(name, **members)
    _module("apex")
    _module("apex.multi_tensor_apply", multi_tensor_applier=_apply_multi_tensor)
    _module("apex.optimizers", FusedAdam=_FusedAdam, FusedSGD=torch.optim.SGD)
    _module("apex.normalization")
    _module(
        "apex.normalization.fused_layer_norm",
        FusedLayerNormAffineFunction=_FusedLayerNorm,
        FusedLayerNorm=type("FusedLayerNorm", (torch.nn.Module,), {}),
    )


def _norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False, normalization: str = "LayerNorm",
) -> torch.nn.Module:  # fmt: skip
    """Instead of WrappedTorchNorm.__new__, which refuses sequence parallelism that Transformer Engine's norms take."""
    kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
    norm = kind(hidden_size, eps=eps, device="cuda", dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class _LazyShards:
    """Instead of the list of all data-parallel views of a bucket, of which one is used: O(dp) fake views otherwise."""

    def __init__(self, buffer: torch.Tensor, count: int) -> None:
        self._buffer, self._count, self._size = buffer, count, buffer.numel() // count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._buffer[index * self._size : (index + 1) * self._size]


def after_import() -> None:
    """Replace what of megatron-core itself touches a GPU or depends on its absent libraries."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(_norm)
    param_and_grad_buffer.shard_buffer = lambda buffer, count: _LazyShards(buffer, count)
    rope: Any = fused_ops.Rope.apply
    rope_utils.fused_apply_rotary_pos_emb = lambda tensor, angles, interleaved=False: rope(tensor, angles)
    _experts()
    latent_attention.install()
    recomputation.install(recorders)
    # Random states are kept on the host and launch nothing.
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = _keep_nothing
    random._fork_rng = contextlib.nullcontext


def _experts() -> None:
    """Fused permutation, and splits without a GPU to count them."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.HAVE_TE = True  # says no more than that the fused functions below are there
    moe_utils.te_general_gemm = router_ops.general_gemm
    fused = {
        "fused_permute": expert_ops.fused_permute,
        "fused_permute_with_probs": expert_ops.fused_permute_with_probs,
        "fused_unpermute": expert_ops.fused_unpermute,
        "fused_sort_chunks_by_index": expert_ops.fused_sort_chunks,
        "fused_sort_chunks_by_index_with_probs": expert_ops.fused_sort_chunks_with_probs,
        "fused_topk_with_score_function": router_ops.topk_with_score_function,
        "fused_compute_score_for_moe_aux_loss": router_ops.compute_score_for_moe_aux_loss,
        "fused_moe_aux_loss": router_ops.moe_aux_loss,
    }
    for name, function in fused.items():
        setattr(moe_utils, name, function)
        setattr(transformer_engine, name, function)  # where the configuration looks for them

    def to_host_and_wait(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if self.drop_and_pad:  # every size is known
            return tokens_per_expert
        if point == self.cuda_dtoh_point:
            for counted in (tokens_per_expert, self.input_splits, self.output_splits, self.output_splits_tp):
                if isinstance(counted, torch.Tensor):
                    counted.to("cpu", non_blocking=True)
            expert_ops.known_splits(self)
            self.d2h_event = self.cuda_dtoh_stream.record_event()
        if point == self.cuda_sync_point:
            self.d2h_event.synchronize()
        return tokens_per_expert

    token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = to_host_and_wait
    token_dispatcher.MoEAllGatherTokenDispatcher.dispatch_postprocess = expert_ops.gathered_postprocess
    dispatch = token_dispatcher._DeepepManager.dispatch

    def dispatch_and_count(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = dispatch(self, *args, **kwargs)
        self.tokens_per_expert = self.handle.tokens_per_expert  # of the oracle: a tensor would be fake
        return result

    token_dispatcher._DeepepManager.dispatch = dispatch_and_count
    token_dispatcher._DeepepManager._indices_to_multihot = expert_ops.indices_to_multihot


def _keep_nothing(*_: Any) -> None:
    return None
