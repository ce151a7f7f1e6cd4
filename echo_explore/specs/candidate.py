"""A candidate: everything that one prediction depends on, checked against each other."""

from dataclasses import dataclass
from functools import cached_property

from echo_explore.core import PlacementError, SpecError
from echo_explore.core.hashing import content_hash
from echo_explore.specs.cluster import ClusterSpec
from echo_explore.specs.layout import ParallelConfig, fill_data_parallel
from echo_explore.specs.legality import check_legal
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.native_legality import check_native
from echo_explore.specs.optimizer import check_optimizer
from echo_explore.specs.placement import DEFAULT_PLACEMENT, Placement
from echo_explore.specs.recipe import StackProfile, TrainingRecipe
from echo_explore.specs.recompute import check_recomputed_groups
from echo_explore.specs.schedules import (
    PipelineSchedule,
    build_schedule,
    default_schedule,
    num_ahead,
    num_copies,
    resolved_schedule,
)
from echo_explore.specs.sharding import shard_ranks
from echo_explore.specs.split import layers_of_chunks


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model, a cluster, a layout, a recipe and a stack that are legal together; built by `make_candidate`.

    Attributes:
        layout: with data_parallel known.
        recipe: with every field resolved.
        chunk_layers: layers of each chunk in model order, `schedule.num_model_chunks` entries; `schedule` says which
            stage has which.
        placement: order of the axes, and GPUs of ranks; it changes links, not what ranks do.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: ParallelConfig
    recipe: TrainingRecipe
    stack: StackProfile
    chunk_layers: tuple[int, ...]
    placement: Placement = DEFAULT_PLACEMENT

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.layout.num_gpus

    @property
    def stack_on_host(self) -> StackProfile:
        """The stack profile with host times of the cluster's hosts."""
        return self.stack.on_host(self.cluster.node)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one replica runs in a step."""
        return self.recipe.global_batch_size // (self.recipe.micro_batch_size * self.layout.data_parallel)

    @property
    def schedule_by_default(self) -> str:
        """Name of the schedule that Megatron runs with the layout's stages and chunks."""
        return default_schedule(self.layout.pipeline_parallel, self.layout.virtual_pipeline)

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The order of passes on every stage, and which chunks of the model a stage holds."""
        return self.schedule_of(self.num_micro_batches)

    def schedule_of(self, num_micro_batches: int) -> PipelineSchedule:
        """The schedule with another number of micro-batches."""
        layout, recipe = self.layout, self.recipe
        name = resolved_schedule(recipe.schedule, layout.pipeline_parallel, layout.virtual_pipeline)
        return build_schedule(
            name,
            pipeline_parallel=layout.pipeline_parallel,
            virtual_pipeline=layout.virtual_pipeline,
            num_micro_batches=num_micro_batches,
            lines=recipe.schedule_lines,
            ahead=num_ahead(name, overlap_exchanges=self.overlaps_exchanges),
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas train on in a step."""
        return self.recipe.global_batch_size * self.recipe.sequence_length

    @property
    def overlaps_exchanges(self) -> bool:
        """Whether exchanges of experts run beside another micro-batch."""
        return bool(self.recipe.overlap_expert_exchange) and self.layout.expert_parallel > 1

    @property
    def overlaps_tensor(self) -> bool:
        """Whether gathers and scatters of activations run beside the products that read and make them."""
        return bool(self.recipe.overlap_tensor) and self.layout.tensor_parallel > 1 and self.layout.sequence_parallel

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same parameters: data- and context-parallel ones."""
        return self.layout.data_parallel * self.layout.context_parallel

    @property
    def num_shards(self) -> int:
        """Ranks over which a parameter is sharded: 1 unless the stack shards them."""
        layout = self.layout
        if not self.stack.fully_sharded:
            return 1
        return shard_ranks(
            self.stack.sharding,
            replicas=self.num_replicas,
            tensor_parallel=layout.tensor_parallel,
            gpus_per_host=self.cluster.node.num_gpus,
        )

    @cached_property
    def hash(self) -> str:
        """Content hash of everything in it."""
        parts = (self.model, self.cluster, self.layout, self.recipe, self.stack)
        placed = [] if self.placement.is_default else [self.placement.order, list(self.placement.device_of_rank)]
        return content_hash([*(p.model_dump(mode="json") for p in parts), list(self.chunk_layers), *placed])

    def label(self) -> str:
        """The layout, and the placement where it is not the default."""
        parts = [self.layout.label(), *([] if self.placement.is_default else [self.placement.label()])]
        return " ".join(parts)


def make_candidate(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: ParallelConfig,
    recipe: TrainingRecipe,
    stack: StackProfile,
    num_gpus: int | None = None,
    placement: Placement = DEFAULT_PLACEMENT,
    allow_fallback: bool = False,
) -> Candidate:
    """A legal candidate with data_parallel, recipe defaults and layer split filled in.

    Raises:
        SpecError, PlacementError: the first rule that is broken; see `check_legal`.
    """
    layout = fill_data_parallel(layout, num_gpus)
    if layout.num_gpus > cluster.max_gpus:
        raise PlacementError(
            "num_gpus",
            layout.num_gpus,
            f"{cluster.name} has max_nodes * gpus = {cluster.max_gpus}",
            "use fewer or raise max_nodes",
        )
    if layout.num_gpus > cluster.node.domain_gpus and "none" in (cluster.fabric.kind, cluster.fabric.topology):
        raise PlacementError(
            "num_gpus",
            layout.num_gpus,
            f"{cluster.name} has no fabric between hosts, and one holds {cluster.node.domain_gpus}",
            "use fewer GPUs, or describe the fabric",
        )
    known = recipe.precision == "fp32" or recipe.precision in cluster.device.peak_flop_per_s
    if not known and not allow_fallback:
        have = ", ".join(cluster.device.peak_flop_per_s)
        raise SpecError("precision", recipe.precision, f"{cluster.device.name} has no such rate", f"use one of {have}")
    if recipe.overlap_tensor and layout.tensor_parallel > 1 and not layout.sequence_parallel:
        raise SpecError("recipe.overlap_tensor", True, "needs sequence parallelism", "set sp=1, or leave it out")
    recipe = stack.resolve(recipe)
    placement.check_fits(layout, max_gpus=cluster.max_gpus)
    check_legal(model, layout, recipe)
    check_optimizer(model, layout, recipe, stack)
    check_native(model, layout, recipe, stack, gpus_per_host=cluster.node.num_gpus)
    schedule = resolved_schedule(recipe.schedule, layout.pipeline_parallel, layout.virtual_pipeline)
    chunk_layers = layers_of_chunks(model, layout, stack.layer_split_rule, num_copies=num_copies(schedule))
    check_recomputed_groups(recipe.recompute, chunk_layers)
    return Candidate(
        model=model,
        cluster=cluster,
        layout=layout,
        recipe=recipe,
        stack=stack,
        chunk_layers=chunk_layers,
        placement=placement,
    )
