"""Prices of collectives and transfers."""

from echo_explore.comm.bandwidth import algorithm_bandwidth, bus_bandwidth, bus_factor
from echo_explore.comm.coefficients import CommCoefficients, load_coefficients
from echo_explore.comm.model import HierarchicalModel
from echo_explore.comm.request import CollectiveRequest, CollectiveTime

__all__ = [
    "CollectiveRequest",
    "CollectiveTime",
    "CommCoefficients",
    "HierarchicalModel",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "bus_factor",
    "load_coefficients",
]
