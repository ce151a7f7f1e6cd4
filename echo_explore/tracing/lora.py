"""Low-rank adapters beside frozen linear layers of a Megatron model.

As Megatron-Bridge's LoRALinear (0.2, 2025, peft/lora_layers.py): y = W x + B (A x) with W frozen. Under sequence
parallelism a column-parallel layer and its adapter share one gathered input, and the adapter of a row-parallel layer
reduces and scatters its rank-wide middle instead of its result.
"""

from typing import Any

import torch

# Approximation: A and B of column-parallel layers are whole on every rank (Megatron-Bridge splits the rank dimension,
# gathers the middle); their gradients' sums over tensor-parallel ranks are left out. Both are a few MB a step.

RATE = 0.1
"""Any value above 0 gives the same kernels."""


class Adapter(torch.nn.Module):
    """B (A x) beside one parallel linear layer; takes what the layer takes and gives what it gives."""

    def __init__(self, base: Any, rank: int, *, dropout: bool) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(RATE if dropout else 0.0)
        out_features, in_features = base.weight.shape
        options = {"bias": False, "device": "cuda", "dtype": base.weight.dtype}
        self.linear_in = torch.nn.Linear(in_features, rank, **options)
        self.linear_out = torch.nn.Linear(rank, out_features, **options)
        self.row_parallel = bool(getattr(base, "input_is_parallel", False))
        self.sequence_parallel = bool(base.sequence_parallel)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, batch, in] to [tokens or a share of them, batch, out]."""
        from megatron.core.tensor_parallel import mappings

        middle = self.linear_in(self.dropout(tensor))
        if self.row_parallel:
            reduce = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            middle = reduce(middle)
        return self.linear_out(middle)  # type: ignore[no-any-return]


def _add(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    result, bias = output
    return result + module.lora(args[0]), bias


def _gather(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    return gather_from_sequence_parallel_region(args[0]), *args[1:]


def _like_a_layer(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """What frozen embeddings give, as layers give it: with a gradient, which a job leaves out, and plain strides."""
    return output.flatten(0, 1).view(output.shape).requires_grad_(True)


def adapt(chunk: torch.nn.Module, *, rank: int, targets: tuple[str, ...], dropout: bool = False) -> None:
    """Freeze a GPTModel and put adapters beside its layers of the given names.

    Args:
        chunk: the model.
        rank: width of the middle of an adapter.
        targets: names of parallel linear layers, such as `linear_qkv`.
        dropout: adapters drop some of what they read.
    """
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    for path, module in list(chunk.named_modules()):
        if path.rpartition(".")[2] not in targets or not path.startswith("decoder."):
            continue
        if module.sequence_parallel and not getattr(module, "input_is_parallel", False):
            module.explicit_expert_comm = True  # Megatron's switch for inputs that somebody else communicated
            module.register_forward_pre_hook(_gather)
        module.lora = Adapter(module, rank, dropout=dropout)
        module.register_forward_hook(_add)
    embedding: Any = getattr(chunk, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(_like_a_layer)
