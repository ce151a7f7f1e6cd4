"""Megatron's TEGroupedMLP with a stand-in for Transformer Engine's GroupedLinear: experts with biases or quick-GEGLU.

The forward is Megatron's own. Of the stand-in each product of all experts is one row, as in `expert_ops`; a bias that
the product adds costs nothing there, and one that it returns is added by Megatron.

References:
    megatron-core 0.16.1 (2026), transformer/moe/experts.py, extensions/transformer_engine.py (TEGroupedLinear);
    Transformer Engine 2.8 (2025), pytorch/module/grouped_linear.py.
"""

from typing import Any

import torch

from echo_explore.specs.routing import Routing
from echo_explore.tracing import expert_ops
from echo_explore.tracing.expert_ops import GroupedGemm

Tensor = torch.Tensor


class _AddedBias(torch.autograd.Function):
    """A bias that a product adds, and its gradient of which the weight gradient's product (or the cast) takes care.

    # Approximation: reading and writing the biases is left out, which under-estimates by 1 / rows of an expert.
    """

    @staticmethod
    def forward(ctx: Any, product: Tensor, *biases: Tensor) -> Tensor:
        ctx.save_for_backward(*biases)
        return product.view(product.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(torch.empty_like(bias) for bias in ctx.saved_tensors)


class GroupedLinear(torch.nn.Module):
    """TEGroupedLinear: weights of all experts of this rank in one array, a bias for each expert."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, bias: bool, skip_bias_add: bool,
        pg_collection: Any, parallel_mode: str, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        split = pg_collection.expt_tp.size()
        rows = output_size // split if parallel_mode == "column" else output_size
        columns = input_size // split if parallel_mode == "row" else input_size
        like = {"device": "cuda", "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(num_gemms, columns, rows, **like))
        self._names = [f"bias{number}" for number in range(num_gemms)] if bias else []
        for name in self._names:
            setattr(self, name, torch.nn.Parameter(torch.empty(rows, **like)))
        self._returns_bias = skip_bias_add
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """The products of [tokens, input], and the biases of experts unless they are added."""
        product: Any = GroupedGemm.apply
        out, biases = product(tokens, self.weight), [getattr(self, name) for name in self._names]
        if not biases or self._returns_bias:
            return out, biases or None
        add: Any = _AddedBias.apply
        return add(out, *biases), None


def tokens_of_experts(rows: int, first: int, count: int) -> tuple[int, ...]:
    """Tokens of `rows` that each of `count` experts from `first` on gets, by the oracle, shape (count,)."""
    load = expert_ops.current_routing().load[first : first + count]
    return Routing(num_experts=count, experts_per_token=1, load=load).counts(rows)


def experts_spec() -> Any:
    """What Megatron builds as the experts of a layer."""
    import numpy as np
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Experts(TEGroupedMLP):  # type: ignore[misc]
        def forward(self, tokens: Tensor, counts: Any, probabilities: Tensor) -> Any:
            first = self.ep_group.rank() * self.num_local_experts
            known = np.array(tokens_of_experts(tokens.shape[0], first, self.num_local_experts))
            return super().forward(tokens, known, probabilities)

    return ModuleSpec(
        module=Experts,
        submodules=MLPSubmodules(
            linear_fc1=ModuleSpec(module=GroupedLinear, params={"parallel_mode": "column"}),
            linear_fc2=ModuleSpec(module=GroupedLinear, params={"parallel_mode": "row"}),
        ),
    )
