"""Parts of Megatron models as trainers write them that do without Megatron's own tensor-parallel products and loss."""

import copy
from typing import Any

import torch
from torch import Tensor

from echo_explore.tracing import fake_device
from echo_explore.tracing.core_attention import FlashCoreAttention


def sum_input_gradients_last(chunk: torch.nn.Module) -> None:
    """Let the gradient of a column-parallel product's input be summed when both of its gradients are made.

    The sum is an autograd function of its own in front of a plain product, and everything waits for it (Megatron-LM 2.5
    (August 2021), mpu/layers.py, ColumnParallelLinear); later ones sum beside the gradient of the weight.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear):
            module.allreduce_dgrad = False


def gate_apart_spec(spec: Any) -> None:
    """Make the MLP of a layer's specification one whose gate is a product of its own."""
    spec.submodules.mlp.module = _gate_apart_mlp()


def _gate_apart_mlp() -> type:
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.spec_utils import build_module

    class GateApartMLP(MLP):  # type: ignore[misc]
        """Two products that read the same; each sums the gradient of its input (Aleph Alpha scaling, 2024, mlp.py)."""

        def __init__(self, config: Any, submodules: Any, *args: Any, tp_group: Any = None, **kwargs: Any) -> None:
            plain = copy.copy(config)
            plain.gated_linear_unit = False
            super().__init__(plain, submodules, *args, tp_group=tp_group, **kwargs)
            self.linear_gate = build_module(
                submodules.linear_fc1, self.input_size, self.config.ffn_hidden_size, config=plain,
                init_method=plain.init_method, gather_output=False, bias=plain.add_bias_linear, skip_bias_add=True,
                is_expert=False, tp_comm_buffer_name="gate", tp_group=self.tp_group,
            )  # fmt: skip
            self.gathers = self.linear_fc1.sequence_parallel
            for product in (self.linear_fc1, self.linear_gate) if self.gathers else ():
                product.sequence_parallel = False
                product.explicit_expert_comm = True  # Megatron's switch for inputs that somebody else communicated

        def forward(self, hidden_states: Tensor, per_token_scale: Any = None, **_: Any) -> tuple[Tensor, Any]:
            """The block's output, and the bias of its last product."""
            if self.gathers:
                hidden_states = gather_from_sequence_parallel_region(hidden_states)
            (inner, bias), (gate, gate_bias) = self.linear_fc1(hidden_states), self.linear_gate(hidden_states)
            inner = inner if bias is None else inner + bias
            gate = gate if gate_bias is None else gate + gate_bias
            result: tuple[Tensor, Any] = self.linear_fc2(self.config.activation_func(inner) * gate)
            return result

    return GateApartMLP


def wait_for_lengths(chunk: torch.nn.Module) -> None:
    """Let the host wait for the GPU ahead of each fused attention to read the longest sequence of a packed batch.

    Kernels for packed sequences take it as a number of the host (Aleph Alpha scaling, 2024, attention.py,
    get_max_seq_length); the difference and the maximum of a few numbers before it are left out.
    """
    for module in chunk.modules():
        if isinstance(module, FlashCoreAttention):
            module.register_forward_pre_hook(lambda *_: fake_device.host_sync("longest sequence of the batch"))


def gather_loss(chunk: Any) -> None:
    """Let every tensor-parallel rank make the whole loss of a chunk from logits that are gathered, and the accuracy.

    In fp32, operator by operator (Aleph Alpha scaling, 2024, layers/lm_head.py and losses/cross_entropy.py).
    """
    chunk.compute_language_model_loss = _gathered_loss


def _gathered_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """(batch, sequence) losses of logits (sequence, batch, vocabulary of the rank)."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits)
    sequence, batch, width = whole.shape
    wide = whole.float().reshape(-1, width)
    target = labels.transpose(0, 1).contiguous().view(-1)
    losses = torch.nn.functional.cross_entropy(wide, target, reduction="none")
    (wide.detach().argmax(-1) == target).float().sum()
    return losses.view(sequence, batch).transpose(0, 1).contiguous()
