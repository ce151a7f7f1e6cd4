"""Invariants of the compute model, and published times that it must meet."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.compute import RooflineModel
from echo_explore.core import MissingCalibration, SpecError
from echo_explore.graph import DTYPE_BYTES, Collective, DType, OpClass, OpKind, OpRow, Phase, build_graph
from echo_explore.specs import DeviceSpec, JobOptions, candidate_of
from tests.compute.graphs import attention, device, gemm, gpt_layer, stack, stream
from tests.examples import examples

MODEL = RooflineModel.shipped()
CLUSTERS = (
    "a100-80gb-hdr", "a100-40gb-hdr", "h100-ndr", "h800-ndr", "h200-ndr", "b200-ndr", "b300-xdr", "gb200-nvl72",
    "gb300-nvl72", "v100-25gbe", "mi300x-roce", "mi325x-roce", "mi355x-roce",
)  # fmt: skip
DEVICES = {name: device(name) for name in CLUSTERS}
STACK = stack()
STREAMS = (
    OpClass.NORM, OpClass.SOFTMAX, OpClass.ELEMENTWISE, OpClass.REDUCTION, OpClass.EMBEDDING, OpClass.CROSS_ENTROPY,
    OpClass.COPY, OpClass.OPTIMIZER, OpClass.ROPE, OpClass.PERMUTE,
)  # fmt: skip


def _times(rows: list[OpRow], spec: DeviceSpec, model: RooflineModel = MODEL) -> np.ndarray:
    return model.kernel_times(build_graph(rows), spec, STACK).time_s


devices = st.sampled_from(CLUSTERS).map(DEVICES.__getitem__)
extents = st.integers(1, 1024).map(lambda n: 32 * n)


@given(devices, st.sampled_from([DType.FP16, DType.FP32]), st.integers(1, 64), *[st.integers(1, 40_000)] * 3)
def test_products_are_never_faster_than_the_roofline(
    spec: DeviceSpec, dtype: DType, batch: int, m: int, n: int, k: int
) -> None:
    row = gemm(batch, m, n, k, dtype=dtype)
    peak = spec.peak_flop_per_s["fp32" if dtype == DType.FP32 else "fp16"]
    least = max(row.flop / peak, (row.bytes_read + row.bytes_written) / spec.memory_bandwidth_bytes_per_s)
    assert _times([row], spec)[0] >= least * (1 - 1e-12)


@given(devices, st.integers(1, 32_768), extents, extents, st.sampled_from(["n", "k"]))
@examples(200)
def test_a_quarter_of_n_or_k_is_not_slower(spec: DeviceSpec, m: int, n: int, k: int, cut: str) -> None:
    whole, quarter = gemm(1, m, n, k), gemm(1, m, n // 4 if cut == "n" else n, k // 4 if cut == "k" else k)
    times = _times([whole, quarter], spec)
    assert times[0] >= times[1] / 1.05


@given(devices, st.sampled_from([2.0, 6.0]), *[extents] * 3)
def test_a_sum_moves_beside_the_arithmetic_of_its_product(
    spec: DeviceSpec, further: float, m: int, n: int, k: int
) -> None:
    """A product that adds to a sum (`further` bytes an element more): longer, but not by all of the bytes' time."""
    plain = gemm(1, m, n, k)
    added = replace(plain, bytes_read=plain.bytes_read + further * m * n)
    alone, summed = _times([plain, added], spec)
    copied = _times([stream(OpClass.COPY, further * m * n, 0.0)], spec)[0]
    assert alone <= summed <= alone + copied


@given(devices, st.sampled_from(STREAMS), st.floats(0, 1e10), st.floats(0, 1e10), st.booleans())
def test_streaming_kernels_grow_with_bytes(
    spec: DeviceSpec, op_class: OpClass, a: float, b: float, backward: bool
) -> None:
    phase = Phase.BACKWARD if backward else Phase.FORWARD
    rows = [stream(op_class, size, 0.0, phase=phase) for size in sorted((a, b))]
    small, large = _times(rows, spec)
    assert 0 < small <= large
    assert large >= max(a, b) / spec.memory_bandwidth_bytes_per_s


@given(
    devices, st.integers(1, 8), st.integers(1, 64), st.integers(16, 32_768), st.sampled_from([64, 80, 128, 256]),
    st.booleans(),
)  # fmt: skip
def test_fused_attention(spec: DeviceSpec, batch: int, heads: int, sequence: int, head_dim: int, causal: bool) -> None:
    rows = [
        attention(batch, heads, heads, sequence, head_dim, causal=causal),
        attention(batch, heads, heads, sequence, head_dim, causal=causal, backward=True),
        attention(batch, heads, 1, sequence, head_dim, causal=causal),
        attention(batch, heads, heads, 2 * sequence, head_dim, causal=causal),
    ]
    forward, backward, grouped, longer = _times(rows, spec)
    flop = 4.0 * batch * heads * sequence**2 * head_dim * (0.5 if causal else 1.0)
    assert forward >= flop / spec.peak_flop_per_s["fp16"]
    assert backward > forward
    assert grouped <= forward < longer


def test_rows_that_are_no_kernels_take_no_time() -> None:
    rows = [
        gemm(1, 512, 512, 512),
        OpRow(kind=OpKind.COLLECTIVE, collective=Collective.ALL_REDUCE, message_bytes=1e6),
        OpRow(kind=OpKind.WAIT, awaits=1),
        OpRow(kind=OpKind.HOST_SYNC),
    ]
    times = MODEL.kernel_times(build_graph(rows), device(), STACK)
    assert times.time_s[0] > 0
    assert not times.time_s[1:].any()
    assert not times.sigma_log[1:].any()
    assert times.extrapolated == ()


def test_an_empty_graph_is_priced() -> None:
    assert MODEL.kernel_times(build_graph([]), device(), STACK).time_s.shape == (0,)


def test_equal_rows_cost_the_same_wherever_they_stand() -> None:
    rows = [gemm(1, 2048, 4608, 12288), stream(OpClass.NORM, 1e8, 1e8), attention(1, 12, 12, 2048, 128)]
    alone = np.concatenate([_times([row], device()) for row in rows])
    together = _times([*rows, *reversed(rows), *rows], device())
    np.testing.assert_array_equal(together, np.concatenate([alone, alone[::-1], alone]))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_shipped_device_is_priced_and_says_how_sure_it_is(cluster: str) -> None:
    rows = [gemm(1, 2048, 4608, 12288), attention(1, 12, 12, 2048, 128), *(stream(c, 1e8, 1e8) for c in STREAMS)]
    times = MODEL.kernel_times(build_graph(rows), DEVICES[cluster], STACK)
    assert (times.time_s > 0).all()
    assert ((times.sigma_log > 0.02) & (times.sigma_log < 1)).all()


def test_an_unknown_device_works_from_its_specification_and_is_less_sure() -> None:
    known = device("h100-ndr")
    unknown = known.model_copy(update={"calibration": "somebody-elses-gpu"})
    graph = build_graph([gemm(1, 8192, 8192, 8192), stream(OpClass.ELEMENTWISE, 1e8, 1e8)])
    sure, unsure = MODEL.kernel_times(graph, known, STACK), MODEL.kernel_times(graph, unknown, STACK)
    assert (unsure.sigma_log >= sure.sigma_log).all()
    assert any("somebody-elses-gpu: no coefficients" in line for line in unsure.extrapolated)
    assert sure.extrapolated == ()
    np.testing.assert_allclose(unsure.time_s, sure.time_s, rtol=0.5)


def test_shapes_beyond_the_tables_are_named() -> None:
    graph = build_graph([gemm(1, 131_072, 4096, 4096), attention(1, 8, 8, 131_072, 128)])
    lines = MODEL.kernel_times(graph, device(), STACK).extrapolated
    assert any("gemm: 1 shapes beyond" in line for line in lines)
    assert any("attention: 1 shapes beyond" in line for line in lines)


def test_a_rate_that_the_device_lacks_is_an_error() -> None:
    with pytest.raises(MissingCalibration, match="gemm in fp8: A100-SXM4-80GB has no such rate; fix: use one of bf16"):
        _times([gemm(1, 512, 512, 512, dtype=DType.FP8)], device())


def test_a_kernel_of_no_class_is_priced_by_bytes_and_flop_and_reported() -> None:
    times = MODEL.kernel_times(build_graph([OpRow(op_class=OpClass.OTHER, bytes_read=1e9)]), device(), STACK)
    assert times.time_s[0] > 1e9 / 2.039e12
    assert "other: 1 kernels" in times.extrapolated[0]
    assert times.num_fallbacks == 0


def test_a_kernel_without_a_model_is_an_error_or_a_counted_fallback() -> None:
    computes = OpRow(op_class=OpClass.OTHER, dtype=DType.BF16, flop=1e12, bytes_read=1e6)
    eight_bits, absurd = gemm(1, 512, 512, 512, dtype=DType.FP8), gemm(1, 2**27, 8, 8)
    for row, named in ((computes, "other: a kernel of no"), (eight_bits, "gemm in fp8"), (absurd, "beyond 67108864")):
        with pytest.raises(MissingCalibration, match=f"{named}.*--allow-fallback"):
            _times([row], device())
    lenient = RooflineModel.shipped(allow_fallback=True)
    graph = build_graph([computes, eight_bits, eight_bits, gemm(1, 512, 512, 512)])
    times = lenient.kernel_times(graph, device(), STACK)
    assert times.num_fallbacks == 3
    assert "fallback: 3 kernels without a model (gemm, other)" in " ".join(times.extrapolated)
    assert times.time_s[0] > 1e12 / 312e12
    assert times.sigma_log[0] > times.sigma_log[3]


def test_the_scale_of_a_stack_multiplies_its_class() -> None:
    slower = STACK.model_copy(update={"compute_scale": {"norm": 2.0}})
    graph = build_graph([stream(OpClass.NORM, 1e8, 1e8), gemm(1, 512, 512, 512)])
    plain, scaled = (MODEL.kernel_times(graph, device(), s).time_s for s in (STACK, slower))
    np.testing.assert_allclose(scaled / plain, [2.0, 1.0])


def test_a_scale_of_no_class_is_named() -> None:
    wrong = STACK.model_copy(update={"compute_scale": {"norms": 2.0}})
    with pytest.raises(SpecError, match="compute_scale = 'norms': is not an op class"):
        MODEL.kernel_times(build_graph([gemm(1, 512, 512, 512)]), device(), wrong)


def test_rows_of_unaligned_products_are_slower() -> None:
    # head_dim 108 is a multiple of 4 elements, 150 of 2: neither is one of 16 bytes.
    times = _times([gemm(32, 2048, 2048, d) for d in (112, 108, 152, 150)], device())
    assert times[1] > times[0]
    assert times[3] > times[2]


def test_a_product_that_adds_into_fp32_pays_for_its_bytes() -> None:
    plain = gemm(1, 4096, 1024, 512, phase=Phase.BACKWARD)
    fused = gemm(1, 4096, 1024, 512, phase=Phase.BACKWARD)
    fused.bytes_read += 4.0 * 4096 * 1024
    fused.bytes_written += 2.0 * 4096 * 1024
    times = _times([plain, fused], device())
    assert times[1] > times[0]


def test_groups_share_the_rows() -> None:
    grouped = OpRow(
        op_class=OpClass.GROUPED_GEMM, dtype=DType.BF16, dims=(8, 8192, 4096, 2048),
        bytes_read=2.0 * (8192 * 2048 + 8 * 4096 * 2048), bytes_written=2.0 * 8192 * 4096,
    )  # fmt: skip
    times = _times([grouped, gemm(8, 1024, 4096, 2048)], device())
    assert times[0] == pytest.approx(times[1], rel=0.02)


def test_isolated_kernels_are_not_slower_than_sustained_ones() -> None:
    isolated = RooflineModel.shipped(sustained=False)
    rows = [gemm(1, 8192, 8192, 8192), attention(4, 32, 8, 8192, 128)]
    for spec in DEVICES.values():
        assert (_times(rows, spec, isolated) <= _times(rows, spec) * (1 + 1e-12)).all()


def test_a_lower_power_limit_slows_long_products_by_the_cube_root_and_streams_not() -> None:
    full = DEVICES["h100-ndr"]
    limited = full.model_copy(update={"power_w": 500.0})
    rows = [gemm(1, 8192, 8192, 8192), gemm(1, 8192, 8192, 8192, dtype=DType.FP8), stream(OpClass.COPY, 2e9, 2e9)]
    slowdown = _times(rows, limited) / _times(rows, full)
    assert slowdown[:2] == pytest.approx((700 / 500) ** (1 / 3), rel=0.03)
    assert slowdown[2] == 1.0
    alone = RooflineModel.shipped(sustained=False)
    assert (_times(rows, limited, alone) == _times(rows, full, alone)).all()
    unlimited = full.model_copy(update={"power_w": 1000.0})
    assert (_times(rows, unlimited) == _times(rows, full)).all()


def test_bf16_and_fp16_cost_the_same() -> None:
    times = _times([gemm(1, 2048, 4096, 4096, dtype=d) for d in (DType.BF16, DType.FP16)], device())
    assert times[0] == times[1]
    assert DTYPE_BYTES[DType.BF16] == DTYPE_BYTES[DType.FP16]


def test_reference_names_the_calibration() -> None:
    assert MODEL.calibration.source_hash in MODEL.reference
    assert MODEL.version >= 1


def test_a_layer_of_22b_takes_what_megatron_measured() -> None:
    # arXiv 2205.05198 (2022), table 4, first row: one layer of the 22B model (h 6144, 64 heads, s 2048, micro-batch 4,
    # tensor parallel 8, A100 80GB) takes 7.7 ms forward and 11.9 ms backward, with two all-reduces of 100 MB in each.
    graph = gpt_layer(hidden_size=6144, heads=64, sequence=2048, micro_batch=4, tensor_parallel=8)
    time_s = MODEL.kernel_times(graph, device(), STACK).time_s
    all_reduce_s = 2 * 100.7e6 * 2 * 7 / 8 / 235e9  # at 235 GB/s, nccl-tests on 8 A100 with NVSwitch (2021)
    forward = time_s[graph.phase == Phase.FORWARD].sum() + all_reduce_s
    backward = time_s[graph.phase == Phase.BACKWARD].sum() + all_reduce_s
    assert forward == pytest.approx(7.7e-3, rel=0.08)
    assert backward == pytest.approx(11.9e-3, rel=0.12)


def test_a_layer_of_gpt3_leaves_room_for_what_megatron_reached() -> None:
    # arXiv 2205.05198 (2022), table 5: 175B on 64 A100 runs at 51.4 % of the peak, with communication, bubbles and
    # optimizer; the layer alone must be faster than that, and not above what large products reach.
    graph = gpt_layer(hidden_size=12288, heads=96, sequence=2048, micro_batch=1, tensor_parallel=8)
    times = MODEL.kernel_times(graph, device(), STACK).time_s
    share = 72 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288)) / 8 / times.sum() / 312e12
    assert 0.55 < share < 0.72


def test_a_calibration_file_can_replace_the_shipped_one(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "echo_explore/_shipped/calibrations/compute.toml"
    copy = tmp_path / "mine.toml"
    copy.write_text(shipped.read_text())
    mine = RooflineModel.from_file(copy)
    graph = build_graph([gemm(1, 2048, 4096, 4096)])
    assert mine.kernel_times(graph, device(), STACK).time_s == MODEL.kernel_times(graph, device(), STACK).time_s


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dims": (1, 0, 64, 64)}, r"gemm: dims = '\[1, 0, 64, 64.*must be 1 or more"),
        ({"dims": (1, -4, 64, 64)}, r"gemm: dims = '\[1, -4, 64, 64.*must not be negative"),
        ({"bytes_read": float("nan")}, "gemm: bytes = 'nan': must be a finite number from 0 up"),
        ({"flop": float("inf")}, "gemm: flop = 'inf': must be a finite number"),
        ({"op_class": OpClass.ATTENTION, "dims": (1, 8, 8, 0, 512, 64, 1, 0)}, "attention: dims .* must be 1 or more"),
    ],
)
def test_kernels_of_impossible_sizes_have_no_price(change: dict[str, Any], said: str) -> None:
    graph = build_graph([gemm(1, 64, 64, 64), replace(gemm(1, 64, 64, 64), **change)])
    with pytest.raises(SpecError, match=said):
        RooflineModel.shipped(allow_fallback=True).kernel_times(graph, device(), stack())


def test_a_precision_that_the_gpu_lacks_is_refused_or_left_to_the_fallback() -> None:
    options = JobOptions(
        model="gpt-22b",
        cluster="a100-80gb-hdr",
        layout="tp=8",
        global_batch_size=4,
        micro_batch_size=4,
        precision="fp8",
    )
    with pytest.raises(SpecError, match=r"precision = 'fp8': A100.* has no such rate"):
        candidate_of(options)
    candidate = candidate_of(replace(options, allow_fallback=True))
    graph = build_graph([gemm(1, 4096, 4096, 4096, dtype=DType.FP8), gemm(1, 4096, 4096, 4096)])
    found = RooflineModel.shipped(allow_fallback=True).kernel_times(graph, candidate.cluster.device, candidate.stack)
    assert found.num_fallbacks == 1
    assert found.time_s[0] == pytest.approx(2 * 4096**3 / (312e12 / 2))  # at half the 16-bit rate, never the 8-bit one
    assert any("fallback: 1 kernels without a model (gemm) priced by the roofline" in x for x in found.extrapolated)
