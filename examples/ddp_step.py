"""The shortest script for `echo-explore trace --script`: any module under DistributedDataParallel.

    echo-explore trace --script examples/ddp_step.py:build --world 16 --rank 3 --out step.npz

It returns the step and, so that rows carry module paths, the model.
"""

from collections.abc import Callable

import torch
from torch import nn


def build() -> tuple[Callable[[], None], nn.Module]:
    """The step, and the model."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    inputs = torch.randn(32, 1024, device="cuda")

    def step() -> None:
        parallel(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model
