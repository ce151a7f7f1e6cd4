"""Models of the transformers package from their configs, under FSDP2, DDP and DTensor plans; for version 5.24."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from echo_explore.core import MissingExtra, TraceError
from echo_explore.tracing.transformers_parallel import Meshes, meshes_of, split
from echo_explore.tracing.transformers_request import EXPERT_COUNTS, TransformersJob

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MASKED = ("albert", "bert", "distilbert", "electra", "roberta")
"""Families that are trained to fill in masked tokens unless their config says `is_decoder`."""


def build_step(job: TransformersJob) -> tuple[Callable[[], None], nn.Module]:
    """The step, and the model.

    Raises:
        MissingExtra: transformers is not installed.
        TraceError: the family is not known to it, or has no plan for what is asked.
    """
    meshes = meshes_of(job)
    model = _model(job)
    layers = layers_of(model)
    experts: list[nn.Module] = []
    if job.tensor_parallel * job.expert_parallel > 1:
        experts = split(model, meshes, job, layers)
    if job.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    wrapped = _sharded(model, meshes, experts, job) if job.parallelism == "fsdp2" else _replicated(model)
    groups = [{"params": group} for group in _by_mesh(list(model.parameters()))]  # a kernel takes arrays of one mesh
    optimizer = torch.optim.AdamW(groups, fused=True)
    tokens = torch.zeros(job.micro_batch_size, job.sequence_length, dtype=torch.int64, device="cuda")

    def step() -> None:
        for number in range(job.num_micro_batches):
            with _accumulating(wrapped, job, last=number == job.num_micro_batches - 1), _autocast(job):
                wrapped(input_ids=tokens, labels=tokens).loss.backward()
        _clip(model)
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def _by_mesh(tensors: list[Any]) -> list[list[Any]]:
    """Parameters that lie on the same device mesh, as split layers, experts and the rest do."""
    groups: dict[Any, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def _clip(model: nn.Module) -> None:
    """Clip gradients by their norm over all meshes."""
    groups = _by_mesh([parameter for parameter in model.parameters() if parameter.grad is not None])
    norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    for group in groups:
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
    experts = max(int(getattr(config, name, 0) or 0) for name in EXPERT_COUNTS)
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


def layers_of(model: nn.Module) -> str:
    """Name of the transformer layers: the longest list of modules."""
    lists: dict[str, int] = {
        name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    return max(lists, key=lambda name: lists[name])


def _sharded(model: Any, meshes: Meshes, experts: list[nn.Module], job: TransformersJob) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    over = meshes.dense["fsdp"]
    policy = MixedPrecisionPolicy(param_dtype=_DTYPES[job.precision], reduce_dtype=torch.float32)
    for module in experts:  # a unit of their own over the ranks that hold the same ones, as transformers makes it
        unit: Any = fully_shard(module, mesh=meshes.experts["efsdp"], mp_policy=policy)
        unit.set_gradient_divide_factor(float(over.size()))
        if meshes.experts["efsdp"].size() > 1:
            unit.set_force_sum_reduction_for_comms(True)
    for layer in model.get_submodule(layers_of(model)):
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
