"""Peaks of the tracer beside those of torch's MemTracker, as JSON: `python -m tests.tracing.tracked_memory CASE...`.

Both watch the same step on the same fake GPU; MemTracker rounds every storage up to 512 bytes, as the allocator does.
"""

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

from echo_explore.tracing import runtime

runtime.prepare()  # before anything else imports torch

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from echo_explore.graph import OpKind  # noqa: E402
from echo_explore.tracing import fake_cluster, megatron_rank, script_trace, transformers_model  # noqa: E402
from echo_explore.tracing.transformers_request import TransformersJob  # noqa: E402
from tests.tracing.models import GPT, LLAMA, request  # noqa: E402
from tests.tracing.test_folding import rank_request  # noqa: E402

Step = Callable[[], None]
HUGGING_FACE = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1408, "vocab_size": 8192,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
SCRIPTS = ("plain", "bf16", "recompute", "fsdp2", "fsdp2 recompute", "ddp", "transformers")
RANKS: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "fusion": "eager"},
    "gpt fused": {"model": GPT},
    "llama tp2": {"model": LLAMA, "fusion": "eager", "tensor_parallel": 2, "sequence_parallel": True},
    "llama full": {"model": LLAMA, "fusion": "eager", "recompute": "full"},
    "llama core_attn": {"model": LLAMA, "fusion": "eager", "recompute": "selective"},
    "llama layernorm": {"model": LLAMA, "fusion": "eager", "recompute": "selective:layernorm"},
}


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Three layers between an embedding and a head."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8192, 512), nn.Linear(512, 8192, bias=False)
        self.blocks = nn.ModuleList(Block(512) for _ in range(3))
        self.again = again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def training(name: str) -> tuple[Step, list[Any]]:
    """A training step of the decoder, and what lives on the GPU before it."""
    from torch.distributed.fsdp import fully_shard

    if name == "transformers":
        model_step, built = transformers_model.build_step(
            TransformersJob(
                config=HUGGING_FACE, parallelism="fsdp2", tensor_parallel=1, world_size=8, num_micro_batches=1,
                micro_batch_size=1, sequence_length=512, recompute="none", precision="bf16",
            )
        )  # fmt: skip
        return model_step, [built]
    with torch.device("cuda"):
        model = Decoder(again="recompute" in name)
        tokens = torch.zeros(4, 512, dtype=torch.int64)
    if name == "bf16":
        model = model.bfloat16()
    wrapped: Any = model
    if "fsdp2" in name:
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
    elif name == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        logits = wrapped(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        del logits, loss
        optimizer.step()
        optimizer.zero_grad()

    return step, [model, optimizer, tokens]


def peak_of(tracker: MemTracker) -> int:
    """Bytes on the GPU at the peak."""
    snapshots = tracker.get_tracker_snapshot("peak").items()
    return next(int(parts["Total"]) for device, parts in snapshots if device.type == "cuda")


def of_script(name: str) -> dict[str, float]:
    """Peaks of the second step."""
    peaks: list[int] = []
    runs = 0

    def build() -> Step:
        step, alive = training(name)

        def twice() -> None:
            nonlocal runs
            runs += 1
            if runs == 1:
                step()
                return
            tracker = MemTracker()
            tracker.track_external(*(on_gpu() if name == "transformers" else alive))
            with tracker:
                step()
            peaks.append(peak_of(tracker))

        return twice

    fake_cluster.start(3, 8)
    trace = script_trace.trace_step(build, where=name, world_size=8, rank=3)
    return {"ours": trace.peak_memory_bytes, "theirs": peaks[0]}


def on_gpu() -> list[FakeTensor]:
    """Every fake tensor on the GPU."""
    return [o for o in gc.get_objects() if isinstance(o, FakeTensor) and o.device.type == "cuda"]


class EachOp(MemTracker):  # type: ignore[no-untyped-call]
    """Also says what was alive after each op, by the row that was the last then; knows nothing of modules."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows
        self.after: dict[int, int] = {}
        for hook in ("_pre_fw_hook", "_post_fw_hook", "_pre_bw_hook", "_post_bw_hook"):
            setattr(self, hook, lambda *_: None)  # Megatron's wrapper has a list called `buffers`

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        total = sum(int(parts["Total"]) for device, parts in self._curr_mem_snap.items() if device.type == "cuda")
        if self.rows and self.rows[-1].kind in (OpKind.COMPUTE, OpKind.COLLECTIVE):  # others are no operators
            self.after.setdefault(len(self.rows) - 1, total)


def of_rank(changes: dict[str, Any]) -> dict[str, float]:
    """Peaks of the second iteration, and the largest difference at any op."""
    whole = rank_request(
        request(**changes), rank=0, pipeline_parallel=1, chunk_layers=(4,), num_micro_batches=1, data_parallel=2
    )
    others = on_gpu()  # of the trace before; kept, so that nothing new lies at their places
    before = {tensor.untyped_storage()._cdata for tensor in others}
    with megatron_rank.prepared_rank(whole) as rank:
        tracker = EachOp(rank.recorder.rows)
        tracker.track_external(*(t for t in on_gpu() if t.untyped_storage()._cdata not in before))
        with tracker:
            live = rank.run().graph.live_bytes
        first = len(rank.recorder.rows) - len(live)
        ours = rank.recorder.storages.peak_since(first)
    after = {row - first: total for row, total in tracker.after.items() if row >= first}
    differences = [total - live[row] for row, total in after.items()]
    return {
        "ours": ours, "theirs": peak_of(tracker), "ops": len(differences),
        "spread": float(max(differences) - min(differences)),
    }  # fmt: skip


def main() -> None:
    """Print one object."""
    print(json.dumps({name: of_script(name) if name in SCRIPTS else of_rank(RANKS[name]) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
