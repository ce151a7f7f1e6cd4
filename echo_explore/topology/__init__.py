"""Placement of ranks on devices, nodes and links."""

from echo_explore.topology.placement import GroupShape

__all__ = ["GroupShape"]
