"""A training step of your own for `echo-explore trace --script`: a small model under FSDP2.

    echo-explore trace --script examples/train_step.py:build --world 1024 --rank 517 --out step.npz

Nothing here knows that it is traced: the same file trains under torchrun. `build` returns the step and, so that rows
carry module paths, the model. Everything lives on device "cuda", which needs no GPU while it is traced.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

HIDDEN, LAYERS, VOCABULARY = 1024, 4, 32000


class Block(nn.Module):
    """A feed-forward block; put your own model here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next hidden states."""
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def build() -> tuple[Callable[[], None], nn.Module]:
    """The step, and the model."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with torch.device("cuda"):
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, HIDDEN), *(Block() for _ in range(LAYERS)), nn.Linear(HIDDEN, VOCABULARY)
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in list(model)[1:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 2048, dtype=torch.int64, device="cuda")

    def step() -> None:
        logits = model(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits.float(), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model
