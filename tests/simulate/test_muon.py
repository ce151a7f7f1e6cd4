"""Muon's updates: FLOP and bytes against a count of what runs, exchanges, prices, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from echo_explore.core import EchoError
from echo_explore.graph import Axis, Collective, Parameter
from echo_explore.simulate import WhatIf
from echo_explore.simulate.epilogue import epilogue_graph
from echo_explore.simulate.job_builder import JobBuilder
from echo_explore.simulate.muon import STEPS, MuonUpdate, muon_updates
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate
from echo_explore.timeline import StageJob
from echo_explore.tracing.request import request_of
from tests.simulate.support import candidate, simulator
from tests.simulate.test_epilogue import FACTS

MUON = "recipe.optimizer=muon"


def _matrix(rows: int, columns: int, name: str = "linear_fc1.weight", **values: object) -> Parameter:
    count = int(str(values.get("num_matrices", 1)))
    defaults = {"name": name, "num_elements": rows * columns * count, "tensor_sharded": True, "partition_dim": 0}
    return Parameter(**(defaults | {"shape": (rows, columns)} | values))  # type: ignore[arg-type]


def _job(layout: str = "tp=8,pp=4", *overrides: str, **options: object) -> Candidate:
    return candidate(layout=layout, overrides=(MUON, *overrides), **options)


def _one(job: Candidate, parameter: Parameter) -> MuonUpdate:
    (update,) = muon_updates(job, [parameter])
    return update


class _Counted:
    """Arrays that count what each kernel reads, writes and multiplies."""

    def __init__(self) -> None:
        self.flop, self.read, self.written = 0, 0, 0

    def moved(self, *inputs: tuple[int, int], output: tuple[int, int]) -> None:
        """(elements, bytes each) of one kernel."""
        self.read += sum(size * width for size, width in inputs)
        self.written += output[0] * output[1]

    def product(self, a: np.ndarray, b: np.ndarray, *added: np.ndarray) -> np.ndarray:
        distinct = {id(x.base if x.base is not None else x): x for x in (a, b, *added)}
        result: np.ndarray = a @ b + sum(added)
        self.flop += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        self.moved(*((x.size, 2) for x in distinct.values()), output=(result.size, 2))
        return result


def _counted(shape: tuple[int, int]) -> _Counted:
    """A step of Muon on one matrix, written down kernel by kernel."""
    counted = _Counted()
    x = np.random.default_rng(0).standard_normal(shape).T.copy() if shape[0] > shape[1] else np.ones(shape)
    size = x.size
    counted.moved((size, 4), output=(size, 4))  # weight decay
    counted.moved((size, 4), (size, 4), output=(size, 4))  # momentum
    counted.moved((size, 4), output=(1, 4))  # norm
    counted.moved((size, 4), output=(size, 4))
    counted.moved((size, 4), output=(size, 2))
    x = x / np.linalg.norm(x)
    for _ in range(STEPS):
        a = counted.product(x, x.T)
        b = counted.product(a, a, a)
        x = counted.product(b, x, x)
    counted.moved((size, 2), output=(size, 4))
    for _ in range(2):
        counted.moved((size, 4), output=(size, 4))
    counted.moved((size, 4), (size, 4), output=(size, 4))
    return counted


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_flop_and_bytes_of_one_matrix(shape: tuple[int, int]) -> None:
    row = _one(_job(), _matrix(*shape)).row()
    counted = _counted(shape)
    assert row.flop == counted.flop == STEPS * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
    assert (row.bytes_read, row.bytes_written) == (counted.read, counted.written)
    small, size = min(shape), shape[0] * shape[1]
    assert row.bytes_read + row.bytes_written == 72 * size + 4 + STEPS * (6 * size + 8 * small**2)


def test_which_parameters() -> None:
    bias = replace(_matrix(8, 1, "bias"), shape=(8,))
    head = _matrix(64, 8, "output_layer.weight", embedding=True)
    frozen = _matrix(8, 8, trainable=False)
    router = _matrix(4, 8, "mlp.router.weight", partition_dim=-1)
    updates = muon_updates(_job(), [bias, head, frozen, router, _matrix(8, 16), _matrix(8, 16)])
    assert [update.label for update in updates] == ["2 of 8 x 16", "1 of 4 x 8"]
    assert muon_updates(candidate(), [_matrix(8, 16)]) == ()


def test_a_trace_without_shapes_is_refused() -> None:
    unknown = Parameter(name="linear_fc1.weight", num_elements=64, tensor_sharded=True)
    with pytest.raises(EchoError, match=r"linear_fc1.weight: shape \(\) is not known; fix: trace again"):
        muon_updates(_job(), [unknown])


def test_queries_keys_and_values_apart() -> None:
    """gpt-22b: 64 heads of 96, so 8 groups of one query, key and value on each of 8 ranks."""
    qkv = _matrix(3 * 8 * 96, 6144, "self_attention.linear_qkv.weight")
    update = _one(_job(), qkv)
    assert [(b.rows, b.columns) for b in update.blocks] == [(768, 6144)] * 3
    whole = _one(_job("tp=8,pp=4", "recipe.muon_split_qkv=false"), qkv)
    assert [(b.rows, b.columns) for b in whole.blocks] == [(3 * 768, 6144)]
    size = qkv.num_elements
    copies = 16.0 * size  # cut out and put back, 8 bytes an element each
    passes = 72.0 * size + 3 * (4 + STEPS * 8 * 768**2) + STEPS * 6 * size
    assert update.row().bytes_read + update.row().bytes_written == copies + passes
    assert update.row().flop == 3 * STEPS * (4 * 768**2 * 6144 + 2 * 768**3)


def test_each_expert_has_its_matrix() -> None:
    experts = _matrix(64, 128, "mlp.experts.weight1", num_matrices=4, partition_dim=1, expert=True)
    job = candidate(model="mixtral-8x7b", layout="tp=2,ep=2,dp=2,sp=1", cluster="h100-ndr", overrides=(MUON,))
    update = _one(job, experts)
    assert (update.count, update.axis, update.num_elements) == (4, Axis.EXPERT_TENSOR, experts.num_elements)
    assert update.row().flop == 4 * STEPS * (4 * 64**2 * 128 + 2 * 64**3)


def _exchanged(mode: str, parameter: Parameter) -> tuple[MuonUpdate, list[tuple[Axis, Collective, float]]]:
    update = _one(_job("tp=8,pp=4", f"recipe.muon_tp_mode={mode}"), parameter)
    facts = replace(FACTS, num_shard_elements=update.num_elements + 8, muon=(update,))
    graph = epilogue_graph(facts)
    rows = [r for r in range(graph.num_ops) if graph.is_collective[r] and graph.strings[graph.module[r]] == "muon"]
    found = [
        (Axis(int(graph.axis[r])), Collective(int(graph.collective[r])), float(graph.message_bytes[r])) for r in rows
    ]
    return update, found


def test_exchanges_over_tensor_parallel_ranks() -> None:
    """Columns-first split [m/8, n]: blockwise keeps to the part, duplicated gathers, distributed sums n x n."""
    part = _matrix(16, 32)
    update, found = _exchanged("blockwise", part)
    assert ((update.blocks[0].rows, update.blocks[0].columns), found) == ((16, 32), [])
    update, found = _exchanged("duplicated", part)
    assert (update.blocks[0].rows, update.blocks[0].columns) == (32, 128)
    assert found == [(Axis.TENSOR, Collective.ALL_GATHER, 4.0 * 32 * 128)]
    update, found = _exchanged("distributed", part)
    assert (update.blocks[0].rows, update.blocks[0].columns) == (32, 16)
    assert found == [(Axis.TENSOR, Collective.ALL_REDUCE, size) for size in (4.0, *STEPS * [2.0 * 32 * 32])]
    assert _exchanged("distributed", replace(part, partition_dim=-1))[1] == []


def _stage(*overrides: str, what_if: WhatIf | None = None) -> StageJob:
    job, model = candidate(overrides=overrides), simulator()
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=what_if or WhatIf())
    return JobBuilder(job, model.tracer.trace(request_of(job)), pricer, WhatIf()).job.stages[1]


def test_products_are_priced_as_products() -> None:
    """Not as their bytes, and not at the peak of the chip; Adam keeps what is no matrix."""
    epilogue = _stage(MUON).epilogue
    graph = epilogue.graph
    names = [graph.strings[name] for name in graph.name]
    rows = [row for row, name in enumerate(names) if name == "muon"]
    assert len(rows) == 4  # kinds of matrices of a layer
    adam = names.index("adam")
    assert max(rows) < adam
    assert graph.dims[adam, 0] == 12 * 2 * 6144  # both norms of a layer
    for row in rows:
        rate = float(graph.flop[row]) / float(epilogue.time_s[row])
        assert 312e12 * 0.2 < rate < 312e12  # A100: NVIDIA data sheet, 2021


def test_slower_products_make_a_slower_update() -> None:
    plain, slow = _stage(MUON), _stage(MUON, what_if=WhatIf(factors={"gemm": 2.0}))
    assert slow.epilogue.time_s.sum() > 1.5 * plain.epilogue.time_s.sum()


def test_predictions_differ_in_the_optimizer_only() -> None:
    same = ("recipe.distributed_optimizer=false", "recipe.overlap_grad_reduce=false")
    adam = simulator().predict(candidate(overrides=same))
    muon = simulator().predict(candidate(overrides=(*same, MUON)))
    moved = {name for name in adam.breakdown if muon.breakdown[name] != pytest.approx(adam.breakdown[name], rel=1e-6)}
    assert moved == {"optimizer_s"}
    assert muon.breakdown["optimizer_s"] > 3 * adam.breakdown["optimizer_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": (MUON, "recipe.distributed_optimizer=true")}, "distributed_optimizer = True: Megatron refuses"),
        ({"overrides": (MUON, "recipe.overlap_grad_reduce=true")}, "overlap_grad_reduce = True: Megatron refuses"),
        ({"overrides": (MUON, "recipe.overlap_param_gather=true")}, "overlap_param_gather = True: Megatron refuses"),
        ({"overrides": (MUON,), "precision": "fp16"}, "takes no loss scaling"),
        ({"overrides": (MUON, "recipe.lora_rank=8")}, "not modelled with adapters"),
        ({"overrides": ("recipe.muon_tp_mode=duplicated",)}, "does not go with recipe.optimizer = adam"),
        ({"overrides": ("recipe.optimizer=dist_muon",)}, "optimizer"),
        (
            {"overrides": (MUON,), "model": "llama3-8b", "layout": "dp=8", "framework": "fsdp2"},
            "optimizer = 'muon': is not known for fsdp2",
        ),
        (
            {"overrides": (MUON,), "model": "llama3-8b", "layout": "tp=16,dp=1", "cluster": "h100-ndr"},
            "whole groups of 8",
        ),
        (
            {"overrides": (MUON,), "cluster": "h100-ndr", "precision": "fp8", "stack": "megatron-bridge"},
            "stack.narrow_parameters=false",
        ),
    ],
)
def test_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(EchoError, match=message):
        candidate(**options)
