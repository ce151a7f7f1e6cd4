"""What disturbs a healthy run, as `--what-if` says it: slow ranks, broken links, other GPUs, chance."""

import math
from dataclasses import dataclass

from echo_explore.core import SpecError
from echo_explore.graph import Axis
from echo_explore.specs import load_cluster

AXES = {
    "tensor": (Axis.TENSOR,),
    "context": (Axis.CONTEXT,),
    "expert": (Axis.EXPERT, Axis.EXPERT_DATA, Axis.EXPERT_TENSOR, Axis.EXPERT_MODEL),
    "data": (Axis.DATA,),
    "pipeline": (Axis.PIPELINE, Axis.EMBEDDING),
}
"""Axes by the name that a what-if has for their traffic."""
LEAST_FACTOR, LARGEST_FACTOR = 1e-3, 1e3
"""Outside of these a factor is a slip: no part of a GPU or network is a thousand times better or worse than another in
use. 0 is allowed beside them, for a cause that takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReplicas:
    """Replicas with a rank in a stage whose kernels take `factor` times as long (`slow_rank=STAGE:FACTOR:REPLICAS`)."""

    num_replicas: int
    stage: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLinks:
    """Replicas whose transfers of these names take `factor` times as long (`broken_link=AXIS+AXIS:FACTOR:REPLICAS`)."""

    num_replicas: int
    names: tuple[str, ...]
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGpus:
    """Replicas on the GPU of another cluster (`mixed_gpu=CLUSTER:REPLICAS`)."""

    num_replicas: int
    cluster: str


Disturbed = SlowReplicas | BrokenLinks | OtherGpus
"""Replicas that are not as the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
    """What `slow_rank=` says.

    Attributes:
        everywhere: stages that are slow in every replica, and their factors.
        replicas: those that are slow in some.
    """

    everywhere: tuple[tuple[int, float], ...] = ()
    replicas: tuple[SlowReplicas, ...] = ()


def slow_ranks(text: str, value: str) -> SlowRanks:
    """Of `3:1.2,5:1.1:2`; `text` is what was given, for messages.

    Raises:
        SpecError: no stage, factor or number of replicas; a stage given twice.
    """
    everywhere: dict[int, float] = {}
    replicas: list[SlowReplicas] = []
    for part in value.split(","):
        stage, factor, count = _three(part)
        number = _number(factor)
        if not stage.isdecimal() or not 1.0 <= number <= LARGEST_FACTOR:
            rule = f"needs STAGE:FACTOR or STAGE:FACTOR:REPLICAS with a factor from 1 to {LARGEST_FACTOR:g}"
            raise SpecError("what-if", text, rule, "write slow_rank=3:1.2")
        if int(stage) in everywhere or (part.count(":") < 2 and int(stage) in [slow.stage for slow in replicas]):
            raise SpecError("what-if", text, f"stage {stage} is given twice", "give each stage once")
        if part.count(":") > 1:
            some = _count(text, count, "slow_rank=3:1.2:1")
            replicas.append(SlowReplicas(num_replicas=some, stage=int(stage), factor=number))
        else:
            everywhere[int(stage)] = number
    return SlowRanks(everywhere=tuple(everywhere.items()), replicas=tuple(replicas))


def broken_links(text: str, value: str) -> tuple[BrokenLinks, ...]:
    """Of `data+pipeline:4:1`, several parted by commas.

    Raises:
        SpecError: an unknown axis, no factor of 1 or more, no number of replicas.
    """
    found = []
    for part in value.split(","):
        axes, factor, count = _three(part)
        names = tuple(name.strip() for name in axes.split("+"))
        number = _number(factor)
        if not set(names) <= set(AXES) or not 1.0 <= number <= LARGEST_FACTOR:
            rule = f"needs AXIS:FACTOR:REPLICAS, axes of {', '.join(AXES)}, a factor from 1 to {LARGEST_FACTOR:g}"
            raise SpecError("what-if", text, rule, "write broken_link=data+pipeline:4:1")
        some = _count(text, count, "broken_link=data:4:1")
        found.append(BrokenLinks(num_replicas=some, names=names, factor=number))
    return tuple(found)


def other_gpus(text: str, value: str) -> tuple[OtherGpus, ...]:
    """Of `a100-80gb-hdr:2`, several parted by commas.

    Raises:
        SpecError: an unknown cluster, no number of replicas.
    """
    found = []
    for part in value.split(","):
        cluster, _, count = (word.strip() for word in part.rpartition(":"))
        some = _count(text, count if cluster else "", "mixed_gpu=a100-80gb-hdr:2")
        known_cluster(text, cluster)
        found.append(OtherGpus(num_replicas=some, cluster=cluster))
    return tuple(found)


def known_cluster(text: str, name: str) -> str:
    """The name of a cluster; `text` is what was given, for messages.

    Raises:
        SpecError: there is no such cluster, or its file is wrong.
    """
    try:
        load_cluster(name)
    except SpecError as error:
        if error.field != "cluster":
            raise
        raise SpecError("what-if", text, f"{name!r} {error.rule}", error.fix) from error
    return name


def jitter(text: str, value: str) -> tuple[float, int]:
    """Sigma and seed of `0.05` or `0.05:7`.

    Raises:
        SpecError: no sigma from 0 to 1, or no whole seed.
    """
    sigma, _, seed = (word.strip() for word in value.partition(":"))
    number = _number(sigma)
    if not 0.0 <= number <= 1.0 or not (seed or "0").isdecimal():
        raise SpecError("what-if", text, "needs SIGMA or SIGMA:SEED with a sigma from 0 to 1", "write jitter=0.05:1")
    return number, int(seed or "0")


def _three(part: str) -> tuple[str, str, str]:
    first, _, rest = part.partition(":")
    second, _, third = rest.partition(":")
    return first.strip(), second.strip(), third.strip()


def _count(text: str, count: str, example: str) -> int:
    if not count.isdecimal() or int(count) < 1:
        raise SpecError("what-if", text, "the number of replicas must be 1 or more", f"write {example}")
    return int(count)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
