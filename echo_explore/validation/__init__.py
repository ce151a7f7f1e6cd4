"""Measured runs: from rows of a table to candidates, predictions beside measurements, and how wrong they are."""

from echo_explore.validation.collectives import CollectiveScores, validate_collectives
from echo_explore.validation.kernels import KernelScores, validate_kernels
from echo_explore.validation.mapping import Declined, map_row, unsupported
from echo_explore.validation.rows import MeasuredRow, read_rows
from echo_explore.validation.score import Outcome, Scores, score
from echo_explore.validation.steps import validate_steps

__all__ = [
    "CollectiveScores",
    "Declined",
    "KernelScores",
    "MeasuredRow",
    "Outcome",
    "Scores",
    "map_row",
    "read_rows",
    "score",
    "unsupported",
    "validate_collectives",
    "validate_kernels",
    "validate_steps",
]
