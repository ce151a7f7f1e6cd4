"""Prices of collectives and transfers."""

from echo_explore.comm.bandwidth import algorithm_bandwidth, bus_bandwidth, bus_factor
from echo_explore.comm.choice import ALGORITHMS, ForcedChoice
from echo_explore.comm.coefficient_file import load_coefficients
from echo_explore.comm.coefficients import CommCoefficients
from echo_explore.comm.libraries import LIBRARIES
from echo_explore.comm.model import HierarchicalModel
from echo_explore.comm.request import CollectiveRequest, CollectiveTime
from echo_explore.comm.schedule import CollectivePlan

__all__ = [
    "ALGORITHMS",
    "LIBRARIES",
    "CollectivePlan",
    "CollectiveRequest",
    "CollectiveTime",
    "CommCoefficients",
    "ForcedChoice",
    "HierarchicalModel",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "bus_factor",
    "load_coefficients",
]
