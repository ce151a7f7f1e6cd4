"""Where ranks run: the order of the parallelism axes, and the GPU of every rank.

An order names the axes from the fastest to the slowest: in `tp-cp-ep-dp-pp`, Megatron's default, tensor neighbours are
neighbouring ranks and pipeline stages lie farthest apart.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from echo_explore.core import PlacementError, SpecError
from echo_explore.core.hashing import content_hash
from echo_explore.specs.base import IntTuple, StrictModel, load_spec
from echo_explore.specs.layout import ParallelConfig

AXIS_NAMES: Final = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER: Final = "-".join(AXIS_NAMES)
ORDERS: Final = tuple("-".join(names) for names in permutations(AXIS_NAMES))
"""All orders, the default first."""
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The order of axes, and the GPU of each rank.

    Attributes:
        order: the axes tp, cp, ep, dp, pp, each once, from the fastest to the slowest, joined by `-`.
        device_of_rank: GPU of each rank, counted host by host through the cluster; empty: rank r on GPU r of those that
            the job gets.
    """

    order: str = DEFAULT_ORDER
    device_of_rank: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise SpecError(
                "placement.order", self.order, "must name tp, cp, ep, dp, pp once each", f'write "{DEFAULT_ORDER}"'
            )
        seen: dict[int, int] = {}
        for rank, device in enumerate(self.device_of_rank):
            if device < 0:
                raise SpecError("placement.device_of_rank", device, f"rank {rank} needs a GPU", "count from 0")
            if device in seen:
                raise SpecError(
                    "placement.device_of_rank",
                    device,
                    f"ranks {seen[device]} and {rank} are both mapped to it",
                    "give every rank a GPU of its own",
                )
            seen[device] = rank

    @property
    def is_default(self) -> bool:
        """Megatron's order on GPUs in turn."""
        return self.order == DEFAULT_ORDER and not self.device_of_rank

    def check_fits(self, layout: ParallelConfig, *, max_gpus: int) -> None:
        """Refuse a placement that is not one of this layout on this cluster; data_parallel must be known.

        Raises:
            PlacementError: the map is of another number of ranks, or names a GPU that the cluster has not; the order
                does not fit experts and pipelines together.
        """
        check_order(self.order, layout)
        if not self.device_of_rank:
            return
        if len(self.device_of_rank) != layout.num_gpus:
            raise PlacementError(
                "placement.device_of_rank",
                f"({len(self.device_of_rank)} ranks)",
                f"the layout has {layout.num_gpus}",
                "map every rank once",
            )
        if max(self.device_of_rank) >= max_gpus:
            raise PlacementError(
                "placement.device_of_rank",
                max(self.device_of_rank),
                f"the cluster has GPUs 0..{max_gpus - 1}",
                "correct the map",
            )

    def label(self) -> str:
        """The order, and a map by 8 digits of its hash."""
        own_map = f"map-{content_hash(list(self.device_of_rank), num_hex=8)}" if self.device_of_rank else ""
        return " ".join(part for part in (self.order, own_map) if part)


DEFAULT_PLACEMENT: Final = Placement()


def check_order(order: str, layout: ParallelConfig) -> None:
    """What megatron-core 0.16.1 accepts (parallel_state.py, initialize_model_parallel).

    Raises:
        PlacementError: pipelines of dense layers and of experts would differ.
    """
    same = layout.expert_parallel == layout.context_parallel
    if layout.expert_parallel == 1 or order.endswith("pp") or layout.pipeline_parallel == 1 or same:
        return
    raise PlacementError(
        "placement.order",
        order,
        "with experts the pipeline must come last, or ep equal cp, so that both have the same pipelines",
        "end it with pp",
    )


def order_that_matters(order: str, layout: ParallelConfig) -> str:
    """The order of those axes that have more than one rank: equal texts place all groups alike."""
    sizes = {
        "tp": max(layout.tensor_parallel, layout.expert_tensor_ranks),
        "cp": layout.context_parallel,
        "ep": layout.expert_parallel,
        "dp": max(layout.data_parallel, layout.expert_data_parallel),
        "pp": layout.pipeline_parallel,
    }
    return "-".join(name for name in order.split("-") if sizes[name] > 1)


def placement_from_pairs(pairs: Iterable[tuple[int, int]], *, order: str = DEFAULT_ORDER) -> Placement:
    """The placement of a list of (rank, GPU).

    Raises:
        SpecError: a rank is mapped twice or left out, or a GPU is used twice.
    """
    found: dict[int, int] = {}
    for rank, device in pairs:
        if rank in found:
            raise SpecError(
                "placement.device_of_rank",
                rank,
                f"the rank is mapped twice, to GPU {found[rank]} and to {device}",
                "map every rank once",
            )
        found[rank] = device
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise SpecError("placement.device_of_rank", missing[0], "the rank is not mapped", "map ranks 0, 1, 2, ...")
    return Placement(order=order, device_of_rank=tuple(found[rank] for rank in range(len(found))))


def _pairs(value: object) -> object:
    return tuple(tuple(v) if isinstance(v, list) else v for v in value) if isinstance(value, list) else value


class _PlacementFile(StrictModel):
    """A map as a TOML file: `device_of_rank = [...]`, or `pairs = [[rank, GPU], ...]` in any order."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    order: str = DEFAULT_ORDER
    device_of_rank: IntTuple = ()
    pairs: Annotated[tuple[tuple[int, int], ...], BeforeValidator(_pairs)] = ()


def parse_placement(text: str) -> Placement:
    """The placement that a user names.

    Args:
        text: an order (`tp-cp-ep-pp-dp`), the GPU of every rank (`0-3,8-11`), both with a colon between, or a TOML file
            with `order` and `device_of_rank` or `pairs`.

    Raises:
        SpecError: none of these, or the placement is wrong in itself.
    """
    if text.endswith(".toml"):
        file = load_spec(_PlacementFile, Path(text).expanduser())
        if file.pairs and file.device_of_rank:
            raise SpecError("placement", text, "gives both device_of_rank and pairs", "leave one out")
        if file.pairs:
            return placement_from_pairs(file.pairs, order=file.order)
        return Placement(order=file.order, device_of_rank=file.device_of_rank)
    first, colon, second = text.partition(":")
    if colon:
        return Placement(order=first, device_of_rank=_devices(second))
    return Placement(device_of_rank=_devices(text)) if text[:1].isdigit() else Placement(order=text)


def placement_number(text: str) -> int:
    """A whole number that orders placements, the default first: of an order its place, of others a hash."""
    return ORDERS.index(text) if text in ORDERS else len(ORDERS) + int(content_hash(text, num_hex=12), 16)


def _devices(text: str) -> tuple[int, ...]:
    devices: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            rule = f"{part.strip()!r} is no GPU and no range of GPUs"
            raise SpecError("placement", text, rule, "write for example 0-3,8-11")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or len(devices) + high - low >= _MOST_RANKS:
            rule = f"{part.strip()!r} must count up, over at most {_MOST_RANKS} GPUs in all"
            raise SpecError("placement", text, rule, "write for example 0-3,8-11")
        devices += range(low, high + 1)
    return tuple(devices)
