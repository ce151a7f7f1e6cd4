"""What the collective model knows of a scale-up fabric and of a kind of network: constants fitted to measured times."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from echo_explore.core import MissingCalibration
from echo_explore.specs import ClusterSpec

PROTOCOLS: Final = ("LL", "LL128", "Simple")
"""NCCL's protocols, in the order of every triple below: flags in 8-byte words, flags in 128-byte lines, fences."""
PAIR_PROTOCOLS: Final = ("LL", "Simple")
"""The protocols of sends, in the order of every pair below [NCCL 2.18 src/enqueue.cc, 2023]."""
LL_SHARE: Final = 1 / 2
"""Most of a link that LL leaves to data: 4 of 8 bytes are a flag [NCCL 2.18 src/include/device.h, 2023]."""
LL128_SHARE: Final = 120 / 128
"""The same of LL128: 120 bytes of a line of 128 [the same, NCCL_LL128_DATAELEMS, 2023]."""
SIZE_BANDS_BYTES: Final = (256.0 * 1024, 16.0 * 1024 * 1024)
"""Message sizes that part the three bands of `sigma_log`: latency, protocol change, bandwidth."""
DEFAULT: Final = "default"
Triple = tuple[float, float, float]
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerWeights:
    """How NCCL's tuner misjudges: it takes the least of latency * own latency + stream * own transfer time.

    1 everywhere is a tuner that knows the true times. The weights are what reproduces the sizes at which measured
    curves jump from one protocol or algorithm to the next.

    Attributes:
        latency: on latencies, by protocol.
        stream: on transfer times, by protocol.
    """

    latency: Triple = (1.0, 1.0, 1.0)
    stream: Triple = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCosts:
    """Rings and chains of one collective inside a scale-up domain; triples by protocol.

    Attributes:
        launch_s: launch and set-up.
        hop_factor: time of one step between neighbours over NodeSpec.link_latency_s.
        efficiency: share of the link that carries data.
        hidden_fraction: share of the launch time during which bytes already move: small messages use more channels as
            they grow and take no longer.
        local_efficiency: rate at which a rank handles its own share, over the link bandwidth.
        byte_slowdown: factor on transfer times of 8-bit elements that are reduced.
        tuner: what NCCL believes of the three protocols.
    """

    launch_s: Triple
    hop_factor: Triple
    efficiency: Triple
    hidden_fraction: Triple
    local_efficiency: float
    byte_slowdown: float = 1.0
    tuner: TunerWeights = TunerWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCosts:
    """Reduction in the scale-up switch (NVLS).

    Attributes:
        launch_s: launch and set-up.
        efficiency: message bytes a second over the link bandwidth.
        tuner_latency: weight on its latency in the tuner.
        tuner_stream: weight on its transfer time.
    """

    launch_s: float
    efficiency: float
    tuner_latency: float = 1.0
    tuner_stream: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCosts:
    """Sends, alone or as an all-to-all; pairs by (LL, Simple).

    Attributes:
        launch_s: launch and set-up.
        message_s: each further message of an all-to-all, beyond those that go on at once.
        parallel_messages: messages that go on at once.
        efficiency: share of the link that carries data.
        hidden_fraction: as of rings.
        local_efficiency: rate at which a rank handles its own share, over the link bandwidth.
        ll_message_bytes: up to this size of one message NCCL uses LL, by (inside one host, over several hosts).
        uneven_bytes: of each message, the part that suffers when the ranks are no power of two.
    """

    launch_s: Pair
    message_s: Pair
    efficiency: Pair
    hidden_fraction: Pair
    parallel_messages: float
    local_efficiency: float
    ll_message_bytes: Pair
    uneven_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpCoefficients:
    """A scale-up fabric as NCCL drives it.

    Attributes:
        key: name in the file; `default` where the fabric was not measured.
        all_reduce, all_gather, reduce_scatter: rings of these; broadcast takes those of all-gather, reduce those of
            reduce-scatter.
        tree_efficiency: share of the link in chains of trees, for reduce and broadcast at once.
        switch: reduction in the switch.
        all_to_all: pairwise exchange.
        send: one transfer.
        ring_share: share of a GPU's links that rings of so many ranks use, where links are direct and rings need not
            use them all; 1 for counts that are not named.
        sigma_log: standard deviation of the log of measured over modelled time, by size band.
    """

    key: str
    all_reduce: RingCosts
    all_gather: RingCosts
    reduce_scatter: RingCosts
    tree_efficiency: float
    switch: SwitchCosts
    all_to_all: PairCosts
    send: PairCosts
    ring_share: Mapping[int, float] = field(default_factory=dict)
    sigma_log: Triple


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCoefficients:
    """A kind of network between nodes as NCCL drives it.

    Attributes:
        base_s: what a collective over nodes takes beyond one inside a node, once.
        hop_factor: time of one step between nodes over FabricSpec.latency_s, by protocol.
        protocol_efficiency: share of the cards' bandwidth that a protocol leaves to data.
        ring_efficiency: of the cards in rings.
        tree_efficiency: of the cards in trees.
        pair_efficiency: of the cards in all-to-all.
        rail_efficiency: of the cards for groups with one rank a node, which use only the card next to it, and sends.
        ring_tuner, tree_tuner: what NCCL believes of rings and trees between nodes.
        switch_tuner: weights on (latency, transfer time) of trees over the switch's reduction (NVLS-tree).
        sigma_log: for all-reduce, by size band.
        unmeasured_sigma_log: for collectives that were not measured between nodes.
        measured_bytes: least and most message bytes that it was fitted to.
        measured_ranks: least and most GPUs of the groups it was fitted to.
        simple_only: its cards keep no order inside a message, which the flags of LL and LL128 need.
        ring_step_s: least time of any step of a ring that leaves a node: each passes a proxy on the host there.
    """

    key: str
    base_s: float
    hop_factor: Triple
    protocol_efficiency: Triple
    ring_efficiency: float
    tree_efficiency: float
    pair_efficiency: float
    rail_efficiency: float
    ring_tuner: TunerWeights = TunerWeights()
    tree_tuner: TunerWeights = TunerWeights()
    switch_tuner: Pair = (1.0, 1.0)
    sigma_log: Triple
    unmeasured_sigma_log: float
    measured_bytes: Pair = (0.0, math.inf)
    measured_ranks: Pair = (0.0, math.inf)
    simple_only: bool = False
    ring_step_s: float = 0.0

    def is_measured(self, message_bytes: float, num_ranks: float) -> bool:
        """Within the sizes and the groups of the fit."""
        low, high = self.measured_bytes
        least, most = self.measured_ranks
        return low <= message_bytes <= high and least <= num_ranks <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotCosts:
    """A framework's own all-reduce kernels on one fabric; pairs by (one-shot, two-shot), triples by 2, 4, 8 ranks.

    Attributes:
        launch_s: kernel and barrier for 2 ranks.
        rank_s: what each further rank adds.
        efficiency: of the link.
        eager_s: least time, for 2 ranks, of a call that is not replayed from a CUDA graph.
        eager_rank_s: what each further rank adds to it.
        eager_copy_efficiency: rate over the link bandwidth at which such a call copies its input to a shared buffer.
        own_bytes: up to this size the two kernels run.
        switch_bytes: beyond it, up to this size, one that reduces in the scale-up switch; above, NCCL.
        switch_launch_s: of that kernel.
        switch_efficiency: message bytes a second over the link bandwidth.
        most_ranks: above this number too (2 where only PCIe joins the GPUs).
        sigma_log: standard deviation of the log of measured over modelled time.
    """

    launch_s: Pair
    rank_s: Pair
    efficiency: Pair
    eager_s: float
    eager_rank_s: float
    eager_copy_efficiency: float
    own_bytes: Triple
    switch_bytes: Triple = (0.0, 0.0, 0.0)
    switch_launch_s: float = 12e-6
    switch_efficiency: float = 0.4
    most_ranks: int
    sigma_log: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """A dispatch or a combine of a fused exchange of tokens and experts on one device; see `exchange`.

    Attributes:
        launch_s: kernels and their handshake.
        byte_s: what each byte of a token adds: its way through a block's buffers.
        visit_s: time of one SM for a token at one rank.
        sm_bytes_per_s: that one SM moves.
        link_efficiency: share of the scale-up link that carries tokens.
        node_s: what each domain adds, where there are several.
        network_efficiency: of the cards.
        num_sms: that the kernel takes.
        sigma_log: standard deviation of the log of measured over modelled time.
    """

    launch_s: float
    byte_s: float
    visit_s: float
    sm_bytes_per_s: float
    link_efficiency: float
    node_s: float
    network_efficiency: float
    num_sms: int
    sigma_log: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolConstants:
    """What a measured time includes beside the collective: measured = max(time + launch, floor).

    Attributes:
        launch_s: launch that the tool counts and nccl-tests hides behind the previous one.
        floor_s: least time that the tool reports.
    """

    key: str
    launch_s: float = 0.0
    floor_s: float = 0.0

    def measured_s(self, time_s: float) -> float:
        """What the tool reports for a collective that takes `time_s`."""
        return max(time_s + self.launch_s, self.floor_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCoefficients:
    """All coefficients of one file.

    Attributes:
        custom: frameworks' own kernels, by `<framework>/<device calibration>`.
        exchange: fused exchanges, by `<dispatcher>/<device calibration or architecture>/<phase>`.
        tools: by name.
    """

    scale_up: Mapping[str, ScaleUpCoefficients]
    network: Mapping[str, NetworkCoefficients]
    custom: Mapping[str, OneShotCosts] = field(default_factory=dict)
    exchange: Mapping[str, ExchangeCosts] = field(default_factory=dict)
    tools: Mapping[str, ToolConstants] = field(default_factory=dict)

    def scale_up_of(self, cluster: ClusterSpec) -> ScaleUpCoefficients:
        """Those of `<link>-<device calibration>`, else of `<link>-<architecture>`, `<link>`, `default`.

        Raises:
            MissingCalibration: the file has none of these.
        """
        link, device = cluster.node.link, cluster.device
        for key in (f"{link}-{device.calibration}", f"{link}-{device.architecture}", link, DEFAULT):
            if key in self.scale_up:
                return self.scale_up[key]
        raise MissingCalibration(f"scale_up.{link}: no coefficients in the comm calibration; fix: add scale_up.default")

    def network_of(self, cluster: ClusterSpec, library: str = "") -> NetworkCoefficients:
        """Those of `<kind>-<architecture>-<library>`, else of `<kind>-<architecture>`, the fabric's kind, `default`.

        Raises:
            MissingCalibration: the file has none of these.
        """
        kind = cluster.fabric.kind
        device = f"{kind}-{cluster.device.architecture}"
        for key in (f"{device}-{library}", device, kind, DEFAULT):
            if key in self.network:
                return self.network[key]
        raise MissingCalibration(f"network.{kind}: no coefficients in the comm calibration; fix: add network.default")
