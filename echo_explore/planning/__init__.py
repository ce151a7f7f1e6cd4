"""Capacity studies: how cluster size trades time to train against GPU hours and cost."""

from echo_explore.planning.capacity import CapacityOptions, CapacityPlan, CapacityRow, capacity_study, default_space

__all__ = ["CapacityOptions", "CapacityPlan", "CapacityRow", "capacity_study", "default_space"]
