"""Placement of ranks on devices, nodes and links."""

from echo_explore.topology.placement import GroupShape, domain_size, group_shape, pipeline_boundary

__all__ = ["GroupShape", "domain_size", "group_shape", "pipeline_boundary"]
