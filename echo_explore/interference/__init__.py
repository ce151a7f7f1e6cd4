"""Mutual slowdown of kernels and collectives that run at the same time."""

from echo_explore.interference.models import INTERFERENCE_MODELS, ConstantInterference, NoInterference
from echo_explore.interference.pair_table import PairTable
from echo_explore.interference.pairing import CodePairing, Pairing
from echo_explore.interference.physical import LearnedInterference, PhysicalInterference

__all__ = [
    "INTERFERENCE_MODELS",
    "CodePairing",
    "ConstantInterference",
    "LearnedInterference",
    "NoInterference",
    "PairTable",
    "Pairing",
    "PhysicalInterference",
]
