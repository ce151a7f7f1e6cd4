"""Peak memory: parameters, gradients, optimizer states and activations in flight, by stage and part."""

from echo_explore.memory.advice import Change, cheapest_changes
from echo_explore.memory.bound import memory_lower_bound
from echo_explore.memory.details import StageDetails, stage_details
from echo_explore.memory.profile import (
    SHARED_WEIGHT,
    MemoryProfile,
    StageMemory,
    memory_profile,
    prediction_embedding,
    saved_bytes,
    stage_chunks,
)

__all__ = [
    "SHARED_WEIGHT",
    "Change",
    "MemoryProfile",
    "StageDetails",
    "StageMemory",
    "cheapest_changes",
    "memory_lower_bound",
    "memory_profile",
    "prediction_embedding",
    "saved_bytes",
    "stage_chunks",
    "stage_details",
]
