"""NVIDIA's Emerging-Optimizers, of which Megatron's Muon takes three names: the products run as they are, on no data.

Written for megatron-core 0.16.1, optimizer/muon.py, from what NVIDIA-NeMo/Emerging-Optimizers documents and does
(muon_utils.py, orthogonalized_optimizer.py, read 2026-12-01); coefficients are left at one, since nothing is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum whose steps its subclass orthogonalises, parameter by parameter, eagerly."""

    orthogonalize: Callable[..., Tensor]

    def __init__(
        self, params: Any, lr: float, momentum_beta: float, *, use_nesterov: bool, weight_decay: float,
        scaled_orthogonalize_fn: Any, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        self._beta, self._nesterov = momentum_beta, use_nesterov

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Decay, momentum, orthogonalisation, step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"]
        if group["weight_decay"] > 0.0:
            parameter.add_(parameter, alpha=-group["weight_decay"] * group["lr"])
        momentum.lerp_(grad, 1 - self._beta)
        ahead = grad.lerp(momentum, self._beta) if self._nesterov else momentum
        parameter.add_(self.orthogonalize(parameter, ahead), alpha=-group["lr"])


def get_muon_scale_factor(*_: Any, **__: Any) -> float:
    """Of the step; a number of the host."""
    return 1.0


def newton_schulz_tp(
    x: Tensor, steps: int, *, tp_group: Any = None, partition_dim: int | None = None, mode: str = "duplicated", **_: Any
) -> Tensor:
    """The orthogonalised part of this rank: of its own matrix, of the gathered one, or with sums over the ranks."""
    if partition_dim is None:
        return _iterate(x, steps, transposed=x.shape[0] > x.shape[1], group=None)
    if mode == "distributed":
        return _iterate(x, steps, transposed=partition_dim == 0, group=tp_group)
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(parts, x, group=tp_group)
    whole = torch.cat(parts, dim=partition_dim)
    result = _iterate(whole, steps, transposed=whole.shape[0] > whole.shape[1], group=None)
    part: Tensor = result.chunk(len(parts), dim=partition_dim)[tp_group.rank()]
    return part


def _iterate(x: Tensor, steps: int, *, transposed: bool, group: Any) -> Tensor:
    x = x.mT if transposed else x
    if group is None:
        norm = torch.linalg.vector_norm(x)
    else:
        norm = (x * x).sum()
        dist.all_reduce(norm, group=group)
    x = (x / norm).to(torch.bfloat16)
    for _ in range(steps):
        square = x @ x.mT
        if group is not None:
            dist.all_reduce(square, group=group)
        x = torch.addmm(x, torch.addmm(square, square, square), x)
    x = x.to(torch.float32)
    return x.mT if transposed else x


def modules() -> dict[str, dict[str, Any]]:
    """What Megatron imports, by module."""
    package = "emerging_optimizers"
    kinds = f"{package}.orthogonalized_optimizers"
    names = {"OrthogonalizedOptimizer": OrthogonalizedOptimizer, "get_muon_scale_factor": get_muon_scale_factor}
    return {package: {}, kinds: names, f"{kinds}.muon_utils": {"newton_schulz_tp": newton_schulz_tp}}
