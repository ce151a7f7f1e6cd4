"""A sweep over cluster sizes for one model: the best layout of each, and what training on it takes.

Each size is a search of its own, with its own study: the same sweep again goes on where it was, and prints what is
finished without evaluating anything.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, TextIO

from echo_explore.core import SpecError, format_bytes, format_seconds
from echo_explore.search.options import SearchOptions
from echo_explore.search.ports import EvaluatorFactory, TrialRecord
from echo_explore.search.ray_environment import prepare
from echo_explore.search.result import SearchResult, align
from echo_explore.search.run import run_search
from echo_explore.search.space import ResolvedSpace, enumerate_points, resolve_space
from echo_explore.specs import SearchSpace, load_cluster, load_model
from echo_explore.specs.base import validate

SECONDS_PER_HOUR: Final = 3600.0
FactoryOf = Callable[[ResolvedSpace], EvaluatorFactory]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """What a sweep needs to know.

    Attributes:
        space: model, cluster, recipe and choices; its cluster_size is replaced by each of `sizes`.
        sizes: GPUs of the job.
        num_tokens: that the training takes.
        address: see SearchOptions.
        workers: see SearchOptions.
        calibration: see SearchOptions.
    """

    space: SearchSpace
    sizes: tuple[int, ...]
    num_tokens: float
    address: str = "auto"
    workers: int | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise SpecError("sizes", str(list(self.sizes)), "must be 1 or more", "give GPUs of the job, as in 256,512")
        if not (math.isfinite(self.num_tokens) and self.num_tokens > 0):
            raise SpecError("tokens", self.num_tokens, "must be positive", 'give for example "300 B tokens"')
        if self.space.objective.minimize[:1] != ("step_time_s",):
            raise SpecError(
                "objective.minimize",
                str(list(self.space.objective.minimize)),
                "a sweep compares the fastest layout of each size",
                'write ["step_time_s"]',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """One cluster size.

    Attributes:
        best: the fastest layout that fits; None if there is none.
        num_steps: of the training.
        gpu_hour_usd: price of the cluster; None if its file gives none.
        reason: why there is no layout.
        certified: every legal layout was evaluated or bounded away.
        study: of the search.
    """

    num_gpus: int
    best: TrialRecord | None
    num_steps: int
    gpu_hour_usd: float | None = None
    reason: str = ""
    certified: bool = False
    study: str = ""

    @property
    def step_time_s(self) -> float | None:
        """Of the best layout."""
        return self.best.outcome.step_time_s if self.best and self.best.outcome else None

    @property
    def time_to_train_s(self) -> float | None:
        """Steps times step time: without failures, checkpoints or evaluation."""
        return None if self.step_time_s is None else self.num_steps * self.step_time_s

    @property
    def gpu_hours(self) -> float | None:
        """GPUs times time to train, in hours."""
        return None if self.time_to_train_s is None else self.num_gpus * self.time_to_train_s / SECONDS_PER_HOUR

    @property
    def cost_usd(self) -> float | None:
        """GPU hours times price."""
        return None if self.gpu_hours is None or self.gpu_hour_usd is None else self.gpu_hours * self.gpu_hour_usd

    def to_json(self) -> dict[str, Any]:
        """The row as a flat object."""
        row: dict[str, Any] = {"num_gpus": self.num_gpus, "step_time_s": self.step_time_s, "num_steps": self.num_steps}
        row |= {"time_to_train_s": self.time_to_train_s, "gpu_hours": self.gpu_hours, "cost_usd": self.cost_usd}
        row |= {"certified": self.certified, "study": self.study, "reason": self.reason}
        if self.best is not None and self.best.outcome is not None:
            outcome = self.best.outcome
            row |= {"label": self.best.point.label(), "params": self.best.point.params(), "mfu": outcome.mfu}
            row |= {"data_parallel": self.best.point.data_parallel, "tokens_per_s": outcome.tokens_per_s}
            row |= {"step_time_low_s": outcome.step_time_low_s, "step_time_high_s": outcome.step_time_high_s}
            row |= {"peak_memory_bytes": outcome.peak_memory_bytes, "breakdown": dict(outcome.breakdown)}
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """A sweep's result."""

    model: str
    cluster: str
    num_tokens: float
    global_batch_size: int
    sequence_length: int
    rows: tuple[CapacityRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        names = ("model", "cluster", "num_tokens", "global_batch_size", "sequence_length")
        return {name: getattr(self, name) for name in names} | {"rows": [row.to_json() for row in self.rows]}

    def to_text(self) -> str:
        """The table, for people."""
        head = ["GPUs", "best layout", "step time", "MFU", "memory", "time to train", "GPU hours"]
        priced = any(row.cost_usd is not None for row in self.rows)
        table = [[*head, *(["cost"] if priced else [])], *(_cells(row, priced=priced) for row in self.rows)]
        steps = f"{self.num_tokens:.4g} tokens in steps of {self.global_batch_size} x {self.sequence_length}"
        return f"{self.model} on {self.cluster}, {steps}\n{align(table)}"


def capacity_study(
    options: CapacityOptions, *, factory_of: FactoryOf | None = None, stream: TextIO | None = None
) -> CapacityPlan:
    """The best layout of every size, smallest first.

    Args:
        options: what to sweep.
        factory_of: makes evaluators for the space of one size; default: those of the simulator.
        stream: for progress; default: stderr.

    Raises:
        SpecError: something the user gave is wrong.
    """
    stream = stream or sys.stderr
    rows = []
    with _one_ray(options):
        for size in sorted(set(options.sizes)):
            print(f"{size:,} GPUs", file=stream)
            row, result = _one_size(options, size, factory_of, stream)
            rows.append(row)
            if result is not None and result.ending == "interrupted":
                raise KeyboardInterrupt
    recipe = options.space.recipe
    return CapacityPlan(
        model=options.space.model,
        cluster=options.space.cluster,
        num_tokens=options.num_tokens,
        global_batch_size=recipe.global_batch_size,
        sequence_length=recipe.sequence_length,
        rows=tuple(rows),
    )


def default_space(
    *, model: str, cluster: str, global_batch_size: int, sequence_length: int, precision: str = "bf16"
) -> SearchSpace:
    """The space that a sweep looks at when none is given: the layouts that one would try first.

    Tensor parallelism stays within a scale-up domain and goes with sequence parallelism; expert parallelism is a power
    of two that divides the experts.
    """
    spec, domain = load_model(model), load_cluster(cluster).node.domain_gpus
    powers = [2**i for i in range(10)]
    experts = [n for n in powers if spec.moe is None or spec.moe.num_experts % n == 0]
    tensor = [n for n in powers if n <= min(8, domain) and spec.num_attention_heads % n == 0]
    data = {
        "schema": 1,
        "name": f"plan-{spec.name}",
        "model": model,
        "cluster": cluster,
        "cluster_size": {"num_gpus": 1},
        "recipe": {
            "sequence_length": sequence_length,
            "global_batch_size": global_batch_size,
            "precision": precision,
        },
        "search": {
            "tensor_parallel": tensor,
            "pipeline_parallel": "divisors",
            "virtual_pipeline": "divisors",
            "expert_parallel": experts if spec.moe else [1],
            "micro_batch_size": [1, 2, 4],
            "recompute": ["none", "selective", "full"],
            "sequence_parallel": [True],
        },
    }
    return validate(SearchSpace, data)


def _one_size(
    options: CapacityOptions, size: int, factory_of: FactoryOf | None, stream: TextIO
) -> tuple[CapacityRow, SearchResult | None]:
    size_of_job = options.space.cluster_size.model_copy(update={"num_gpus": (size,)})
    space = options.space.model_copy(update={"cluster_size": size_of_job})
    resolved = resolve_space(space)
    tokens_per_step = space.recipe.global_batch_size * space.recipe.sequence_length
    num_steps = math.ceil(options.num_tokens / tokens_per_step)
    price = resolved.cluster.price.gpu_hour_usd if resolved.cluster.price else None
    try:
        enumerate_points(resolved)
    except SpecError as error:
        return CapacityRow(num_gpus=size, best=None, num_steps=num_steps, reason=error.rule), None
    result = run_search(
        SearchOptions(
            space=space,
            address=options.address,
            workers=options.workers,
            sampler="enumerate",
            calibration=options.calibration,
        ),
        factory=factory_of(resolved) if factory_of else None,
        stream=stream,
    )
    row = CapacityRow(
        num_gpus=size,
        best=result.best[0] if result.best else None,
        num_steps=num_steps,
        gpu_hour_usd=price,
        reason="" if result.best else "no layout fits into memory",
        certified=result.certified,
        study=result.study,
    )
    return row, result


def _one_ray(options: CapacityOptions) -> Any:
    """One Ray for the whole sweep instead of one for each size."""
    if options.address == "none":
        return nullcontext()
    prepare(options.address)
    from echo_explore.search.pool import connected

    return connected(options.address, num_cpus=options.workers)


def _cells(row: CapacityRow, *, priced: bool) -> Sequence[str]:
    outcome = row.best.outcome if row.best else None
    if row.best is None or outcome is None or row.gpu_hours is None or row.time_to_train_s is None:
        return [f"{row.num_gpus:,}", f"none: {row.reason}", *["-"] * (6 if priced else 5)]
    layout = row.best.point.label().partition("GPUs ")[2] + ("" if row.certified else " (not certified)")
    days = row.time_to_train_s / SECONDS_PER_HOUR / 24
    cells = [f"{row.num_gpus:,}", layout, format_seconds(outcome.step_time_s), f"{outcome.mfu:.1%}"]
    cells += [format_bytes(outcome.peak_memory_bytes), f"{days:.1f} days", f"{row.gpu_hours:,.0f}"]
    return [*cells, *([f"{row.cost_usd:,.0f} USD" if row.cost_usd is not None else "-"] if priced else [])]
