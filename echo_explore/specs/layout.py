"""How a job is laid out: degrees of each parallelism, and the parser of `tp=8,pp=12`."""

from typing import Self

from pydantic import Field, model_validator

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.base import IntTuple, StrictModel, validate

_SHORT = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "sp": "sequence_parallel",
}


class ParallelConfig(StrictModel):
    """Degrees of parallelism; data_parallel 0 means: as many as the GPUs allow.

    Attributes:
        virtual_pipeline: model chunks a stage holds (interleaved schedule when above 1).
        sequence_parallel: Megatron's sequence parallelism within the tensor-parallel group; false when that is 1.
        expert_tensor_parallel: ranks over which each expert is split, as attention is over tensor_parallel; 0: see
            `expert_tensor_ranks`. At 1 experts are whole on their rank, and neighbours in expert parallelism may be
            neighbours in tensor parallelism.
        layer_split: layers of every chunk, chunk by chunk in model order (pp * vpp entries); empty: equal.
    """

    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    virtual_pipeline: int = Field(default=1, ge=1)
    data_parallel: int = Field(default=0, ge=0)
    context_parallel: int = Field(default=1, ge=1)
    expert_parallel: int = Field(default=1, ge=1)
    expert_tensor_parallel: int = Field(default=0, ge=0)
    sequence_parallel: bool = False
    layer_split: IntTuple = ()

    @model_validator(mode="after")
    def _canonical(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise SpecError(
                "virtual_pipeline", self.virtual_pipeline, "needs pipeline_parallel above 1", "leave vpp out"
            )
        if self.tensor_parallel == 1 and self.sequence_parallel:
            object.__setattr__(self, "sequence_parallel", False)
        if self.layer_split and len(self.layer_split) != self.num_chunks:
            raise SpecError(
                "layer_split",
                str(list(self.layer_split)),
                f"needs pp * vpp = {self.num_chunks} entries",
                "give one a chunk",
            )
        if any(n < 0 for n in self.layer_split):
            raise SpecError(
                "layer_split", str(list(self.layer_split)), "must not be negative", "give layers of each chunk"
            )
        return self

    @property
    def num_chunks(self) -> int:
        """Model chunks over all stages."""
        return self.pipeline_parallel * self.virtual_pipeline

    @property
    def model_gpus(self) -> int:
        """GPUs of one model replica (tp * pp * cp)."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks over which each expert is split: as given, else 1 beside expert parallelism and tp without it.

        Megatron-Bridge's recipes of mixtures set 1; without expert parallelism megatron-core 0.16.1 takes experts for
        dense parameters, whose gradients it does not sum over tensor-parallel ranks.
        """
        return self.expert_tensor_parallel or (1 if self.expert_parallel > 1 else self.tensor_parallel)

    @property
    def expert_gpus(self) -> int:
        """GPUs of a stage that hold all experts once (etp * ep)."""
        return self.expert_tensor_ranks * self.expert_parallel

    @property
    def expert_data_parallel(self) -> int:
        """Replicas of the same expert, tp * cp * dp / (etp * ep); data_parallel must be known, and legal."""
        return max(1, self.tensor_parallel * self.context_parallel * self.data_parallel // self.expert_gpus)

    @property
    def num_gpus(self) -> int:
        """GPUs of the job; data_parallel must be known."""
        return self.model_gpus * self.data_parallel

    def label(self) -> str:
        """`tp8 pp12 dp1`, with only the degrees that matter."""
        parts = [f"tp{self.tensor_parallel}", f"pp{self.pipeline_parallel}"]
        parts += [f"vpp{self.virtual_pipeline}"] if self.virtual_pipeline > 1 else []
        parts += [f"cp{self.context_parallel}"] if self.context_parallel > 1 else []
        parts += [f"ep{self.expert_parallel}"] if self.expert_parallel > 1 else []
        parts += [f"etp{self.expert_tensor_parallel}"] if self.expert_tensor_parallel > 1 else []
        parts += [f"dp{self.data_parallel}"] if self.data_parallel else []
        return " ".join([*parts, *(["sp"] if self.sequence_parallel else [])])


def parse_layout(text: str, *, layer_split: tuple[int, ...] = ()) -> ParallelConfig:
    """The layout in `tp=8,pp=12[,vpp=,cp=,ep=,dp=,sp=]`.

    Raises:
        SpecError: empty part, unknown or repeated key, not a whole number, zero, negative.
    """
    values: dict[str, int | bool | tuple[int, ...]] = {}
    for part in text.split(","):
        key, equals, number = (s.strip() for s in part.partition("="))
        if not part.strip():
            raise SpecError("layout", text, "has an empty part between commas", "write tp=8,pp=12")
        if key not in _SHORT:
            raise SpecError("layout", text, f"unknown key {key!r}", f"use {', '.join(_SHORT)}")
        if _SHORT[key] in values:
            raise SpecError("layout", text, f"{key} is given twice", "give each key once")
        if key == "sp":
            if number.lower() not in ("0", "1", "true", "false"):
                raise SpecError("layout.sp", number, "must be 0 or 1", "write sp=1")
            values[_SHORT[key]] = number.lower() in ("1", "true")
            continue
        if not equals or not number.isascii() or not number.removeprefix("-").isdigit() or len(number) > 9:
            raise SpecError(f"layout.{key}", number, "must be a whole number of at most 9 digits", f"write {key}=8")
        if int(number) < 1:
            raise SpecError(f"layout.{key}", number, "must be 1 or more", f"write {key}=1 or leave it out")
        values[_SHORT[key]] = int(number)
    if layer_split:
        values["layer_split"] = layer_split
    return validate(ParallelConfig, values, where="layout.")


def fill_data_parallel(layout: ParallelConfig, num_gpus: int | None) -> ParallelConfig:
    """The layout with data_parallel known.

    Raises:
        PlacementError: num_gpus is not a multiple of tp * pp * cp, or disagrees with the product.
    """
    if num_gpus is None:
        return layout.model_copy(update={"data_parallel": layout.data_parallel or 1})
    if num_gpus < 1:
        raise SpecError("num_gpus", num_gpus, "must be 1 or more", "give the GPUs of the job")
    replicas, rest = divmod(num_gpus, layout.model_gpus)
    if rest or replicas == 0:
        near = max(1, round(num_gpus / layout.model_gpus)) * layout.model_gpus
        raise PlacementError(
            "num_gpus",
            num_gpus,
            f"must be a multiple of tp*pp*cp = {layout.model_gpus}",
            f"use for example {near} GPUs",
        )
    if layout.data_parallel not in (0, replicas):
        raise PlacementError(
            "layout.dp",
            layout.data_parallel,
            f"tp*pp*cp*dp = {layout.num_gpus} but num_gpus = {num_gpus}",
            f"use dp={replicas}",
        )
    return layout.model_copy(update={"data_parallel": replicas})
