"""Peak memory: parameters, gradients, optimizer states and activations in flight, by stage and part."""

from echo_explore.memory.advice import Change, cheapest_changes
from echo_explore.memory.bound import memory_lower_bound
from echo_explore.memory.profile import MemoryProfile, StageMemory, memory_profile

__all__ = ["Change", "MemoryProfile", "StageMemory", "cheapest_changes", "memory_lower_bound", "memory_profile"]
