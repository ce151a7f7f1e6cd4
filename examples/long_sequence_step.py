"""Long sequences for `echo-explore trace --script`: context parallelism, sequence parallelism, recomputed activations.

echo-explore trace --script examples/long_sequence_step.py:context --world 16 --rank 9 --out step.npz
echo-explore trace --script examples/long_sequence_step.py:sequence --world 16 --rank 9 --out step.npz
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, HIDDEN, HEADS, SPLIT = 2, 2048, 512, 8, 4
Step = tuple[Callable[[], None], nn.Module]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] to the same."""
        shape = (*tensor.shape[:2], HEADS, HIDDEN // HEADS)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in self.qkv(tensor).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


def context() -> Step:
    """A rank holds a part of every sequence; attention runs again in the backward."""
    mesh = init_device_mesh("cuda", (dist.get_world_size() // SPLIT, SPLIT), mesh_dim_names=("dp", "cp"))
    model = Attention().to("cuda", torch.bfloat16)
    inputs = torch.randn(BATCH, LENGTH, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        batch = inputs.clone()
        with context_parallel(mesh["cp"], buffers=[batch], buffer_seq_dims=[1]):
            out = checkpoint(model, batch, use_reentrant=False)
            out.float().square().mean().backward()

    return step, model


def sequence() -> Step:
    """Tensor parallelism whose norms work on a part of the sequence."""
    mesh = init_device_mesh("cuda", (dist.get_world_size() // SPLIT, SPLIT), mesh_dim_names=("dp", "tp"))
    layers = nn.Sequential(
        nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
    )
    model = layers.to("cuda", torch.bfloat16)
    plan = {
        "0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    parallelize_module(model, mesh["tp"], plan)
    inputs = torch.randn(BATCH, LENGTH // SPLIT, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(inputs).float().square().mean().backward()

    return step, model
