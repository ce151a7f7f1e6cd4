"""What users write: models, clusters, layouts, recipes, stacks, search spaces; and candidates made of them."""

from echo_explore.specs.candidate import Candidate, make_candidate
from echo_explore.specs.cluster import ClusterSpec, DeviceSpec, FabricSpec, NodeSpec
from echo_explore.specs.job_options import JobOptions, candidate_of, job_options
from echo_explore.specs.layout import ParallelConfig, fill_data_parallel, parse_layout
from echo_explore.specs.legality import check_legal
from echo_explore.specs.load import load_cluster, load_model, load_space, load_stack, locate
from echo_explore.specs.model import MlaSpec, ModelSpec, MoeSpec
from echo_explore.specs.native_legality import check_native
from echo_explore.specs.placement import Placement, parse_placement, placement_from_pairs
from echo_explore.specs.recipe import MemorySpec, StackProfile, TrainingRecipe
from echo_explore.specs.space import SearchSpace
from echo_explore.specs.split import layers_of_chunks

__all__ = [
    "Candidate",
    "ClusterSpec",
    "DeviceSpec",
    "FabricSpec",
    "JobOptions",
    "MemorySpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "NodeSpec",
    "ParallelConfig",
    "Placement",
    "SearchSpace",
    "StackProfile",
    "TrainingRecipe",
    "candidate_of",
    "check_legal",
    "check_native",
    "fill_data_parallel",
    "job_options",
    "layers_of_chunks",
    "load_cluster",
    "load_model",
    "load_space",
    "load_stack",
    "locate",
    "make_candidate",
    "parse_layout",
    "parse_placement",
    "placement_from_pairs",
]
