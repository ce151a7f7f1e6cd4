"""Pipeline schedules as data: an order of passes for every stage, by name or from a file."""

from echo_explore.specs.schedules.build import (
    SCHEDULES,
    build_schedule,
    check_shape,
    num_ahead,
    num_copies,
    posts_receives,
)
from echo_explore.specs.schedules.checks import check_orders
from echo_explore.specs.schedules.file import parse_orders, read_orders
from echo_explore.specs.schedules.megatron import num_warm_up_forwards
from echo_explore.specs.schedules.passes import PassKind, PipelineSchedule, StageOrder
from echo_explore.specs.schedules.placement import chunks_of_stage, default_schedule, is_v_shaped, resolved_schedule

__all__ = [
    "SCHEDULES",
    "PassKind",
    "PipelineSchedule",
    "StageOrder",
    "build_schedule",
    "check_orders",
    "check_shape",
    "chunks_of_stage",
    "default_schedule",
    "is_v_shaped",
    "num_ahead",
    "num_copies",
    "num_warm_up_forwards",
    "parse_orders",
    "posts_receives",
    "read_orders",
    "resolved_schedule",
]
