"""A Megatron trace has exactly the communication that its configuration implies, in closed form, for random layouts."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo_explore.graph import Axis, Collective, ExecutionGraph
from echo_explore.tracing import TraceService
from tests.tracing.models import LLAMA, request
from tests.tracing.test_folding import rank_request

pytestmark = pytest.mark.torch
BATCH, SEQUENCE = 1, 256
H, F, KV = LLAMA.hidden_size, 2816, 4 * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A layout and the rank that is played; `stage`, `replica` and `shard` are its coordinates."""

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

    @property
    def rank(self) -> int:
        """Global rank: tensor, data, pipeline from the inside out."""
        return (self.stage * self.data + self.replica) * self.tensor + self.shard

    @property
    def positions(self) -> list[int]:
        """Chunks of this rank among all chunks of the model."""
        return [chunk * self.pipeline + self.stage for chunk in range(self.virtual)]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    tensor = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.sampled_from([1, 2, 3, 4]))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    data = draw(st.sampled_from([1, 2, 3]))
    rounds = draw(st.integers(1, 2))
    return Job(
        tensor=tensor, sequence_parallel=tensor > 1 and draw(st.booleans()), pipeline=pipeline, virtual=virtual,
        data=data, num_micro_batches=rounds * pipeline if virtual > 1 else draw(st.integers(1, 5)),
        layers_a_chunk=draw(st.integers(1, 2)), stage=draw(st.integers(0, pipeline - 1)),
        replica=draw(st.integers(0, data - 1)), shard=draw(st.integers(0, tensor - 1)), overlap=draw(st.booleans()),
    )  # fmt: skip


def expected(job: Job) -> Counter[tuple[str, str, int]]:
    """Sends, receives, all-gathers and reduce-scatters: (axis, kind, bytes) with how often."""
    found: Counter[tuple[str, str, int]] = Counter()
    activation = SEQUENCE * BATCH * H * 2
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
        if job.data > 1:
            elements = bucket_elements(job, position, last)
            found["DATA", "REDUCE_SCATTER", 4 * elements] += 1  # fp32 gradients
            found["DATA", "ALL_GATHER", 2 * elements] += 1  # bf16 parameters
    return +found


def bucket_elements(job: Job, position: int, last: int) -> int:
    """Parameters of a chunk, each at a multiple of 64, padded for shards of 128 (Megatron's distributed optimizer)."""
    t, vocabulary = job.tensor, LLAMA.padded_vocab_size(job.tensor)
    layer = [H, (H + 2 * KV) * H // t, H * H // t, H, 2 * F * H // t, F * H // t]
    sizes = job.layers_a_chunk * layer
    sizes += [vocabulary * H // t] if position == 0 else []
    sizes += [H, vocabulary * H // t] if position == last else []
    assert all(size % 64 == 0 for size in sizes)
    unit = math.lcm(job.data, 128)
    return math.ceil(sum(sizes) / unit) * unit


def communication(graph: ExecutionGraph) -> Counter[tuple[str, str, int]]:
    kinds = (Collective.SEND, Collective.RECV, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    return Counter(
        (Axis(graph.axis[i]).name, Collective(graph.collective[i]).name, int(graph.message_bytes[i]))
        for i in np.flatnonzero(np.isin(graph.collective, kinds))
    )


@given(job=jobs())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_communication_of_random_layouts(service: TraceService, job: Job) -> None:
    num_chunks = job.pipeline * job.virtual
    trace: dict[str, Any] = {
        "tensor_parallel": job.tensor, "sequence_parallel": job.sequence_parallel, "micro_batch_size": BATCH,
        "sequence_length": SEQUENCE,
    }  # fmt: skip
    model = LLAMA.model_copy(update={"num_layers": num_chunks * job.layers_a_chunk})
    whole = rank_request(
        request(model, **trace), rank=job.rank, pipeline_parallel=job.pipeline, virtual_pipeline=job.virtual,
        data_parallel=job.data, num_micro_batches=job.num_micro_batches,
        chunk_layers=(job.layers_a_chunk,) * num_chunks, bucket_elements=10**9, overlap_grad_reduce=job.overlap,
        overlap_param_gather=job.overlap,
    )  # fmt: skip
    graph = service.trace_rank_request(whole)
    assert communication(graph) == expected(job)
    waits = Counter(graph.awaits[graph.kind == 2].tolist())
    started = np.flatnonzero(graph.asynchronous & graph.is_collective)
    assert set(waits) <= set(started.tolist())
    assert max(waits.values(), default=1) == 1  # a handle is waited for once
