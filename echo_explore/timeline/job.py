"""What the timeline simulates: a rank class per stage and kind of replica, timed chunks, transfers, the step's end."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from echo_explore.graph import Axis, Collective, TimedGraph
from echo_explore.graph.execution_graph import Ints
from echo_explore.specs.schedules import num_ahead, num_copies
from echo_explore.timeline.host import HostModules


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucket:
    """One bucket of gradients of a chunk, reduced over data-parallel ranks.

    Attributes:
        axis: DATA, or EXPERT_DATA of experts, whose reductions are another communicator's and run beside the first's.
        collective: ALL_REDUCE or REDUCE_SCATTER.
        message_bytes: nccl-tests' S.
        time_s: alone.
        sigma_log: of time_s.
        traffic_class: column of the pair table; -1: the code of `collective`.
        ready_after: row of the chunk's backward graph after which all its gradients are there.
    """

    collective: Collective
    message_bytes: float
    time_s: float
    sigma_log: float
    ready_after: int
    traffic_class: int = -1
    axis: Axis = Axis.DATA

    @property
    def pair_class(self) -> int:
        """Column of the pair table."""
        return int(self.collective) if self.traffic_class < 0 else self.traffic_class


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGather:
    """One bucket of updated parameters, gathered over data-parallel ranks.

    Attributes:
        axis: see GradientBucket.
        needed_before: row of the chunk's forward graph that reads the first of its parameters.
        traffic_class: column of the pair table; -1: the code of ALL_GATHER.
    """

    message_bytes: float
    time_s: float
    sigma_log: float
    needed_before: int
    traffic_class: int = -1
    axis: Axis = Axis.DATA

    @property
    def pair_class(self) -> int:
        """Column of the pair table."""
        return int(Collective.ALL_GATHER) if self.traffic_class < 0 else self.traffic_class


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitBackward:
    """The rows of a backward in two passes.

    Attributes:
        input: rows that lead to the gradient of the chunk's input.
        weight: the other rows, which only gradients of weights need.
        weight_row: (num_rows of the backward,) last row of `weight` that is this row or before it, -1 for none.
    """

    input: TimedGraph
    weight: TimedGraph
    weight_row: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkJob:
    """One model chunk of a stage: what a micro-batch costs, and its data-parallel traffic once a step.

    Attributes:
        split: the backward in two passes, for schedules that run them apart.
        buckets: in launch order (last layers first); empty at data-parallel 1.
        gathers: in order of need; used where gathers overlap the forward, else they are in the stage's epilogue.
    """

    forward: TimedGraph
    backward: TimedGraph
    split: SplitBackward | None = None
    buckets: tuple[GradientBucket, ...] = ()
    gathers: tuple[ParameterGather, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageJob:
    """One rank class: all ranks of a pipeline stage, or of one in some of the replicas.

    Attributes:
        multiplicity: ranks in the class.
        chunks: by virtual pipeline chunk; which chunk of the model that is, the schedule says.
        send_forward_s: of an activation to the next chunk's stage, alone.
        send_backward_s: of a gradient to the previous chunk's stage, alone.
        send_sigma_log: of both.
        send_bytes: of either.
        epilogue: from the end of the last backward (and of bucket reductions) to the end of the step: rows in order.
            Collectives over Axis.EMBEDDING start together on the first and last stage of a replica, those over
            Axis.MODEL on all its stages, those over Axis.DATA and Axis.EXPERT_DATA on all kinds of replicas.
    """

    label: str
    multiplicity: int
    chunks: tuple[ChunkJob, ...]
    send_forward_s: float
    send_backward_s: float
    send_sigma_log: float
    epilogue: TimedGraph
    send_bytes: float = 0.0

    @property
    def content(self) -> tuple[object, ...]:
        """What the timeline runs of it: stages of equal contents run the same."""
        chunks = tuple(
            (chunk.forward.digest, chunk.backward.digest, chunk.buckets, chunk.gathers)
            + ((chunk.split.input.digest, chunk.split.weight.digest) if chunk.split else ())
            for chunk in self.chunks
        )
        return (*chunks, self.epilogue.digest, self.send_forward_s, self.send_backward_s, self.send_sigma_log)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaVariant:
    """Data-parallel replicas that run beside those of `PipelineJob.stages` and differ from them in what things take.

    Attributes:
        label: what sets them apart.
        num_replicas: how many they are.
        stages: as many as those of the job, with the same chunks, buckets, gathers and collectives over replicas.
        exchange_group: replicas of which equal numbers exchange tokens with each other; the job's own have 0.
    """

    label: str
    num_replicas: int
    stages: tuple[StageJob, ...]
    exchange_group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLinks:
    """Two axes whose collectives share links where they run beside each other on a rank.

    Attributes:
        first: one axis; axes of one stream never run beside each other.
        second: the other.
        first_slowdown: time of a collective of the first over that alone, 1 or more.
        second_slowdown: the same of the second.
    """

    first: Axis
    second: Axis
    first_slowdown: float
    second_slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineJob:
    """A whole step of a job.

    Attributes:
        stages: of the job's replicas, or of the first of several groups of them.
        num_replicas: how many these are.
        variants: further replicas, which meet the first at collectives over replicas.
        schedule: name of `specs.schedules.SCHEDULES`, or "custom".
        schedule_lines: orders of "custom", one line a stage.
        overlap_grad_reduce: bucket reductions start as soon as ready in the last backward of their chunk, on the stream
            of their axis; else they run after the last backward of the stage, one after the other.
        overlap_param_gather: gathers run beside the first forward.
        overlap_p2p: transfers run beside compute; else the sender's compute stream waits for its send.
        overlap_exchanges: exchanges of experts in a forward run beside the backward of another micro-batch, and the
            reverse; Megatron's schedules then run one forward ahead.
        host_call_s: host time of one of `ExecutionGraph.host_calls` in a forward or recomputation; 0 with CUDA graphs.
            A forward or backward of a chunk lasts at least as long as its calls take the host.
        host_backward_call_s: the same in a backward.
        host_expert_call_s: host time of each further expert's product or cast behind a row that stands for all experts.
        host_modules: host time of modules whose Python does more than their operators; None: nothing more.
        host_collective_s: what each collective takes the host beyond that, by code of its `Axis`; empty: nothing.
        host_step_s: host time once a step, after the epilogue.
        host_update_s: host time of one of `ExecutionGraph.host_calls` of the epilogues.
        group_ranks: ranks of a group by axis, as far as it has any; what they send is counted with it.
        shared_links: which axes hold each other back, and how much.
        jitter_sigma_log: every forward and backward takes exp(jitter_sigma_log |z|) times as long, z standard normal,
            drawn anew for each pass of each stage; 0: none. With it no micro-batch repeats another.
        jitter_seed: of the draws.
        launch_blocking: the host launches a kernel only when the one before has ended (CUDA_LAUNCH_BLOCKING=1).
    """

    stages: tuple[StageJob, ...]
    schedule: str
    num_micro_batches: int
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    overlap_p2p: bool
    host_call_s: float
    host_backward_call_s: float
    host_step_s: float
    schedule_lines: tuple[str, ...] = ()
    launch_blocking: bool = False
    overlap_exchanges: bool = False
    host_expert_call_s: float = 0.0
    host_update_s: float = 0.0
    host_modules: HostModules | None = None
    host_collective_s: tuple[float, ...] = ()
    group_ranks: Mapping[Axis, int] = field(default_factory=dict)
    shared_links: tuple[SharedLinks, ...] = ()
    jitter_sigma_log: float = 0.0
    jitter_seed: int = 0
    num_replicas: int = 1
    variants: tuple[ReplicaVariant, ...] = ()

    @property
    def content(self) -> tuple[object, ...]:
        """What the timeline runs: jobs of equal contents take the same time."""
        of_kinds = ("stages", "variants", "num_replicas")
        own = tuple(getattr(self, item.name) for item in fields(self) if item.name not in of_kinds)
        kinds = tuple(variant.exchange_group for variant in self.variants)
        return (own, kinds, *(stage.content for stage in self.classes))

    @property
    def classes(self) -> tuple[StageJob, ...]:
        """The rank classes: the stages, then those of each variant in turn."""
        return self.stages + tuple(stage for variant in self.variants for stage in variant.stages)

    @property
    def num_variants(self) -> int:
        """Kinds of replicas, the first included."""
        return 1 + len(self.variants)

    @property
    def exchange_groups(self) -> tuple[int, ...]:
        """(num_variants,) numbers of the groups that exchange tokens."""
        return (0, *(variant.exchange_group for variant in self.variants))

    @property
    def micro_batches_of_chunk(self) -> int:
        """Micro-batches that come through each chunk."""
        return self.num_micro_batches // num_copies(self.schedule)

    @property
    def ahead(self) -> int:
        """Forwards that the schedule runs ahead."""
        return num_ahead(self.schedule, overlap_exchanges=self.overlap_exchanges)
