"""Gathers and scatters of activations beside their products: priced in parts, and shorter where they can hide."""

from dataclasses import replace

import numpy as np
import pytest

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, OpRow, Trace, build_graph
from echo_explore.simulate import WhatIf
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.tensor_overlap import RESERVED_SMS, TensorOverlap
from echo_explore.specs import Candidate
from echo_explore.tracing.request import request_of
from tests.simulate.support import candidate, simulator

TOKENS, WIDTH, OUT, RANKS = 2048, 6144, 3072, 8


def _rows() -> list[OpRow]:
    whole, part = f"{TOKENS}x1x{WIDTH}", f"{TOKENS // RANKS}x1x{WIDTH}"
    common = {
        "kind": OpKind.COLLECTIVE,
        "axis": Axis.TENSOR,
        "dtype": DType.BF16,
        "message_bytes": 2.0 * TOKENS * WIDTH,
    }
    gemm = {"op_class": OpClass.GEMM, "dtype": DType.BF16, "flop": 2.0 * TOKENS * WIDTH * OUT, "bytes_read": 1e7}
    return [
        OpRow(collective=Collective.ALL_GATHER, shapes=f"{part}->{whole}", **common),  # type: ignore[arg-type]
        OpRow(dims=(1, TOKENS, OUT, WIDTH), deps=(0,), **gemm),  # type: ignore[arg-type]
        OpRow(dims=(1, TOKENS, WIDTH, OUT), deps=(1,), **gemm),  # type: ignore[arg-type]
        OpRow(collective=Collective.REDUCE_SCATTER, shapes=f"{whole}->{part}", deps=(2,), **common),  # type: ignore[arg-type]
    ]


def _overlap(**options: object) -> tuple[Candidate, Trace, Pricer, TensorOverlap]:
    job = candidate(**({"layout": "tp=8,pp=4,sp=1"} | options))
    model = simulator()
    trace = model.tracer.trace(request_of(job))
    layer = replace(trace.pieces["layer.dense"], forward=build_graph(_rows()))
    trace = replace(trace, pieces={**trace.pieces, "layer.dense": layer})
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf())
    return job, trace, pricer, TensorOverlap(job, trace, pricer)


ON = ("recipe.overlap_tensor=true",)


def test_parts_take_the_whole_and_a_tail() -> None:
    """All but the last part take 1/n; the last is as long as a product of its size, where that is longer."""
    job, trace, pricer, overlap = _overlap(overrides=ON)
    whole_s = pricer.price(trace.pieces["layer.dense"].forward).time_s
    timed = overlap.price("layer.dense", backward=False)
    parts_s = timed.time_s[timed.graph.op_class == OpClass.GEMM]
    confined = job.cluster.device.num_sms / (job.cluster.device.num_sms - RESERVED_SMS)
    for own_s, n, factor, seconds in (
        (parts_s[:RANKS], RANKS, 1.0, whole_s[1]),
        (parts_s[RANKS:], 4, confined, whole_s[2]),
    ):
        assert own_s[:-1] == pytest.approx(np.full(n - 1, factor * seconds / n))
        assert own_s[-1] >= factor * seconds / n * (1 - 1e-12)
        assert own_s.sum() < 1.2 * factor * seconds
    assert parts_s[RANKS - 1] > 1.05 * parts_s[0]  # waves of a smaller product


def test_traffic_takes_no_sm_from_the_parts_but_memory() -> None:
    """A copy engine takes none, and parts leave SMs to reduce-scatters: less slowdown than beside NCCL."""
    job = candidate(layout="tp=8,pp=4,sp=1", overrides=ON)
    model = simulator()
    pairing = model.interference.pairing(job.cluster.device)
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf(), pairing=pairing)
    kernel = pricer.price(build_graph(_rows())).pair_class[1]
    with_sms, aside = (
        pricer.traffic_class(Axis.TENSOR, Collective.REDUCE_SCATTER, 1e8, time_s=1e-3, aside=aside)
        for aside in (False, True)
    )
    table = pairing.pair_table().compute
    assert 1.0 <= table[kernel, aside] < table[kernel, with_sms]


@pytest.mark.parametrize(
    ("layout", "overrides", "gpus"),
    [
        ("tp=8,pp=4,sp=1", ("recipe.overlap_tensor=false",), 32),
        ("tp=8,pp=4", (), 32),
        ("tp=16,pp=2,sp=1", ON, 32),  # two hosts: peers cannot write to each other's buffers
    ],
)
def test_without_it_the_trace_is_left_alone(layout: str, overrides: tuple[str, ...], gpus: int) -> None:
    _, trace, _, overlap = _overlap(layout=layout, overrides=overrides, num_gpus=gpus)
    assert overlap.trace is trace


def test_silent_recipes_follow_the_stack_in_its_precisions() -> None:
    def overlaps(**options: object) -> bool:
        return candidate(**({"layout": "tp=8,pp=4,sp=1"} | options)).overlaps_tensor

    assert not overlaps()
    assert overlaps(stack="megatron-bridge")
    assert not overlaps(stack="megatron-bridge", layout="tp=8,pp=4,sp=0")
    assert not overlaps(stack="megatron-bridge", cluster="gb200-nvl72", precision="nvfp4")
    assert overlaps(stack="megatron-bridge", cluster="gb200-nvl72", precision="nvfp4", overrides=ON)


def test_needs_sequence_parallelism() -> None:
    with pytest.raises(SpecError, match=r"recipe\.overlap_tensor = True: needs sequence parallelism"):
        candidate(layout="tp=8,pp=4,sp=0", overrides=ON)
