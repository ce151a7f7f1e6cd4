"""One point of a search space: the choices that a search makes, as a hashable value."""

from dataclasses import dataclass, fields
from typing import Any, Self

from echo_explore.core.hashing import content_hash
from echo_explore.specs.placement import DEFAULT_ORDER, placement_number
from echo_explore.specs.recipe import SEARCHED_SCHEDULES
from echo_explore.specs.recompute import recompute_number


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPoint:
    """The choices of one candidate; equal points are the same candidate.

    Attributes:
        num_gpus: GPUs of the job.
        recompute: in the normal form of `specs.recompute`.
        sequence_parallel: false where tensor_parallel is 1 (it changes nothing there).
        placement: as `parse_placement` takes it; of several that place all groups alike the first of the space.
        schedule: by name; `auto` wherever it is what Megatron runs with these stages and chunks.
    """

    num_gpus: int
    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    micro_batch_size: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    placement: str = DEFAULT_ORDER
    schedule: str = "auto"

    @property
    def data_parallel(self) -> int:
        """Replicas: what the other degrees leave of num_gpus."""
        return self.num_gpus // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def order(self) -> tuple[int, ...]:
        """A total order of points, used wherever ties must be broken the same way everywhere."""
        degrees = (self.num_gpus, self.tensor_parallel, self.pipeline_parallel, self.virtual_pipeline)
        rest = (self.context_parallel, self.expert_parallel, self.micro_batch_size)
        last = (recompute_number(self.recompute), int(self.sequence_parallel), placement_number(self.placement))
        return (*degrees, *rest, *last, SEARCHED_SCHEDULES.index(self.schedule))

    @property
    def key(self) -> str:
        """Content hash of the point, 16 hex digits."""
        return content_hash(self.params())

    def params(self) -> dict[str, Any]:
        """Name to value of every choice, as the ledger and the study write them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> Self:
        """The point that `params` wrote."""
        return cls(**params)

    def label(self) -> str:
        """`96 GPUs tp8 pp12 dp1 mb1 sp selective`: what people read."""
        parts = [f"{self.num_gpus} GPUs", f"tp{self.tensor_parallel}", f"pp{self.pipeline_parallel}"]
        parts += [f"vpp{self.virtual_pipeline}"] if self.virtual_pipeline > 1 else []
        parts += [f"cp{self.context_parallel}"] if self.context_parallel > 1 else []
        parts += [f"ep{self.expert_parallel}"] if self.expert_parallel > 1 else []
        parts += [f"dp{self.data_parallel}", f"mb{self.micro_batch_size}", f"recompute={self.recompute}"]
        parts += ["sp"] if self.sequence_parallel else []
        parts += [self.placement] if self.placement != DEFAULT_ORDER else []
        return " ".join([*parts, *([self.schedule] if self.schedule != "auto" else [])])
