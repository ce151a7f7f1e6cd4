"""A pipeline of torch.distributed.pipelining for `echo-explore trace --script`: any of its schedules, any rank.

    echo-explore trace --script examples/pipeline_step.py:one_f_one_b --world 8 --rank 5 --out step.npz

Stages are told what they receive and send (`input_args`, `output_args`), with requires_grad: asking a neighbour for
shapes, as they do otherwise, needs all ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

STAGES, MICRO_BATCHES, ROWS, HIDDEN = 4, 8, 1024, 512
Step = tuple[Callable[[], None], nn.Module]


def block() -> nn.Module:
    """What one stage holds; put your own layers here."""
    layers = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
    return layers.to("cuda", torch.bfloat16)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Any loss of the last stage's result."""
    return (out.float() - target.float()).square().mean()


def pipeline(schedule: type, places: Callable[[int], list[int]]) -> Step:
    """A step under a schedule.

    Args:
        schedule: class of torch.distributed.pipelining.schedules.
        places: from the rank in the pipeline to the stages that it holds.
    """
    mesh = init_device_mesh("cuda", (dist.get_world_size() // STAGES, STAGES), mesh_dim_names=("dp", "pp"))
    group = mesh["pp"].get_group()
    held = places(dist.get_rank(group))
    count = STAGES * len(held)
    example = torch.zeros(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    blocks = nn.ModuleList(block() for _ in held)
    stages = [
        pipelining.PipelineStage(
            module, number, count, torch.device("cuda"), input_args=(example,), output_args=(example,), group=group
        )
        for number, module in zip(held, blocks, strict=True)
    ]
    make: Any = schedule
    runs: Any = make(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(blocks.parameters(), fused=True)
    batch = torch.zeros(MICRO_BATCHES * ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    inputs = (batch,) if 0 in held else ()
    target = {"target": batch} if count - 1 in held else {}

    def step() -> None:
        runs.step(*inputs, **target)
        optimizer.step()
        optimizer.zero_grad()

    return step, blocks


def one(rank: int) -> list[int]:
    """A stage a rank."""
    return [rank]


def loop(rank: int) -> list[int]:
    """Two stages a rank, in the same direction."""
    return [rank, rank + STAGES]


def vee(rank: int) -> list[int]:
    """Two stages a rank, there and back."""
    return [rank, 2 * STAGES - 1 - rank]


def gpipe() -> Step:
    """All forwards, then all backwards."""
    return pipeline(pipelining.ScheduleGPipe, one)


def one_f_one_b() -> Step:
    """1F1B."""
    return pipeline(pipelining.Schedule1F1B, one)


def interleaved() -> Step:
    """Interleaved 1F1B."""
    return pipeline(pipelining.ScheduleInterleaved1F1B, loop)


def zero_bubble() -> Step:
    """ZBV: backwards in two passes."""
    return pipeline(pipelining.ScheduleZBVZeroBubble, vee)


def dual_pipe() -> Step:
    """DualPipeV: forwards and backwards together."""
    return pipeline(pipelining.ScheduleDualPipeV, vee)
