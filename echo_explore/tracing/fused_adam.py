"""Transformer Engine's Adam with states in narrow types, which Megatron's precision-aware optimizer wants.

Written from what Transformer Engine launches (commit 04912bf, 2025, pytorch/optimizers/fused_adam.py): each narrow
state is cast to fp32, parameter by parameter, one kernel updates the parameters of a group, and each state is cast
back.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from echo_explore.tracing.rank_request import RankRequest

Tensor = torch.Tensor
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
_STATES = ("exp_avg", "exp_avg_sq", "main")
_PACKAGE = "transformer_engine"


class FusedAdam(torch.optim.Optimizer):
    """Adam of groups of parameters; fp8 states lie in bytes, and every fp16 or fp8 state has a scale."""

    def __init__(
        self, params: Any, lr: float, *, master_weights: bool = False, master_weight_dtype: Any = torch.float32,
        exp_avg_dtype: Any = torch.float32, exp_avg_sq_dtype: Any = torch.float32, use_decoupled_grad: bool = False,
        store_param_remainders: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr})
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self._dtypes["main"] = master_weight_dtype
        self._keeps_remainders = store_param_remainders and master_weight_dtype == torch.float32
        self._grad = "decoupled_grad" if use_decoupled_grad else "grad"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Widen states, update every group, narrow them again."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if getattr(p, self._grad, None) is not None]
            if not parameters:
                continue
            wide = [self._widened(p) for p in parameters]
            first, second, main = ([w[name] for w in wide if name in w] for name in _STATES)
            grads = [getattr(p, self._grad) for p in parameters]
            torch.ops.echo.multi_tensor_adam(grads, parameters, first, second, main)
            for name in self._dtypes:
                for parameter, states in zip(parameters, wide, strict=True):
                    if states[name] is not self.state[parameter][name]:
                        self._narrow(parameter, name, states[name])

    def _widened(self, parameter: Tensor) -> dict[str, Tensor]:
        """States in fp32, made where there are none; main weights that complete bf16 ones stay as they are."""
        states = self.state[parameter]
        for name, dtype in self._dtypes.items():
            if name not in states:
                rest = name == "main" and self._keeps_remainders and parameter.dtype == torch.bfloat16
                states[name] = torch.zeros_like(parameter, dtype=torch.int16 if rest else dtype)
                states[f"{name}_scale"] = parameter.new_ones(1, dtype=torch.float32)
                states[f"{name}_range"] = parameter.new_ones(1, dtype=torch.float32)
        return {name: self._wide(states[name], states[f"{name}_scale"]) for name in self._dtypes}

    @staticmethod
    def _wide(state: Tensor, scale: Tensor) -> Tensor:
        if state.dtype in (torch.float32, torch.int16):
            return state
        wide = state.float()
        return wide.mul_(scale) if state.dtype == torch.float16 else wide

    def _narrow(self, parameter: Tensor, name: str, wide: Tensor) -> None:
        states = self.state[parameter]
        state, scale = states[name], states[f"{name}_scale"]
        if state.dtype == torch.bfloat16:
            state.copy_(wide.bfloat16())
            return
        least, most = torch.aminmax(wide)
        torch.div(torch.maximum(-least, most), states[f"{name}_range"], out=scale)
        if state.dtype == torch.float16:
            wide.mul_(torch.where(scale > 0, scale.reciprocal(), scale))
        state.copy_(wide)


def settings_of(request: RankRequest) -> dict[str, Any]:
    """Fields of Megatron's OptimizerConfig; its recipe of 8 bits decides who holds the main weights."""
    trace = request.trace
    fp8_recipe = "delayed"  # Megatron-LM's default of --fp8-recipe, which counts where nothing is in 8 bits too
    if trace.precision == "mxfp8":
        fp8_recipe = "mxfp8"
    elif trace.precision == "fp8" and trace.fp8_scales != "known":
        fp8_recipe = "tensorwise"
    return {
        "use_precision_aware_optimizer": True,
        "main_params_dtype": _DTYPES[request.main_params_dtype],
        "main_grads_dtype": torch.bfloat16 if trace.narrow_gradients else torch.float32,
        "exp_avg_dtype": _DTYPES[request.exp_avg_dtype],
        "exp_avg_sq_dtype": _DTYPES[request.exp_avg_sq_dtype],
        "fp8_recipe": fp8_recipe,
    }


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While Megatron makes its optimizer: Transformer Engine's Adam is there, and nothing else of it."""
    from megatron.core import optimizer as package
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    modules = {name: types.ModuleType(name) for name in (_PACKAGE, f"{_PACKAGE}.pytorch")}
    modules[f"{_PACKAGE}.pytorch.optimizers"] = optimizers = types.ModuleType(f"{_PACKAGE}.pytorch.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (package, "Adam", FusedAdam),
        (distrib_optimizer, "Adam", FusedAdam),
        (package, "is_te_min_version", lambda *_: True),
        (optimizer_config, "is_te_min_version", lambda *_: True),
    )
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)
