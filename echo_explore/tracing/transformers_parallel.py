"""How models of the transformers package are split over ranks: by its own plans and styles; for version 5.24.

BERT and GPT-2 have no plan there; theirs are below, in the library's words and after its Llama: columns, then rows, a
vocabulary in parts whose logits are gathered. GPT-2's `Conv1D` is a linear layer with its matrix transposed, and makes
queries, keys and values in one product, whose columns a checkpoint must hold in the order of the ranks.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echo_explore.core import TraceError
from echo_explore.tracing import upstream
from echo_explore.tracing.transformers_request import TransformersJob

_CONV_COLUMNS, _CONV_ROWS = "echo_conv_colwise", "echo_conv_rowwise"
_HEAD = "colwise_gather_output"
OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "transformer.wte": "embedding_rowwise",
        "transformer.h.*.attn.c_attn": _CONV_COLUMNS,
        "transformer.h.*.attn.c_proj": _CONV_ROWS,
        "transformer.h.*.mlp.c_fc": _CONV_COLUMNS,
        "transformer.h.*.mlp.c_proj": _CONV_ROWS,
        "lm_head": _HEAD,
    },
    "bert": {
        "bert.embeddings.word_embeddings": "embedding_rowwise",
        **{f"bert.encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
        "cls.predictions.decoder": _HEAD,
        "cls.predictions.bias": "colwise",
    },
}
"""Families that transformers has no plan for: patterns of modules, and how each is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Device meshes of a job.

    Attributes:
        dense: of everything but experts, over `fsdp` and `tp`.
        experts: the same ranks over `efsdp` and `ep`; equal to `dense` without expert parallelism.
    """

    dense: Any
    experts: Any


def meshes_of(job: TransformersJob) -> Meshes:
    """Meshes as transformers makes them: experts lie on `ep` ranks, and the rest of the ranks hold copies of them."""
    from torch.distributed.device_mesh import init_device_mesh

    def mesh(inner: int, names: tuple[str, str]) -> Any:
        return init_device_mesh("cuda", (job.world_size // inner, inner), mesh_dim_names=names)

    dense = mesh(job.tensor_parallel, ("fsdp", "tp"))
    experts = mesh(job.expert_parallel, ("efsdp", "ep")) if job.expert_parallel > 1 else dense
    return Meshes(dense=dense, experts=experts)


def split(model: Any, meshes: Meshes, job: TransformersJob, layers: str) -> list[nn.Module]:
    """Split matrices over tensor-parallel ranks and experts over expert-parallel ones.

    Args:
        model: of transformers.
        meshes: of `meshes_of`.
        job: says how many ranks.
        layers: name of the list of its layers.

    Returns:
        The modules whose parameters lie on the mesh of experts.

    Raises:
        TraceError: the family has no plan, or one that its dimensions do not allow.
    """
    upstream.check_version("transformers")
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    family = str(model.config.model_type)
    own = OWN_PLANS.get(family)
    _refuse_uneven(model.config, job)
    if own is not None:
        _register_conv_styles()
    try:
        asked = DistributedConfig(
            tp_size=job.tensor_parallel, ep_size=job.expert_parallel, fsdp_size=job.world_size // job.tensor_parallel,
            tp_plan=dict(own) if own else None, fsdp_plan={f"{layers}.*": "free_full_weight"},
        )  # fmt: skip
        with _untied(model):
            tensor_plan, expert_plan, _ = model._resolve_parallel_plans(asked)
            if tensor_plan:
                apply_tensor_parallelism(model, meshes.dense["tp"], tensor_plan)
            if expert_plan:
                apply_expert_parallelism(model, meshes.experts["ep"], meshes.dense["tp"], expert_plan)
    except ValueError as error:
        axis = "layout.ep" if "ep_" in str(error) or "expert" in str(error) else "layout.tp"
        reason = str(error).splitlines()[0]
        raise TraceError(f"{axis}: transformers refuses it for {family}: {reason}; fix: use 1") from None
    for module in model.modules():  # GPT-2 cuts the joint product at the width of the whole model
        if job.tensor_parallel > 1 and family == "gpt2" and hasattr(module, "split_size"):
            module.split_size //= job.tensor_parallel
    return [model.get_submodule(name) for name, style in expert_plan.items() if style == "ep_dispatch_experts"]


def _refuse_uneven(config: Any, job: TransformersJob) -> None:
    """Attention heads are whole: a rank computes as many as the others."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % job.tensor_parallel:
            raise TraceError(
                f"layout.tp = {job.tensor_parallel}: must divide {name} = {heads} of the config; fix: use a divisor"
            )


@contextlib.contextmanager
def _untied(model: Any) -> Iterator[None]:
    """Split tied weights each by its own rule, as where a checkpoint is read, and tie their parts again."""
    keys = getattr(model, "all_tied_weights_keys", None) or {}
    for name in keys:
        path, _, parameter = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, parameter, nn.Parameter(torch.empty_like(getattr(module, parameter))))
    yield
    if keys:
        model.tie_weights()


def _register_conv_styles() -> None:
    """Teach transformers to split `Conv1D`, whose matrix is [inputs, outputs]."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    if _CONV_COLUMNS in ALL_PARALLEL_STYLES:
        return

    class Conv(TensorParallelLayer):  # type: ignore[misc]
        """Placements of matrix, bias, input and result."""

        def __init__(self, weight: Any, bias: Any, given: Any) -> None:
            self.weight, self.bias, self.given = weight, bias, given

        def shard_param(self, module: Any, param: str, mesh: Any) -> None:
            whole = module._parameters[param]
            placement = self.bias if whole.ndim == 1 else self.weight
            module._parameters[param] = nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None))

        def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
            return (DTensor.from_local(args[0], mesh, [self.given], run_check=False), *args[1:]), kwargs

        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            if isinstance(output.placements[0], Partial):
                output = output.redistribute(placements=[Replicate()])
            return output.to_local()

    styles: Any = ALL_PARALLEL_STYLES
    styles.register(_CONV_COLUMNS, Conv(Shard(1), Shard(0), Replicate()))
    styles.register(_CONV_ROWS, Conv(Shard(0), Replicate(), Shard(-1)))
