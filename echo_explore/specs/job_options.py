"""From what a user types to a candidate: names looked up, overrides applied, defaults from model and stack."""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from echo_explore.core import SpecError, nearest
from echo_explore.specs.base import validate
from echo_explore.specs.candidate import Candidate, make_candidate
from echo_explore.specs.layout import parse_layout
from echo_explore.specs.load import load_cluster, load_model, load_stack
from echo_explore.specs.overrides import overridden, parse_overrides
from echo_explore.specs.placement import DEFAULT_PLACEMENT, parse_placement
from echo_explore.specs.recipe import ScheduleName, TrainingRecipe
from echo_explore.specs.routing_file import read_load
from echo_explore.specs.schedules import read_orders

FRAMEWORKS = {
    "megatron": "megatron-core", "fsdp2": "torch-fsdp2", "torchtitan": "torchtitan-fsdp2", "ddp": "torch-ddp",
}  # fmt: skip
"""The stack profile that each framework of the command contract means by default."""
TRANSFORMERS_FRAMEWORKS = ("transformers-fsdp2", "transformers-ddp")
"""Those of the commands `predict` and `trace` that run a config.json with the transformers package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options that predict and trace share, as typed."""

    model: str
    cluster: str
    layout: str
    num_gpus: int | None = None
    global_batch_size: int
    micro_batch_size: int
    sequence_length: int | None = None
    recompute: str = "none"
    precision: str = "bf16"
    attention: str | None = None
    schedule: str = "auto"
    framework: str = "megatron"
    stack: str | None = None
    fusion: str | None = None
    layer_split: str | None = None
    placement: str | None = None
    routing: str | None = None
    overrides: tuple[str, ...] = field(default=())
    allow_fallback: bool = False  # a precision that the GPU lacks is left to the fallback of the compute model


def job_options(values: dict[str, Any]) -> JobOptions:
    """The options that keyword arguments name.

    Raises:
        SpecError: an unknown name, or one that must be given and is not.
    """
    known = {item.name: item for item in fields(JobOptions)}
    for name in values:
        if name not in known:
            raise SpecError(name, values[name], "is not an option", f"did you mean {', '.join(nearest(name, known))}?")
    for name, item in known.items():
        if item.default is MISSING and item.default_factory is MISSING and name not in values:
            raise SpecError(name, "(missing)", "must be given", f"add {name}=")
    for name in ("model", "cluster", "layout"):
        if not isinstance(values[name], str):
            raise SpecError(name, values[name], "must be text", 'write for example layout="tp=8,pp=12"')
    return JobOptions(**values)


def candidate_of(options: JobOptions) -> Candidate:
    """The candidate that the options describe.

    Raises:
        SpecError, PlacementError: the first thing that is wrong.
    """
    if options.framework not in FRAMEWORKS:
        names = ", ".join(FRAMEWORKS)
        others = " or ".join(TRANSFORMERS_FRAMEWORKS)
        fix = f"use one of {names}, or for a config.json on the command line {others}"
        raise SpecError("framework", options.framework, "is not traced in this version", fix)
    changes = parse_overrides(options.overrides)
    model = load_model(options.model, changes)
    cluster = load_cluster(options.cluster, changes)
    stack = load_stack(options.stack or FRAMEWORKS[options.framework], changes)
    recipe_data: dict[str, Any] = {
        "global_batch_size": options.global_batch_size,
        "micro_batch_size": options.micro_batch_size,
        "sequence_length": model.max_sequence_length if options.sequence_length is None else options.sequence_length,
        "precision": options.precision,
        "recompute": options.recompute,
        **_schedule(options.schedule),
    }
    if options.routing is not None:
        recipe_data["expert_load"] = list(read_load(Path(options.routing)))
    recipe_data |= {k: v for k, v in (("attention", options.attention), ("fusion", options.fusion)) if v is not None}
    recipe = validate(TrainingRecipe, overridden(recipe_data, changes, "recipe"))
    layout = parse_layout(options.layout, layer_split=_layer_split(options.layer_split))
    candidate = _made(
        options,
        model=model,
        cluster=cluster,
        layout=layout,
        recipe=recipe,
        stack=stack,
        num_gpus=options.num_gpus,
        placement=DEFAULT_PLACEMENT if options.placement is None else parse_placement(options.placement),
        allow_fallback=options.allow_fallback,
    )
    if layout.context_parallel > 1 and candidate.recipe.attention == "unfused":  # before a tracer starts and says so
        raise SpecError("attention", "unfused", "context parallelism needs a fused kernel", "use flash, or cp=1")
    return candidate


def _made(options: JobOptions, **parts: Any) -> Candidate:
    """The candidate; what is wrong with a schedule from a file is said of the file.

    Raises:
        SpecError, PlacementError: see `make_candidate`.
    """
    try:
        return make_candidate(**parts)
    except SpecError as error:
        if parts["recipe"].schedule != "custom" or not error.field.startswith("schedule"):
            raise
        stage = error.field.removeprefix("schedule").strip("[]")
        where = f", stage {stage}" if stage else ""
        value = "" if error.value == "custom" else f"{error.value}: "
        raise SpecError("schedule", f"{options.schedule}{where}", f"{value}{error.rule}", error.fix) from None


def _schedule(text: str) -> dict[str, Any]:
    """The recipe's schedule: a name, or the orders of the file that `text` is the path of."""
    if text in get_args(ScheduleName):
        if text == "custom":
            raise SpecError("schedule", text, "takes its orders from a file", "write --schedule FILE.csv")
        return {"schedule": text}
    path = Path(text)
    if path.suffix in (".csv", ".txt") or len(path.parts) > 1:
        return {"schedule": "custom", "schedule_lines": list(read_orders(path))}
    names = [name for name in get_args(ScheduleName) if name != "custom"]
    raise SpecError("schedule", text, "is not known", f"use {', '.join(names)}, or a file that ends in .csv")


def _layer_split(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.strip("[]").split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SpecError("layer-split", text, "must be whole numbers with commas", "write --layer-split 7,8,8,7")
    return tuple(int(part) for part in parts)
