"""What a search looks at: the TOML of `search_spaces/`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from echo_explore.core import SpecError
from echo_explore.specs.base import BoolTuple, IntTuple, StrictModel, StringTuple
from echo_explore.specs.placement import DEFAULT_ORDER, parse_placement
from echo_explore.specs.recipe import SEARCHED_SCHEDULES, Attention, ContextExchange, Fusion, Optimizer, TrainPrecision
from echo_explore.specs.recompute import normal_recompute


def _sizes(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) != {"from", "to", "factor"} or not all(isinstance(v, int) and v >= 1 for v in value.values()):
            raise SpecError(
                "cluster_size.num_gpus", str(value), "needs whole numbers from, to and factor", "see docs/search.md"
            )
        if value["factor"] < 2:
            raise SpecError("cluster_size.num_gpus.factor", value["factor"], "must be 2 or more", "write factor = 2")
        sizes, size = [], value["from"]
        while size <= value["to"]:
            sizes.append(size)
            size *= value["factor"]
        return tuple(sizes)
    return (
        (value,)
        if isinstance(value, int) and not isinstance(value, bool)
        else tuple(value)
        if isinstance(value, list)
        else value
    )


class ClusterSize(StrictModel):
    """GPUs of the job: one number, a list, or `{from, to, factor}`."""

    num_gpus: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_sizes), Field(min_length=1)]


class SpaceRecipe(StrictModel):
    """The parts of the recipe that the search keeps fixed."""

    sequence_length: int = Field(ge=1)
    global_batch_size: int = Field(ge=1)
    precision: TrainPrecision = "bf16"
    attention: Attention | None = None
    context_exchange: ContextExchange = "p2p"
    fusion: Fusion | None = None
    optimizer: Optimizer = "adam"
    stack: str = "megatron-core"


Divisors = Annotated[
    tuple[int, ...] | Literal["divisors"], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]


class SearchAxes(StrictModel):
    """The choices; `"divisors"` means every divisor of the layer count."""

    tensor_parallel: IntTuple = (1,)
    pipeline_parallel: Divisors = (1,)
    virtual_pipeline: Divisors = (1,)
    context_parallel: IntTuple = (1,)
    expert_parallel: IntTuple = (1,)
    micro_batch_size: IntTuple = (1,)
    recompute: StringTuple = ("none",)
    sequence_parallel: BoolTuple = (False,)
    placement: StringTuple = (DEFAULT_ORDER,)
    schedule: StringTuple = ("auto",)
    uneven_stages: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for axis, choices in self:
            if not isinstance(choices, tuple):
                continue
            if not choices:
                raise SpecError(
                    f"search.{axis}", "[]", "offers no choice", "give at least one value or leave the line out"
                )
            if len(set(choices)) < len(choices):
                raise SpecError(f"search.{axis}", str(list(choices)), "names a value twice", "give each value once")
            for choice in choices:
                if isinstance(choice, int) and not isinstance(choice, bool) and choice < 1:
                    raise SpecError(f"search.{axis}", choice, "must be 1 or more", "give positive whole numbers")
                if axis == "placement":
                    parse_placement(str(choice))
                if axis == "schedule" and choice not in SEARCHED_SCHEDULES:
                    names = ", ".join(SEARCHED_SCHEDULES)
                    raise SpecError("search.schedule", choice, "is not a schedule by name", f"use {names}")
                if axis == "recompute":
                    normal_recompute(str(choice), field=f"search.{axis}")
        return self


class Constraints(StrictModel):
    """Expressions over the point that must hold; parsed to an allow-list, never evaluated as Python."""

    rules: StringTuple = ()


class Objective(StrictModel):
    """What to minimise."""

    minimize: StringTuple = ("step_time_s",)


class SearchSpace(StrictModel):
    """A search space as the file holds it."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str = ""
    model: str
    cluster: str
    cluster_size: ClusterSize
    recipe: SpaceRecipe
    search: SearchAxes
    constraints: Constraints = Field(default_factory=Constraints)
    objective: Objective = Field(default_factory=Objective)
