"""Placement of ranks on devices, nodes and links; networks, their builders and their routes.

`topology.routing` (numba) and `topology.graphs` (networkx) are imported by their own names, so that placement stays
light.
"""

from echo_explore.topology.bigraph import Seats, block_seats, device_numbers, mapped_seats
from echo_explore.topology.cluster_network import cards_of, cluster_network
from echo_explore.topology.network import LinkKind, Network, NetworkBuilder, VertexKind
from echo_explore.topology.placement import GroupShape, domain_size, group_shape, mirrored_shape, pipeline_boundary
from echo_explore.topology.rank_group import shape_of_ranks
from echo_explore.topology.rank_order import axis_groups
from echo_explore.topology.sites import SiteLink, join_sites

__all__ = [
    "GroupShape",
    "LinkKind",
    "Network",
    "NetworkBuilder",
    "Seats",
    "SiteLink",
    "VertexKind",
    "axis_groups",
    "block_seats",
    "cards_of",
    "cluster_network",
    "device_numbers",
    "domain_size",
    "group_shape",
    "join_sites",
    "mapped_seats",
    "mirrored_shape",
    "pipeline_boundary",
    "shape_of_ranks",
]
