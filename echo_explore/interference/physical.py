"""The physical model: each distinct kernel and collective of a job, and how they share their GPU."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from echo_explore.graph import Collective, ExecutionGraph
from echo_explore.interference.coefficients import (
    InterferenceCoefficients,
    learned_coefficients,
    shipped_coefficients,
)
from echo_explore.interference.contention import collective_slowdown, kernel_slowdown
from echo_explore.interference.graph_loads import (
    WEIGHT_GRADIENT_FRACTION,
    chip_of_device,
    graph_loads,
    weight_gradient_loads,
    weight_gradient_share,
)
from echo_explore.interference.loads import EXPERT_CHANNELS, Chip, Floats, KernelLoads, Traffic
from echo_explore.interference.pair_table import PairTable
from echo_explore.interference.pairing import Ints
from echo_explore.specs import DeviceSpec

_TIME_STEPS = 24
"""Kernels whose times differ by less than 3 % (a 24th of an octave) share a row of the table."""
_SHARE_STEPS = 50
"""Shares within 2 % of each other do too."""
PCIE_CHANNELS = 2
"""Of a ring over PCIe: the least that it runs twice (assumed, 2026-11)."""
_UNMOVED = (Collective.NONE, Collective.BARRIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalInterference:
    """Slowdown from SMs taken, memory shared and packets that wait for a link.

    Attributes:
        coefficients: constants; the shipped ones where left out.
    """

    reference: ClassVar[str] = (
        "SMs taken by channels, memory shared, blocks behind the link: NetX-lab/Echo-slowdown (2024), "
        "facebookresearch/HolisticTraceAnalysis (2023)"
    )
    version: ClassVar[int] = 2
    coefficients: InterferenceCoefficients = field(default_factory=shipped_coefficients)

    def pairing(self, device: DeviceSpec) -> "PhysicalPairing":
        """Starts a job on that GPU."""
        return PhysicalPairing(self.coefficients, device, reference=self.reference, version=self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedInterference(PhysicalInterference):
    """The same with a learned residual on top.

    Attributes:
        coefficients: constants with a residual; the shipped ones where left out.
    """

    reference: ClassVar[str] = f"{PhysicalInterference.reference}; a residual trained on kernels of both on top"
    coefficients: InterferenceCoefficients = field(default_factory=learned_coefficients)


class PhysicalPairing:
    """Numbers the distinct kernels and collectives of a job as they are priced, from 1 on."""

    def __init__(
        self, coefficients: InterferenceCoefficients, device: DeviceSpec, *, reference: str, version: int
    ) -> None:
        self._coefficients = coefficients
        self._device = device
        self._chip = chip_of_device(device, coefficients)
        self._kernels: dict[tuple[float, ...], int] = {}
        self._traffic: dict[Traffic, int] = {}
        self._table: PairTable | None = None
        self.reference = reference
        self.version = version

    def kernel_classes(self, graph: ExecutionGraph, time_s: Floats) -> Ints:
        """(num_ops,) number of each kernel; 0 for other rows and for kernels that take no time."""
        classes = np.zeros(graph.num_ops, dtype=np.int64)
        rows = np.flatnonzero(graph.is_compute & (time_s > 0))
        if not rows.size:
            return classes
        keys = _keys(graph, time_s, self._device, self._chip)[rows]
        classes[rows] = [self._kernels.setdefault(tuple(key), len(self._kernels) + 1) for key in keys.tolist()]
        return classes

    def traffic_class(self, kind: Collective, traffic: Traffic) -> int:
        """Number of a collective; 0 for one that moves nothing."""
        if kind in _UNMOVED or traffic.time_s <= 0:
            return 0
        return self._traffic.setdefault(traffic, len(self._traffic) + 1)

    def pair_table(self) -> PairTable:
        """Factors of (1 + kernels, 1 + collectives) seen so far; the same table as before where no more have come."""
        shape = (len(self._kernels) + 1, len(self._traffic) + 1)
        if self._table is not None and self._table.compute.shape == shape:
            return self._table
        compute, collective = np.ones(shape), np.ones(shape)
        if self._kernels and self._traffic:
            columns = np.array(list(self._kernels))
            loads, few, share = _loads(columns)
            for traffic, number in self._traffic.items():
                compute[1:, number] = self._kernel_factor(loads, few, share, traffic)
                collective[1:, number] = collective_slowdown(loads, traffic, self._chip, self._coefficients.sharing)
        self._table = PairTable(compute=compute, collective=collective, reference=self.reference, version=self.version)
        return self._table

    def _kernel_factor(self, loads: KernelLoads, few: KernelLoads, share: Floats, traffic: Traffic) -> Floats:
        sharing = self._coefficients.sharing
        slow = kernel_slowdown(loads, traffic, self._chip, sharing)
        slow_few = kernel_slowdown(few, traffic, self._chip, sharing)
        factor = (1.0 - share) * slow + share * slow_few
        residual = self._coefficients.residual
        return factor if residual is None else residual.applied(factor, loads, traffic, self._chip)


def _keys(graph: ExecutionGraph, time_s: Floats, device: DeviceSpec, chip: Chip) -> Floats:
    """(num_ops, 8) columns that a kernel's factors depend on, rounded."""
    loads = graph_loads(graph, time_s, device, chip)
    share = weight_gradient_share(graph)
    few = weight_gradient_loads(loads, graph)
    return np.stack(
        [
            np.round(np.log2(loads.time_s) * _TIME_STEPS) / _TIME_STEPS,
            np.round(loads.memory_fraction * _SHARE_STEPS) / _SHARE_STEPS,
            np.where(
                loads.arithmetic_fraction > 0,
                np.maximum(np.round(loads.arithmetic_fraction * _SHARE_STEPS), 0.5) / _SHARE_STEPS,
                0.0,
            ),
            loads.num_blocks,
            loads.blocks_per_sm,
            share,
            np.where(share > 0, few.num_blocks, 1.0),
            np.round(loads.l2_fraction * _SHARE_STEPS) / _SHARE_STEPS,
        ],
        axis=1,
    )


def _loads(columns: Floats) -> tuple[KernelLoads, KernelLoads, Floats]:
    """Loads from rounded columns: of the kernel, of its part with few blocks, and the share of that part."""
    loads = KernelLoads(
        time_s=np.exp2(columns[:, 0]),
        memory_fraction=columns[:, 1],
        l2_fraction=columns[:, 7],
        arithmetic_fraction=columns[:, 2],
        num_blocks=columns[:, 3],
        blocks_per_sm=columns[:, 4],
        fixed_grid=np.zeros(columns.shape[0], dtype=np.bool_),
    )
    few = replace(
        loads,
        time_s=loads.time_s * WEIGHT_GRADIENT_FRACTION,
        memory_fraction=np.minimum(loads.memory_fraction, 0.5),
        num_blocks=columns[:, 6],
        blocks_per_sm=np.full(columns.shape[0], 2.0),
    )
    return loads, few, columns[:, 5]


def traffic_of(
    *,
    num_channels: int,
    chunk_bytes: float,
    message_bytes: float,
    wire_bytes: float,
    num_ranks: int,
    in_domain: bool,
    time_s: float,
    link_bytes_per_s: float,
    over_pcie: bool = False,
    fused: bool = False,
) -> Traffic:
    """A priced collective as its GPU feels it.

    Between hosts a network card fetches what channels have laid out in memory, so that nothing backs up on their SMs:
    no burst.

    Args:
        num_channels: thread blocks.
        chunk_bytes: that a channel works on at a time.
        message_bytes: nccl-tests' S.
        wire_bytes: that a rank sends.
        num_ranks: of the group.
        in_domain: all of them share scale-up links.
        time_s: alone.
        link_bytes_per_s: peak of the scale-up link of a GPU, one direction.
        over_pcie: that link is PCIe, which two channels fill.
        fused: a dispatch or combine of experts in one kernel.
    """
    if fused:
        num_channels = EXPERT_CHANNELS
    elif over_pcie:
        num_channels = min(num_channels, PCIE_CHANNELS)
    rate = min(wire_bytes / time_s, link_bytes_per_s) if time_s > 0 else 0.0
    burst = min(num_channels * chunk_bytes, message_bytes / max(num_ranks, 1)) if in_domain else 0.0
    return Traffic(
        num_channels=num_channels,
        link_bytes_per_s=rate,
        link_peak_bytes_per_s=link_bytes_per_s,
        burst_bytes=burst,
        exclusive=fused,
        time_s=time_s if time_s > 0 else 0.0,
    )


def wire_bytes(kind: Collective, message_bytes: float, num_ranks: int) -> float:
    """Bytes that a rank sends in a ring or an exchange: nccl-tests' factors times S."""
    if num_ranks < 2:
        return 0.0
    part = (num_ranks - 1) / num_ranks
    if kind == Collective.ALL_REDUCE:
        return 2.0 * part * message_bytes
    if kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        return part * message_bytes
    return message_bytes
