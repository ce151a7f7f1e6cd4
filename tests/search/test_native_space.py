"""Search spaces whose stack is on FSDP2."""

from typing import Any

from echo_explore.search.space import enumerate_points, resolve_space
from echo_explore.specs import SearchSpace
from echo_explore.specs.base import validate


def test_only_what_fsdp2_takes_is_proposed() -> None:
    space: dict[str, Any] = {
        "schema": 1,
        "model": "llama3-8b",
        "cluster": "h100-ndr",
        "cluster_size": {"num_gpus": [64]},
        "recipe": {"sequence_length": 8192, "global_batch_size": 128, "stack": "torchtitan-fsdp2"},
        "search": {
            "tensor_parallel": [1, 2],
            "pipeline_parallel": [1, 2],
            "micro_batch_size": [1],
            "recompute": ["none", "selective"],
            "sequence_parallel": [True, False],
        },
        "objective": {"minimize": ["step_time_s"]},
    }
    resolved = resolve_space(validate(SearchSpace, space))
    points = enumerate_points(resolved)
    assert {(p.tensor_parallel, p.pipeline_parallel, p.sequence_parallel) for p in points} == {
        (1, 1, False),
        (2, 1, True),
    }
    for point in points:
        assert resolved.candidate(point).num_shards == 64 // point.tensor_parallel
