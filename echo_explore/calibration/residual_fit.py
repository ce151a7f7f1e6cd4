"""Train the residual of the interference model on measured kernels; needs torch, which prediction does not.

It is judged on rows that it has not seen, held back in three ways: a fifth of the rows that lie next to each other, a
group (a GPU and a class of kernels), and all rows of a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_explore.core import MissingExtra, SpecError
from echo_explore.interference.coefficients import InterferenceCoefficients
from echo_explore.interference.contention import kernel_slowdown
from echo_explore.interference.loads import Floats
from echo_explore.interference.measured import MeasuredOverlap, Scene, scenes_of
from echo_explore.interference.overlap_score import MIN_ROWS, judged_rows, reasons_not
from echo_explore.interference.residual import LIMIT, Residual, features

UNITS = 24
RADIUS = 0.5
"""Of a unit, in spreads of the training rows; training moves it by a factor of e at most."""
EPOCHS = 400
LEARNING_RATE = 0.01
DECAY = 0.01
"""Weight decay of AdamW: a residual that is not needed shrinks to nothing."""
FOLDS = 5
NO_WORSE = 0.001
"""Of the mean log error, that counts as equal: figures are given to three places."""
LEAST_ROWS = 50
"""Fewer rows that count teach a network nothing that holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualFit:
    """A trained residual and what it is worth.

    Attributes:
        residual: trained on all rows that count.
        trials: what was held back (`a fifth`, `a group`, `a GPU`) and the errors there; those that the rows allow.
        num_rows: rows that count.
    """

    residual: Residual
    trials: Mapping[str, "HeldBack"]
    num_rows: int

    @property
    def helps(self) -> bool:
        """Whether it does better on neighbours of rows that it has seen, and no worse on groups and GPUs that are new.

        Far from its rows it says nothing, so better there is not asked.
        """
        better = self.trials["a fifth"].residual < self.trials["a fifth"].physical
        return better and all(trial.residual <= trial.physical + NO_WORSE for trial in self.trials.values())

    def text(self) -> str:
        """One line, and one for each way of holding back."""
        lines = [f"{self.num_rows} rows; mean |log(predicted / measured)| of rows held back, by what was:"]
        for name, trial in self.trials.items():
            lines.append(f"  {name:10s} physical {trial.physical:.3f}, with the residual {trial.residual:.3f}")
            lines += [f"    {part}: {a:.3f}, {b:.3f}" for part, (a, b) in trial.parts.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """Errors on rows held back: over rows, or the mean over groups.

    Attributes:
        physical: mean |log(predicted / measured)| of the physical model, of the slowdown beside traffic.
        residual: the same with residuals trained without the rows that they are judged on.
        parts: both by group.
    """

    physical: float
    residual: float
    parts: Mapping[str, tuple[float, float]]


def fit_residual(
    rows: Sequence[MeasuredOverlap], coefficients: InterferenceCoefficients, *, source: str, seed: int = 0
) -> ResidualFit:
    """Train on the rows that count, and judge on rows held back.

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
    gpu = np.array([row.cells["gpu"] for _, row in known])
    group = np.array([f"{row.cells['gpu']} {row.cells['compute_class']}" for _, row in known])
    ways = {"a fifth": np.arange(n) * FOLDS // n, "a group": group, "a GPU": gpu}
    physical = np.abs(np.log(factor) - target)
    trials = {}
    for name, label in ways.items():
        parts = np.unique(label)
        if parts.size < 2:
            continue
        errors = np.zeros(n)
        for part in parts:
            out = label == part
            trained = _train(inputs[~out], factor[~out], target[~out], source, seed)
            errors[out] = np.abs(_log_guess(trained, inputs[out], factor[out]) - target[out])
        trials[name] = _held_back(physical, errors, group if name != "a fifth" else None)
    return ResidualFit(residual=_train(inputs, factor, target, source, seed), trials=trials, num_rows=n)


def _held_back(physical: Floats, errors: Floats, group: npt.NDArray[np.str_] | None) -> HeldBack:
    """Over rows without groups, else the mean over groups of enough rows (over rows where no group has them)."""
    parts: dict[str, tuple[float, float]] = {}
    for name in np.unique(group) if group is not None else ():
        members = group == name
        if members.sum() >= MIN_ROWS:
            parts[str(name)] = (float(physical[members].mean()), float(errors[members].mean()))
    if not parts:
        return HeldBack(physical=float(physical.mean()), residual=float(errors.mean()), parts=parts)
    means = np.mean(list(parts.values()), axis=0)
    return HeldBack(physical=float(means[0]), residual=float(means[1]), parts=parts)


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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # arrays this small only lose time to the hand-over between threads
    try:
        return _trained(torch, inputs, factor, target, source, seed)
    finally:
        torch.set_num_threads(threads)


def _trained(torch: Any, inputs: Floats, factor: Floats, target: Floats, source: str, seed: int) -> Residual:
    mean, spread = inputs.mean(axis=0), np.maximum(inputs.std(axis=0), 1e-3)
    scaled = (inputs - mean) / spread
    z = torch.tensor(scaled, dtype=torch.float64)
    physical, wanted = torch.tensor(np.log(factor)), torch.tensor(target)
    moves = torch.tensor(factor > 1.0)
    centre = torch.tensor(_spread_out(scaled, UNITS, seed), dtype=torch.float64)
    stretch = torch.zeros(centre.shape[0], dtype=torch.float64)
    out = torch.zeros(centre.shape[0], dtype=torch.float64)
    weights = [w.requires_grad_() for w in (stretch, out)]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=DECAY)
    distance = ((z[:, None, :] - centre[None, :, :]) ** 2).sum(dim=2)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        radius = RADIUS * torch.exp(torch.tanh(stretch))
        moved = LIMIT * torch.tanh(torch.exp(-distance / (2.0 * radius**2)) @ out)
        guess = torch.clamp(physical + moved, min=0.0)
        error = torch.nn.functional.smooth_l1_loss(torch.where(moves, guess, 0.0), wanted, beta=0.05)
        error.backward()
        optimizer.step()
    radius = RADIUS * np.exp(np.tanh(stretch.detach().numpy()))
    return Residual(
        mean=mean, spread=spread, centre=centre.numpy(), radius=radius, out=out.detach().numpy(), source=source
    )


def _spread_out(points: Floats, most: int, seed: int) -> Floats:
    """(at most `most`, num_features) points, each the one farthest from those before it; the first by chance."""
    chosen = [int(np.random.default_rng(seed).integers(points.shape[0]))]
    distance = np.full(points.shape[0], np.inf)
    while len(chosen) < most:
        distance = np.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
        if distance.max() <= 0:
            break
        chosen.append(int(distance.argmax()))
    return points[chosen]
