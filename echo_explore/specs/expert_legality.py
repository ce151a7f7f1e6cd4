"""Which layouts and recipes of a mixture of experts Megatron-core accepts (0.16.1, transformer_config.py, 2026)."""

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec, MoeSpec
from echo_explore.specs.recipe import TrainingRecipe
from echo_explore.specs.recompute import recomputes_layers
from echo_explore.specs.routing import Routing


def routing_of(moe: MoeSpec, load: tuple[float, ...]) -> Routing:
    """Which experts tokens visit; `load` as in TrainingRecipe.expert_load.

    Raises:
        SpecError: the load is not one of these experts.
    """
    return Routing(
        num_experts=moe.num_experts,
        experts_per_token=moe.experts_per_token,
        num_groups=moe.num_groups,
        groups_per_token=moe.groups_per_token,
        load=load,
    )


def check_experts(model: ModelSpec, layout: ParallelConfig, recipe: TrainingRecipe) -> None:
    """Refuse what the framework would refuse; recipes of dense models may name a dispatcher, which then does nothing.

    Raises:
        PlacementError: a degree does not divide what it splits.
        SpecError: the recipe does not fit the experts.
    """
    expert, split, moe = layout.expert_parallel, layout.expert_tensor_ranks, model.moe
    if moe is None:
        for key, degree in (("ep", expert), ("etp", layout.expert_tensor_parallel)):
            if degree > 1:
                raise PlacementError(f"layout.{key}", degree, f"{model.name} has no experts", f"leave {key} out")
        for name in ("expert_load", "expert_capacity_factor", "pad_expert_input"):
            if getattr(recipe, name):
                raise SpecError(f"recipe.{name}", "(given)", f"{model.name} has no experts", "leave it out")
        return
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        rule = "experts beside tensor parallelism need sequence parallelism (megatron-core, moe_layer.py)"
        raise PlacementError("layout.sp", 0, rule, "add sp=1")
    if expert == 1 and split != layout.tensor_parallel:
        rule = f"without expert parallelism experts are split as dense layers are, over tp = {layout.tensor_parallel}"
        raise PlacementError("layout.etp", split, rule, "leave etp out")
    if moe.num_experts % expert:
        raise PlacementError("layout.ep", expert, f"must divide num_experts = {moe.num_experts}", "change ep")
    if moe.ffn_hidden_size % split:
        rule = f"must divide moe.ffn_hidden_size = {moe.ffn_hidden_size}"
        raise PlacementError("layout.etp", split, rule, "change etp")
    if model.linear_bias and split > 1:
        raise PlacementError("layout.etp", split, "experts with biases are not split by Megatron", "use etp=1")
    if moe.shared_ffn_hidden_size % layout.tensor_parallel:
        rule = f"must divide moe.shared_ffn_hidden_size = {moe.shared_ffn_hidden_size}"
        raise PlacementError("layout.tp", layout.tensor_parallel, rule, "change tp")
    spread = layout.tensor_parallel * layout.context_parallel * layout.data_parallel
    if spread % layout.expert_gpus:
        raise PlacementError(
            "layout.ep", expert, f"etp*ep = {layout.expert_gpus} must divide tp*cp*dp = {spread}", "change ep or dp"
        )
    routing_of(moe, recipe.expert_load)
    _check_recipe(layout, recipe)


def _check_recipe(layout: ParallelConfig, recipe: TrainingRecipe) -> None:
    factor, padded, dispatcher = recipe.expert_capacity_factor, recipe.pad_expert_input, recipe.expert_dispatcher
    refused: tuple[tuple[str, object, bool, str, str], ...] = (
        ("pad_expert_input", padded, padded and factor is None, "needs expert_capacity_factor", "give a factor"),
        (
            "expert_capacity_factor", factor, factor is not None and not padded,
            "without padding only the GPU knows what an expert gets, which is not modelled", "set pad_expert_input",
        ),
        (
            "expert_load", f"({len(recipe.expert_load)} entries)", padded and bool(recipe.expert_load),
            "with pad_expert_input every expert gets its capacity", "leave it out",
        ),
        (
            "expert_dispatcher", dispatcher, padded and dispatcher in ("deepep", "allgather"),
            "takes no padded input", "use alltoall or hybridep",
        ),
    )  # fmt: skip
    overlaps = bool(recipe.overlap_expert_exchange) and layout.expert_parallel > 1
    refused += (
        (
            "overlap_shared_experts", True, bool(recipe.overlap_shared_experts) and dispatcher != "alltoall",
            "runs beside the exchanges of the alltoall dispatcher only", 'set expert_dispatcher = "alltoall"',
        ),
        (
            "overlap_shared_experts", True, overlaps and bool(recipe.overlap_shared_experts),
            "does not go with overlap_expert_exchange", "switch one off",
        ),
        (
            "overlap_expert_exchange", True, overlaps and dispatcher == "allgather",
            "overlaps exchanges of alltoall, deepep and hybridep only", "change expert_dispatcher",
        ),
        ("overlap_expert_exchange", True, overlaps and recomputes_layers(recipe.recompute),
         "does not go with full recomputation", "use selective"),
        (
            "overlap_expert_exchange", True,
            overlaps and recipe.schedule not in ("auto", "no-pipelining", "interleaved", "dualpipe"),
            f"does not go with the schedule {recipe.schedule}", "leave the schedule out",
        ),
        ("overlap_expert_exchange", True, overlaps and recipe.precision == "fp32", "needs bf16 or fp16", "use bf16"),
        (
            "overlap_expert_exchange", True, overlaps and layout.pipeline_parallel > layout.virtual_pipeline == 1,
            "with pipeline stages it needs the interleaved schedule", "add vpp, or switch it off",
        ),
    )  # fmt: skip
    for field, value, wrong, rule, fix in refused:
        if wrong:
            raise SpecError(f"recipe.{field}", value, rule, fix)
