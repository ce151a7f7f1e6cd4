"""RMS norm operator by operator, as models without a fused kernel write it."""

from typing import Any

import torch


class EagerRmsNorm(torch.nn.Module):
    """In fp32, then back, then scaled (transformers 4.35, 2023, models/llama/modeling_llama.py, LlamaRMSNorm)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device="cuda", dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """The normed tensor."""
        wide = tensor.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(tensor.dtype)
