"""Models of the transformers package from their configs, under FSDP2, DDP and DTensor plans; for version 5.24."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from echo_explore.core import MissingExtra, TraceError
from echo_explore.tracing.transformers_request import TransformersJob

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MASKED = ("albert", "bert", "distilbert", "electra", "roberta")
"""Families that are trained to fill in masked tokens unless their config says `is_decoder`."""


def build_step(job: TransformersJob) -> tuple[Callable[[], None], nn.Module]:
    """The step, and the model.

    Raises:
        MissingExtra: transformers is not installed.
        TraceError: the family is not known to it, or has no plan for what is asked.
    """
    mesh = _mesh(job)
    model = _model(job)
    if job.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if job.tensor_parallel > 1:
        _split_tensors(model, mesh["tp"])
    model.train()
    wrapped = _sharded(model, mesh, job) if job.parallelism == "fsdp2" else _replicated(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=job.tensor_parallel == 1)
    tokens = torch.zeros(job.micro_batch_size, job.sequence_length, dtype=torch.int64, device="cuda")

    def step() -> None:
        for number in range(job.num_micro_batches):
            with _accumulating(wrapped, job, last=number == job.num_micro_batches - 1), _autocast(job):
                wrapped(input_ids=tokens, labels=tokens).loss.backward()
        _clip(model)
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def _clip(model: nn.Module) -> None:
    """Clip gradients by their norm over all meshes: the split layers lie on another one than the rest."""
    meshes: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in meshes.values()]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    for group in meshes.values():
        nn.utils.clip_grads_with_norm_(group, 1.0, total)


def _model(job: TransformersJob) -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtra("a model of transformers", "trace") from None
    values = {k: v for k, v in job.config.items() if k not in ("model_type", "transformers_version", "auto_map")}
    family = str(job.config["model_type"])
    try:
        config = transformers.AutoConfig.for_model(family, **values)
    except ValueError:
        raise TraceError(
            f"config: model_type = {family!r}: transformers does not know it; fix: check the config"
        ) from None
    config.use_cache = False
    experts = max(int(getattr(config, name, 0) or 0) for name in ("num_local_experts", "num_experts"))
    if experts > 1 and job.parallelism == "ddp" and job.precision != "fp32":
        raise TraceError(
            "framework: grouped products of experts take bf16 weights, which autocast does not give them; "
            "fix: use transformers-fsdp2"
        )
    masked = family in _MASKED and not getattr(config, "is_decoder", False)
    make: Any = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    try:
        return _made(make, config, "sdpa")
    except ValueError as error:
        reason = str(error).splitlines()[0]
        if "scaled_dot_product_attention" in reason:  # GPT-OSS: sinks in its softmax
            return _made(make, config, "eager")
        raise TraceError(f"config: model_type = {family!r}: {reason}; fix: use a language model") from None


def _made(make: Any, config: Any, attention: str) -> Any:
    with torch.device("cuda"):
        return make.from_config(config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False)


def _mesh(job: TransformersJob) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (job.world_size // job.tensor_parallel, job.tensor_parallel)
    if job.tensor_parallel == 1:
        return init_device_mesh("cuda", (job.world_size,), mesh_dim_names=("dp",))
    return init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The transformer layers: the longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _split_tensors(model: Any, mesh: Any) -> None:
    """DTensor's column- and row-wise layers, as the model's own plan names them."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    prefix = model.base_model_prefix
    named = dict(getattr(model.config, "base_model_tp_plan", None) or {})
    modules = dict(model.named_modules())
    plan: dict[str, Any] = {}
    for pattern, style in named.items():
        names = [name for name in modules if _matches(name, f"{prefix}.{pattern}")]
        if names and style not in styles:
            raise TraceError(
                f"layout.tp: the plan of {model.config.model_type} splits {pattern} by {style!r}, not by DTensor; "
                "fix: use tp=1"
            )
        plan |= {name: styles[style]() for name in names}
    if not plan:
        raise TraceError(f"layout.tp: transformers has no plan for {model.config.model_type}; fix: use tp=1")
    parallelize_module(model, mesh, plan)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def _sharded(model: Any, mesh: Any, job: TransformersJob) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    over = mesh["dp"] if job.tensor_parallel > 1 else mesh
    policy = MixedPrecisionPolicy(param_dtype=_DTYPES[job.precision], reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mesh=over, mp_policy=policy)
    return fully_shard(model, mesh=over, mp_policy=policy)


def _replicated(model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)


@contextlib.contextmanager
def _accumulating(wrapped: Any, job: TransformersJob, *, last: bool) -> Iterator[None]:
    with wrapped.no_sync() if job.parallelism == "ddp" and not last else contextlib.nullcontext():
        yield


def _autocast(job: TransformersJob) -> Any:
    if job.parallelism == "fsdp2" or job.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cuda", _DTYPES[job.precision])
