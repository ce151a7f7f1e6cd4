"""Train the residual of the interference model on measured kernels; needs torch, which prediction does not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_explore.core import MissingExtra, SpecError
from echo_explore.interference.coefficients import InterferenceCoefficients
from echo_explore.interference.contention import kernel_slowdown
from echo_explore.interference.loads import Floats
from echo_explore.interference.measured import MeasuredOverlap, Scene, scenes_of
from echo_explore.interference.overlap_score import judged_rows, reasons_not
from echo_explore.interference.residual import LIMIT, Residual, features

HIDDEN = 16
EPOCHS = 400
LEARNING_RATE = 0.01
DECAY = 0.01
"""Weight decay of AdamW: a residual that is not needed shrinks to nothing."""
FOLDS = 5
LEAST_ROWS = 50
"""Fewer rows that count teach a network nothing that holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualFit:
    """A trained residual and what it is worth.

    Attributes:
        residual: trained on all rows that count.
        physical: mean |log(predicted / measured)| of the physical model, over rows, of the slowdown beside traffic.
        held_back: the same with residuals trained without the fold that they are judged on.
        num_rows: rows that count.
    """

    residual: Residual
    physical: float
    held_back: float
    num_rows: int

    @property
    def helps(self) -> bool:
        """Whether it does better on rows that it has not seen."""
        return self.held_back < self.physical

    def text(self) -> str:
        """One line."""
        return (
            f"{self.num_rows} rows: physical model {self.physical:.3f}, with a residual trained without the rows it is "
            f"judged on {self.held_back:.3f}"
        )


def fit_residual(
    rows: Sequence[MeasuredOverlap], coefficients: InterferenceCoefficients, *, source: str, seed: int = 0
) -> ResidualFit:
    """Train on the rows that count, and judge in five folds of neighbouring rows.

    Args:
        rows: measured; those with a slowdown that count are used.
        coefficients: of the physical model below.
        source: what the rows are, for the file.
        seed: of the first weights.

    Raises:
        SpecError: fewer than LEAST_ROWS rows count.
        MissingExtra: torch is not installed.
    """
    scenes = scenes_of(rows, coefficients)
    known = [(scene, rows[i]) for i in judged_rows(rows) if (scene := scenes[i]) is not None]
    n = len(known)
    if n < LEAST_ROWS:
        unknown = sorted({row.cells["gpu"] for row, scene in zip(rows, scenes, strict=True) if scene is None})
        causes = [f"of GPUs that are not known: {', '.join(unknown)}"] if unknown else []
        causes += [text] if (text := reasons_not(rows)) else []
        rule = f"rows that count are fewer than {LEAST_ROWS}"
        rule += f" (not counted: {'; '.join(causes)})" if causes else ""
        raise SpecError("measured", n, rule, "measure more kernels; see docs/interference.md")
    inputs, factor, target = _training_rows(known, coefficients)
    fold = np.arange(n) * FOLDS // n
    errors = np.zeros(n)
    for out in range(FOLDS):
        trained = _train(inputs[fold != out], factor[fold != out], target[fold != out], source, seed)
        errors[fold == out] = np.abs(
            _log_guess(trained, inputs[fold == out], factor[fold == out]) - target[fold == out]
        )
    return ResidualFit(
        residual=_train(inputs, factor, target, source, seed),
        physical=float(np.abs(np.log(factor) - target).mean()),
        held_back=float(errors.mean()),
        num_rows=n,
    )


def _log_guess(residual: Residual, inputs: Floats, factor: Floats) -> Floats:
    moved = np.maximum(0.0, np.log(factor) + residual.log_correction(inputs))
    return np.where(factor > 1.0, moved, 0.0)


def _training_rows(
    known: Sequence[tuple[Scene, MeasuredOverlap]], coefficients: InterferenceCoefficients
) -> tuple[Floats, Floats, Floats]:
    """Features, physical factors and log of measured factors beside the traffic, (num_rows, ...)."""
    inputs, factors, target = [], [], []
    for scene, row in known:
        beside = 1.0 + (row.slowdown - 1.0) / row.overlap_fraction
        factor = kernel_slowdown(scene.kernel, scene.traffic, scene.chip, coefficients.sharing)
        inputs.append(features(factor, scene.kernel, scene.traffic, scene.chip)[0])
        factors.append(float(factor[0]))
        target.append(np.log(max(beside, 0.5)))
    return np.array(inputs).reshape(len(target), -1), np.array(factors), np.array(target)


def _train(inputs: Floats, factor: Floats, target: Floats, source: str, seed: int) -> Residual:
    try:
        import torch
    except ImportError:
        raise MissingExtra("training a residual", "trace") from None
    generator = torch.Generator().manual_seed(seed)
    mean, spread = inputs.mean(axis=0), np.maximum(inputs.std(axis=0), 1e-3)
    z = torch.tensor((inputs - mean) / spread, dtype=torch.float64)
    physical, wanted = torch.tensor(np.log(factor)), torch.tensor(target)
    moves = torch.tensor(factor > 1.0)
    hidden = torch.randn(HIDDEN, z.shape[1], generator=generator, dtype=torch.float64) * 0.3
    bias = torch.zeros(HIDDEN, dtype=torch.float64)
    out = torch.zeros(HIDDEN + 1, dtype=torch.float64)
    weights = [w.requires_grad_() for w in (hidden, bias, out)]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=DECAY)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        inner = torch.tanh(z @ hidden.T + bias)
        guess = torch.clamp(physical + LIMIT * torch.tanh(inner @ out[:-1] + out[-1]), min=0.0)
        error = torch.nn.functional.smooth_l1_loss(torch.where(moves, guess, 0.0), wanted, beta=0.05)
        error.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    arrays = [w.detach().numpy() for w in weights]
    return Residual(mean=mean, spread=spread, hidden=arrays[0], hidden_bias=arrays[1], out=arrays[2], source=source)
