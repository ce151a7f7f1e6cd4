"""Mutual slowdown of kernels and collectives that run at the same time."""

from echo_explore.interference.models import INTERFERENCE_MODELS, ConstantInterference, NoInterference
from echo_explore.interference.pair_table import PairTable

__all__ = ["INTERFERENCE_MODELS", "ConstantInterference", "NoInterference", "PairTable"]
