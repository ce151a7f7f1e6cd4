"""A Megatron trace has exactly the communication that its configuration implies, in closed form, for random layouts."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from echo_explore.graph import Axis, Collective, ExecutionGraph
from echo_explore.specs.model import MoeSpec
from echo_explore.tracing import TraceService
from tests.examples import examples
from tests.tracing.models import LLAMA, request
from tests.tracing.test_folding import rank_request

pytestmark = pytest.mark.torch
BATCH, SEQUENCE = 1, 256
H, F, KV = LLAMA.hidden_size, 2816, 4 * 64
EXPERTS, TOP, WIDTH, SHARED = 8, 2, 512, 256
MIXTURE = MoeSpec(num_experts=EXPERTS, experts_per_token=TOP, ffn_hidden_size=WIDTH, shared_ffn_hidden_size=SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A layout and the rank that is played; `stage`, `replica`, `slice` and `shard` are its coordinates.

    `context` splits sequences over a ring; `sharded` is the distributed optimizer; `expert` above 0 makes every layer a
    mixture whose experts lie on so many ranks.
    """

    tensor: int
    sequence_parallel: bool
    pipeline: int
    virtual: int
    data: int
    num_micro_batches: int
    layers_a_chunk: int
    stage: int
    replica: int
    shard: int
    overlap: bool
    context: int = 1
    slice: int = 0
    sharded: bool = True
    expert: int = 0

    @property
    def rank(self) -> int:
        """Global rank: tensor, context, data, pipeline from the inside out."""
        return ((self.stage * self.data + self.replica) * self.context + self.slice) * self.tensor + self.shard

    @property
    def replicas(self) -> int:
        """Ranks that reduce gradients of dense parameters together."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that reduce gradients of experts together."""
        return self.tensor * self.data // max(self.expert, 1)

    @property
    def positions(self) -> list[int]:
        """Chunks of this rank among all chunks of the model."""
        return [chunk * self.pipeline + self.stage for chunk in range(self.virtual)]


@st.composite
def jobs(draw: st.DrawFn, *, mixtures: bool = False) -> Job:
    tensor = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.sampled_from([1, 2, 3, 4]))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    data = draw(st.sampled_from([2, 4] if mixtures else [1, 2, 3]))
    rounds = draw(st.integers(1, 2))
    context = 1 if mixtures else draw(st.sampled_from([1, 2]))
    # Experts lie on ranks that are neighbours in tensor and data parallelism.
    expert = draw(st.sampled_from([n for n in (2, 4, 8) if tensor * data % n == 0])) if mixtures else 0
    sequence_parallel = tensor > 1 and (mixtures or draw(st.booleans()))  # Megatron wants it beside experts
    return Job(
        tensor=tensor, sequence_parallel=sequence_parallel, pipeline=pipeline, virtual=virtual, data=data,
        num_micro_batches=rounds * pipeline if virtual > 1 else draw(st.integers(1, 5)),
        layers_a_chunk=draw(st.integers(1, 2)), stage=draw(st.integers(0, pipeline - 1)),
        replica=draw(st.integers(0, data - 1)), shard=draw(st.integers(0, tensor - 1)), overlap=draw(st.booleans()),
        context=context, slice=draw(st.integers(0, context - 1)), sharded=draw(st.booleans()), expert=expert,
    )  # fmt: skip


def expected(job: Job) -> Counter[tuple[str, str, int]]:
    """Everything but all-reduces of activations and numbers: (axis, kind, bytes) with how often."""
    found: Counter[tuple[str, str, int]] = Counter()
    tokens = SEQUENCE // job.context * BATCH
    activation = tokens * H * 2
    last = job.pipeline * job.virtual - 1
    m = job.num_micro_batches
    for position in job.positions:
        passed = activation // (job.tensor if job.sequence_parallel else 1)
        num_neighbours = (position > 0) + (position < last)
        found["PIPELINE", "SEND", passed] += m * num_neighbours  # activations forwards, their gradients back
        found["PIPELINE", "RECV", passed] += m * num_neighbours
        if job.sequence_parallel:
            # A layer gathers before QKV and the first MLP product and scatters after the second ones. Backward: the
            # other way round, and the inputs once more for the weight gradients.
            gathers, scatters = 6 * job.layers_a_chunk, 4 * job.layers_a_chunk
            gathers += (position == 0) + 2 * (position == last)
            scatters += (position == 0) + (position == last)
            found["TENSOR", "ALL_GATHER", activation] += m * gathers
            found["TENSOR", "REDUCE_SCATTER", activation] += m * scatters
        if job.context > 1:
            # A ring of two: keys and values once forward; backward they and their gradients once each.
            pairs = 2 * tokens * KV // job.tensor * 2
            found["CONTEXT", "SEND", pairs] += m * 3 * job.layers_a_chunk
            found["CONTEXT", "RECV", pairs] += m * 3 * job.layers_a_chunk
        if job.expert > 1:
            # Counts of tokens once; tokens there and back with their weights there, in both directions.
            routed = tokens // job.tensor * TOP
            found["EXPERT", "ALL_GATHER", job.expert * EXPERTS * 8] += m * job.layers_a_chunk  # int64
            found["EXPERT", "ALL_TO_ALL", routed * H * 2] += m * 4 * job.layers_a_chunk
            found["EXPERT", "ALL_TO_ALL", routed * 2] += m * 2 * job.layers_a_chunk
        # megatron-core 0.16.1, distrib_optimizer.py, step_with_ready_grads: without overlap the optimizer of dense
        # parameters and that of experts each gather all buckets of the model.
        gathers = 2 if job.expert and not job.overlap else 1
        dense = bucket_elements(sizes_of(job, position, last), job.replicas, sharded=job.sharded)
        experts = bucket_elements(expert_sizes(job), job.expert_replicas, sharded=job.sharded)
        for axis, elements, replicas in (("DATA", dense, job.replicas), ("EXPERT_DATA", experts, job.expert_replicas)):
            if replicas > 1 and job.sharded:
                found[axis, "REDUCE_SCATTER", 4 * elements] += 1  # fp32 gradients
                found[axis, "ALL_GATHER", 2 * elements] += gathers  # bf16 parameters
            elif replicas > 1:
                found[axis, "ALL_REDUCE", 4 * elements] += 1
    return Counter({key: count for key, count in found.items() if count and key[2]})


def sizes_of(job: Job, position: int, last: int) -> list[int]:
    """Elements of the dense parameters of a chunk."""
    t, vocabulary = job.tensor, LLAMA.padded_vocab_size(job.tensor)
    layer = [H, (H + 2 * KV) * H // t, H * H // t, H]
    layer += [EXPERTS * H, 2 * SHARED * H // t, SHARED * H // t] if job.expert else [2 * F * H // t, F * H // t]
    sizes = job.layers_a_chunk * layer
    sizes += [vocabulary * H // t] if position == 0 else []
    return sizes + ([H, vocabulary * H // t] if position == last else [])


def expert_sizes(job: Job) -> list[int]:
    """Elements of the routed experts that lie on this rank."""
    if not job.expert:
        return []
    of_all = EXPERTS // job.expert * WIDTH * H
    return job.layers_a_chunk * [2 * of_all, of_all]


def bucket_elements(sizes: list[int], replicas: int, *, sharded: bool) -> int:
    """Of all together; sharded each starts at a multiple of 64, and all are padded for shards of 128 elements."""
    assert all(size % 64 == 0 for size in sizes)
    unit = math.lcm(replicas, 128) if sharded else 1
    return math.ceil(sum(sizes) / unit) * unit


def communication(graph: ExecutionGraph) -> Counter[tuple[str, str, int]]:
    replicas = np.isin(graph.axis, (Axis.DATA, Axis.EXPERT_DATA))
    counted = graph.is_collective & ((graph.collective != Collective.ALL_REDUCE) | replicas)
    return Counter(
        (Axis(graph.axis[i]).name, Collective(graph.collective[i]).name, int(graph.message_bytes[i]))
        for i in np.flatnonzero(counted)
    )


def check(service: TraceService, job: Job) -> None:
    num_chunks = job.pipeline * job.virtual
    trace: dict[str, Any] = {
        "tensor_parallel": job.tensor, "sequence_parallel": job.sequence_parallel, "micro_batch_size": BATCH,
        "sequence_length": SEQUENCE, "context_parallel": job.context, "expert_parallel": max(job.expert, 1),
    }  # fmt: skip
    changes: dict[str, Any] = {"num_layers": num_chunks * job.layers_a_chunk}
    if job.expert:
        changes["moe"] = MIXTURE
    whole = rank_request(
        request(LLAMA.model_copy(update=changes), **trace), rank=job.rank, pipeline_parallel=job.pipeline,
        virtual_pipeline=job.virtual, data_parallel=job.data, num_micro_batches=job.num_micro_batches,
        chunk_layers=(job.layers_a_chunk,) * num_chunks, bucket_elements=10**9, overlap_grad_reduce=job.overlap,
        overlap_param_gather=job.overlap and job.sharded, distributed_optimizer=job.sharded,
    )  # fmt: skip
    graph = service.trace_rank_request(whole)
    assert communication(graph) == expected(job)
    waits = Counter(graph.awaits[graph.kind == 2].tolist())
    started = np.flatnonzero(graph.asynchronous & graph.is_collective)
    assert set(waits) <= set(started.tolist())
    assert max(waits.values(), default=1) == 1  # a handle is waited for once


@given(job=jobs())
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_communication_of_random_layouts(service: TraceService, job: Job) -> None:
    check(service, job)


@given(job=jobs(mixtures=True))
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_communication_of_random_layouts_of_mixtures(service: TraceService, job: Job) -> None:
    check(service, job)
