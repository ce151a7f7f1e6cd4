"""Which activation Megatron-core runs for a model, whether fused, and which of its modules holds the experts."""

from typing import Any

import torch

from echo_explore.specs import ModelSpec


class _NoOffset:
    """Instead of an offset of 0 of the gate's other half, which unfused Megatron adds by a kernel since 0.14 only."""

    def __radd__(self, other: Any) -> Any:
        return other


def activation_settings(model: ModelSpec, *, fused: bool) -> dict[str, Any]:
    """Settings of TransformerConfig: the activation, and whether it is one kernel with the bias in front of it."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    functional = torch.nn.functional
    function = {
        "gelu": functional.gelu, "swiglu": functional.silu, "quick-geglu": quick_gelu, "relu": functional.relu,
        "squared-relu": squared_relu,
    }[model.activation]  # fmt: skip
    experts_alone = model.moe is not None and not model.moe.shared_ffn_hidden_size
    experts_alone &= "dense" not in model.feed_forward_kinds
    # What Megatron has no fused kernel for it refuses (0.16.1, mlp.py and experts.py): quick-GEGLU outside of experts,
    # GELU inside of experts that have biases.
    has_kernel = {
        "swiglu": True,
        "gelu": model.linear_bias and model.moe is None,
        "quick-geglu": experts_alone,
    }.get(model.activation, False)
    return {
        "gated_linear_unit": model.gated,
        "activation_func": function,
        "activation_func_clamp_value": model.activation_func_clamp_value or None,
        "glu_linear_offset": model.glu_linear_offset or (0.0 if fused else _NoOffset()),
        "bias_activation_fusion": fused and has_kernel,
    }


def has_own_experts(model: ModelSpec) -> bool:
    """Experts are Transformer Engine's module: Megatron's GroupedMLP knows neither biases nor quick-GEGLU."""
    return model.moe is not None and (model.linear_bias or model.activation == "quick-geglu")
