"""A script for `echo-explore trace --script`: DTensor's tensor parallelism over 8 ranks of a mesh.

    echo-explore trace --script examples/tensor_parallel_step.py:build --world 64 --rank 9 --out step.npz

Mesh dimensions called tp, dp, cp, ep or pp tell the tracer which axis a collective runs on.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TENSOR_PARALLEL = 8


def build() -> tuple[Callable[[], None], nn.Module]:
    """The step, and the model."""
    shape = (dist.get_world_size() // TENSOR_PARALLEL, TENSOR_PARALLEL)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(512, 1024, device="cuda")

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model
