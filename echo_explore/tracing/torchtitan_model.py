"""Builds torchtitan's Llama 3 from a model's dimensions and hands it to torchtitan's own parallelize function.

What torch.compile makes of a transformer block is marked, as in `native_model`: the rotary embedding and the gated
activation become one kernel each; norms are PyTorch's fused kernel with and without a compiler.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from echo_explore.specs import ModelSpec
from echo_explore.specs.recompute import recomputed_every
from echo_explore.tracing.megatron_config import DTYPES
from echo_explore.tracing.native_fusion import compiled, compiled_linear
from echo_explore.tracing.request import TraceRequest
from echo_explore.tracing.torchtitan_import import titan

Tensor = torch.Tensor
_NAMES = {"fp16": "float16", "fp32": "float32"}


def model_args(model: ModelSpec, *, num_layers: int, sequence_length: int) -> Any:
    """TransformerModelArgs of a model of `num_layers`; the width of its feed-forward is exact."""
    args = titan("models.llama3.model.args")
    # Width: the multiple of `multiple_of` that is not below int(8 / 3 dim) times the multiplier.
    narrower = model.ffn_hidden_size / (2 * int(2 * 4 * model.hidden_size / 3))
    return args.TransformerModelArgs(
        dim=model.hidden_size, n_layers=num_layers, n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads, vocab_size=model.vocab_size, multiple_of=model.ffn_hidden_size,
        ffn_dim_multiplier=narrower, max_seq_len=sequence_length,
    )  # fmt: skip


def job_config(request: TraceRequest) -> Any:
    """The JobConfig of a request: sequence, checkpoints, compiler; the rest are its defaults."""
    config = titan("config").JobConfig()
    config.training.seq_len = request.sequence_length
    config.training.mixed_precision_param = _NAMES.get(request.precision, "bfloat16")
    config.compile.enable = request.fusion == "fused"
    checkpoint = config.activation_checkpoint
    every = recomputed_every(request.recompute)
    checkpoint.mode = "selective" if every else request.recompute
    checkpoint.selective_ac_option = str(every) if every else "op"
    checkpoint.preserve_rng_state = False  # random states launch nothing
    checkpoint.early_stop = config.compile.enable  # a compiler drops what the backward does not need
    return config


ROTATIONS = {"p2p": "alltoall", "all_gather": "allgather"}
"""How keys and values travel in a recipe's words; the method of torch's context parallelism (2.13)."""


def parallel_dims(request: TraceRequest, *, world_size: int) -> Any:
    """The mesh: tensor and context parallelism of the request, the rest shards; call it outside of a fake mode."""
    dims = titan("distributed").ParallelDims(
        dp_replicate=1, dp_shard=-1, cp=request.context_parallel, tp=request.tensor_parallel, pp=1, ep=1, etp=1,
        world_size=world_size,
    )  # fmt: skip
    dims.build_mesh()
    return dims


def build(request: TraceRequest, dims: Any, *, num_layers: int, sharded: bool, num_again: int | None = None) -> Any:
    """The model of one rank behind torchtitan's `parallelize_llama`; call it in a fake mode.

    Args:
        request: what to trace.
        dims: of `parallel_dims`.
        num_layers: as many.
        sharded: fp32 parameters under FSDP2; else parameters as FSDP2 gathers them, whole, without it.
        num_again: only so many of the first layers run again; None: those that torchtitan chooses.
    """
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    narrow = DTYPES[request.precision]
    if dims.cp_enabled:
        set_rotate_method(ROTATIONS[request.context_exchange])
    infra, modeling = titan("models.llama3.infra.parallelize"), titan("models.llama3.model.model")
    args = model_args(request.model, num_layers=num_layers, sequence_length=request.sequence_length)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if sharded else narrow)
    try:
        with torch.device("meta"):
            model = modeling.Transformer(args)
    finally:
        torch.set_default_dtype(before)
    modeling.apply_rotary_emb = _plain_rotary(modeling)
    if request.fusion == "fused":
        _compile_blocks(model, modeling)
    titan("distributed.activation_checkpoint")._layer_sac_count = 0  # layers are counted over all models of a process
    fully_shard, checkpoint = infra.apply_fsdp, infra.apply_ac
    infra.apply_fsdp = fully_shard if sharded else _leave_whole
    infra.apply_ac = checkpoint if num_again is None else functools.partial(_first_again, checkpoint, num_again)
    try:
        model = infra.parallelize_llama(model, dims, job_config(request))
    finally:
        infra.apply_fsdp, infra.apply_ac = fully_shard, checkpoint
    model.to_empty(device="cuda")
    model.freqs_cis = torch.empty_like(model.freqs_cis, device="cuda")
    model.train()
    return model


def _first_again(apply: Callable[..., None], count: int, model: Any, *args: Any, **kwargs: Any) -> None:
    """Put torchtitan's checkpoints around the first `count` layers only."""
    first = torch.nn.ModuleDict(dict(list(model.layers.named_children())[:count]))
    apply(types.SimpleNamespace(get_submodule=lambda _: first), *args, **kwargs)
    for name, block in first.named_children():
        model.layers.register_module(name, block)


def _leave_whole(*_: Any, **__: Any) -> None:
    return None


def step_of(request: TraceRequest, dims: Any, model: Any) -> Callable[[], Tensor]:
    """Forward of one micro-batch to its loss, as torchtitan's trainer runs it; call it in `train_context`."""
    loss_module, context = titan("components.loss"), titan("distributed.context_parallel")
    whole = dims.tp == 1  # under a split vocabulary the loss communicates: no compiler makes one kernel of it
    loss_of = compiled(loss_module.cross_entropy_loss) if whole else loss_module.cross_entropy_loss
    tokens = torch.zeros(request.micro_batch_size, request.sequence_length, dtype=torch.int64, device="cuda")
    count = float(tokens.numel())

    def forward() -> Tensor:
        inputs, labels, extra = tokens, tokens, {}
        if dims.cp_enabled:
            inputs, labels, extra = context.prepare_context_parallel_input(
                inputs, labels, {}, dims.get_mesh("cp"), torch.device("cuda")
            )
        loss: Tensor = loss_of(model(inputs, **extra), labels) / count
        return loss

    return forward


def train_context(dims: Any) -> Any:
    """Where torchtitan runs forward and backward: with tensor parallelism the loss stays split over the vocabulary."""
    return titan("distributed.utils").get_train_context(dims.tp_enabled)()


@compiled
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _plain_rotary(modeling: Any) -> Any:
    """The real function, whatever an earlier trace put in its place."""
    return getattr(modeling.apply_rotary_emb, "__wrapped__", modeling.apply_rotary_emb)


def _compile_blocks(model: Any, modeling: Any) -> None:
    """Mark what torch.compile fuses between the products of a block."""

    def rotate(tensor: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        pairs = torch.view_as_complex(tensor.float().reshape(*tensor.shape[:-1], -1, 2))
        angles = modeling.reshape_for_broadcast(freqs_cis, pairs, positions)
        return torch.view_as_real(pairs * angles).flatten(3).type_as(tensor)

    one_array = compiled_linear(rotate)

    @functools.wraps(modeling.apply_rotary_emb)
    def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Any:
        return one_array(xq, freqs_cis, positions), one_array(xk, freqs_cis, positions)

    def feed_forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.w2(_swiglu(self.w1(x), self.w3(x)))
        return out

    for block in model.layers.values():
        block.feed_forward.forward = types.MethodType(feed_forward, block.feed_forward)
    modeling.apply_rotary_emb = apply_rotary_emb
