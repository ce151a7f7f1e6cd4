"""What megatron-core says of layouts and buckets, against our own rules."""

import pytest

from echo_explore.simulate.buckets import bucket_layout
from echo_explore.tracing import TraceService
from tests.tracing.models import request

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("layout", "batch", "num_gpus", "answer"),
    [
        ({"tp": 2, "pp": 4}, 16, 16, "ok"),
        ({"tp": 2, "pp": 4, "vpp": 2}, 8, None, "ok"),
        ({"pp": 8, "dp": 3}, 12, None, "ok"),
        ({"tp": 3}, 8, None, "multiple of tensor_model_parallel_size"),
        ({"pp": 3}, 8, None, "divisible by pipeline_model_parallel_size"),
        ({"pp": 4, "vpp": 2}, 6, None, "remainder of M"),
        ({"dp": 3}, 8, None, "not divisible by micro batch size"),
        ({"tp": 4}, 8, 6, "world_size .* is not divisible"),
    ],
)
def test_layouts(service: TraceService, layout: dict[str, int], batch: int, num_gpus: int | None, answer: str) -> None:
    said = service.check_layout(request(micro_batch_size=1), layout, global_batch_size=batch, num_gpus=num_gpus)
    assert said == "ok" if answer == "ok" else pytest.importorskip("re").search(answer, said), said


def test_sequence_that_tensor_parallelism_does_not_divide(service: TraceService) -> None:
    traced = request(sequence_parallel=True, tensor_parallel=8, sequence_length=500, micro_batch_size=1)
    said = service.check_layout(traced, {"tp": 8}, global_batch_size=8)
    assert "divisible by tensor parallel size" in said


SIZES = (1000, 200, 3000, 50, 70_000, 64, 1)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("data", [1, 3, 8])
@pytest.mark.parametrize("elements", [1, 3000, 10**9])
def test_buckets(service: TraceService, distributed: bool, data: int, elements: int) -> None:
    real = service.bucket_layout(
        SIZES,
        data,
        distributed_optimizer=distributed,
        overlap_grad_reduce=True,
        bucket_elements=elements,
        own_bucket=[0],
    )
    ours = bucket_layout(
        SIZES, group_size=data, distributed_optimizer=distributed, bucket_elements=elements, own_bucket=frozenset({0})
    )
    assert [(b["num_elements"], min(b["parameters"]), max(b["parameters"])) for b in real] == [
        (b.num_elements, b.first, b.last) for b in ours
    ]


def test_later_stages_have_one_bucket(service: TraceService) -> None:
    buckets = service.bucket_layout(
        SIZES, 2, distributed_optimizer=False, overlap_grad_reduce=True, bucket_elements=10, pipeline_rank=1
    )
    assert [b["num_elements"] for b in buckets] == [sum(SIZES)]
