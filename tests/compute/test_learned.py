"""The learned kernel models: invariants that no fit may break, and what they are made of."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echo_explore.compute import RooflineModel, load_calibration
from echo_explore.compute.attention_features import attention_base_s, attention_columns, attention_work, softmax_s
from echo_explore.compute.chip import Chip, chip_names, chip_of, matrix_instructions, named_chip
from echo_explore.compute.gemm_features import gemm_bytes
from echo_explore.compute.learned import (
    GEMM_NETWORKS,
    learned_attention,
    learned_gemm,
    learned_product,
    learned_stream,
    network_file,
)
from echo_explore.compute.network import load_networks
from echo_explore.core import MissingCalibration, SpecError
from echo_explore.graph import DType, OpClass, OpRow, Phase, build_graph
from echo_explore.specs import load_cluster
from tests.compute.graphs import device, gemm, stack
from tests.examples import examples

GPUS = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM", "B200-SXM", "GB300", "H20", "L40S", "MI300X", "V100-SXM2")
MODEL = RooflineModel.shipped()
gpus = st.sampled_from(GPUS).map(named_chip)
extents = st.integers(1, 70_000)


def _shape(*sizes: int) -> np.ndarray:
    return np.array([[1, *sizes]], dtype=np.float64)


@given(
    gpus, st.sampled_from(["bf16", "fp16"]), st.sampled_from([1, 2, 64, 384]), st.integers(1, 40_000), extents, extents,
    st.sampled_from([2, 3]),
)  # fmt: skip
@example(named_chip("H20"), "bf16", 1, 20_000, 16_384, 8, 3)  # 8 and 2 both count as 32
@example(named_chip("A100-SXM4-80GB"), "bf16", 64, 2048, 2048, 600, 3)  # 150 leaves the matrix units, 600 does not
@example(named_chip("A100-SXM4-80GB"), "bf16", 64, 2048, 150, 2400, 3)
@example(named_chip("A100-SXM4-80GB"), "bf16", 64, 65536, 3, 4096, 2)  # a quarter of 3 is 1
@examples(300)
def test_a_quarter_of_any_n_or_k_is_not_slower(
    chip: Chip, precision: str, batch: int, m: int, n: int, k: int, column: int
) -> None:
    precision = precision if precision in chip.peak_flop_per_s else "fp16"
    whole = np.array([[batch, m, n, k]], dtype=np.float64)
    quarter = whole.copy()
    quarter[0, column] = max(1, whole[0, column] // 4)
    times = [float(learned_gemm(s, chip, precision).time_s[0]) for s in (whole, quarter)]
    assert times[0] >= times[1] / 1.05


@given(st.sampled_from(GPUS[1:5]).map(named_chip), st.integers(1, 64), *[extents] * 3)
@settings(deadline=None)
def test_a_narrow_product_alone_lies_between_the_roofline_and_the_product_with_its_cast(
    chip: Chip, batch: int, m: int, n: int, k: int
) -> None:
    shape = np.array([[batch, m, n, k]], dtype=np.float64)
    alone, whole = learned_product(shape, chip, "fp8"), learned_gemm(shape, chip, "fp8")
    bytes_s = gemm_bytes(shape, 1.0)[0] / chip.bandwidth_bytes_per_s
    least = max(2.0 * batch * m * n * k / chip.peak("fp8"), bytes_s)
    assert alone.time_s[0] >= least * (1 - 1e-12)
    assert alone.time_s[0] <= max(whole.time_s[0], 4000.0 / chip.clock_hz)
    assert alone.sigma_log > whole.sigma_log


def test_a_cast_of_a_narrow_table_is_taken_off_by_the_rows_it_reads() -> None:
    chip = named_chip("H100-SXM5-80GB")
    shape = _shape(8192, 1024, 8192)
    took = learned_gemm(shape, chip, "fp8").time_s[0] - learned_product(shape, chip, "fp8").time_s[0]
    one_pass = 3.0 * 8192 * 8192 / chip.bandwidth_bytes_per_s
    assert one_pass < took < 2.5 * one_pass
    assert learned_product(shape, chip, "bf16").time_s[0] == learned_gemm(shape, chip, "bf16").time_s[0]


def test_narrow_products_of_a_graph_are_learned_where_a_table_has_the_gpu_and_physical_elsewhere() -> None:
    graph = build_graph([gemm(1, 4096, 4096, 4096, dtype=DType.FP8)])
    physical = RooflineModel(replace(MODEL.calibration, learned=False), sustained=False)
    alone = RooflineModel(MODEL.calibration, sustained=False)
    for cluster, learned in (("h100-ndr", True), ("b200-ndr", True), ("mi300x-roce", False)):
        spec = load_cluster(cluster).device
        times = [model.kernel_times(graph, spec, stack()).time_s[0] for model in (alone, physical)]
        assert bool(times[0] != times[1]) is learned
        assert learned_product(_shape(4096, 4096, 4096), chip_of(spec), "fp8").generic is not learned


@given(gpus, st.sampled_from(sorted(GEMM_NETWORKS)), st.integers(1, 64), *[extents] * 3)
@examples(150)
def test_products_are_bounded_by_the_roofline(chip: Chip, precision: str, batch: int, m: int, n: int, k: int) -> None:
    if precision not in chip.peak_flop_per_s:
        with pytest.raises(MissingCalibration, match=f"{precision}: .* has no such rate; fix: use one of"):
            learned_gemm(_shape(m, n, k), chip, precision)
        return
    shape = np.array([[batch, m, n, k]], dtype=np.float64)
    found = learned_gemm(shape, chip, precision)
    element = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "nvfp4": 0.5}.get(precision, 1.0)
    least = max(
        2.0 * batch * m * n * k / chip.peak(precision), gemm_bytes(shape, element)[0] / chip.bandwidth_bytes_per_s
    )
    assert least <= found.time_s[0] < 1e6
    assert 0.02 < found.sigma_log < 1.5


@given(gpus, st.integers(1, 16), st.integers(1, 64), st.integers(1, 70_000), st.integers(16, 512), st.booleans())
@examples(100)
def test_attention_is_bounded_by_the_roofline(
    chip: Chip, batch: int, heads: int, sequence: int, width: int, causal: bool
) -> None:
    sizes = [np.array([float(v)]) for v in (batch, heads, heads, sequence, sequence, width)]
    columns = attention_columns(*sizes, causal=float(causal))
    found = learned_attention(columns, chip, "fp16", "fp16", kernel="nobody-knows-it")
    flop, moved = attention_work(columns, 2.0, 2.0)
    assert found.time_s[0] >= max(flop[0] / chip.peak("fp16"), moved[0] / chip.bandwidth_bytes_per_s)
    assert np.isfinite(found.time_s).all()


def test_rows_do_not_depend_on_their_neighbours() -> None:
    rng = np.random.default_rng(1)
    shape = np.column_stack([np.ones(500), *(rng.integers(1, 20_000, 500) for _ in range(3))]).astype(np.float64)
    chip = named_chip("H100-SXM5-80GB")
    together = learned_gemm(shape, chip, "bf16").time_s
    alone = np.concatenate([learned_gemm(shape[i : i + 1], chip, "bf16").time_s for i in range(0, 500, 50)])
    np.testing.assert_allclose(together[::50], alone, rtol=2e-5)


def test_every_gpu_of_the_catalogue_is_priced() -> None:
    shape = _shape(4096, 4096, 4096)
    for name in chip_names():
        chip = named_chip(name)
        precision = "bf16" if "bf16" in chip.peak_flop_per_s else "fp32"
        share = 2 * 4096**3 / learned_gemm(shape, chip, precision).time_s[0] / chip.peak(precision)
        assert 0.2 < share <= 1, name


def test_gpus_of_clusters_have_their_figures_in_the_catalogue_too() -> None:
    for cluster in ("a100-80gb-hdr", "h800-ndr", "gb200-nvl72", "mi355x-roce"):
        spec = load_cluster(cluster).device
        assert named_chip(spec.calibration) == chip_of(spec)


def test_a_gpu_nobody_knows_names_the_nearest() -> None:
    with pytest.raises(MissingCalibration, match=r"gpu = 'H1000': .*near: .*h100"):
        named_chip("H1000")


def test_measured_devices_are_surer_than_others() -> None:
    shape = _shape(8192, 8192, 8192)
    measured, like, unknown = (learned_gemm(shape, named_chip(n), "bf16") for n in ("H100-SXM", "H800", "H20"))
    assert (measured.generic, like.generic, unknown.generic) == (False, False, True)
    assert measured.sigma_log < like.sigma_log < unknown.sigma_log
    np.testing.assert_allclose(like.time_s, measured.time_s, rtol=1e-6)


def test_a_source_that_was_seen_differs_from_the_middle_of_all() -> None:
    shape, chip = _shape(8192, 8192, 8192), named_chip("A100-SXM4-80GB")
    slow, fast, middle, other = (
        learned_gemm(shape, chip, "bf16", source=s).time_s[0]
        for s in ("aic012/sglang-0.5.10", "aic012/vllm-0.14.0", "", "mine")
    )
    assert fast < middle < slow
    assert middle == other


def test_a_large_batch_takes_no_longer_than_its_parts_in_turn() -> None:
    for chip in map(named_chip, GPUS):
        shapes = (np.array([[batch, 1024.0, 128.0, 1024.0]]) for batch in (512.0, 64.0))
        whole, part = (learned_gemm(shape, chip, "fp16").time_s[0] for shape in shapes)
        assert whole <= 8 * part * (1 + 1e-9)


def test_small_extents_cost_what_the_smallest_of_the_tables_costs() -> None:
    chip = named_chip("H100-SXM")
    small, smallest = (learned_gemm(_shape(64, n, 4096), chip, "bf16").time_s[0] for n in (32, 8))
    assert small == smallest


def test_generations_differ_by_who_issues_products_and_by_exponentials() -> None:
    names = ("A100-SXM", "RTX-PRO-6000", "H100", "GB200", "GB300", "MI300X")
    chips = [named_chip(name if name != "A100-SXM" else "A100-SXM4-80GB") for name in names]
    issued = [matrix_instructions(chip.architecture) for chip in chips]
    assert issued == ["warp", "warp", "warpgroup", "tensor-memory", "tensor-memory", ""]
    assert [chip.exponentials_per_clock for chip in chips] == [16, 16, 16, 16, 32, 16]
    # 10.7e12 exponentials a second: NVIDIA, Inside NVIDIA Blackwell Ultra (developer blog, August 2025).
    assert chips[4].exponentials_per_s == pytest.approx(10.7e12, rel=0.1)


def test_softmax_is_what_a_faster_matrix_unit_leaves() -> None:
    """Exponentials and single-precision instructions over products: 0.5 of them on A100, 1.5 on GB200, 1 on GB300."""
    columns = attention_columns(*(np.array([float(v)]) for v in (4, 32, 32, 8192, 8192, 128)))
    found = []
    for name in ("A100-SXM4-80GB", "GB200", "GB300"):
        chip = named_chip(name)
        products_s = attention_work(columns, 2.0, 2.0)[0] / chip.peak("bf16")
        softmax = softmax_s(columns, chip, 2.0)
        found.append(float(softmax[0] / products_s[0]))
        assert attention_base_s(columns, chip, chip.peak("bf16"), 2.0, 2.0) > products_s + softmax
    assert found == pytest.approx([0.5, 1.5, 1.0], rel=0.1)


def test_an_unknown_gpu_with_more_exponentials_is_faster_at_attention() -> None:
    columns = attention_columns(*(np.array([float(v)]) for v in (4, 32, 32, 8192, 8192, 64)), causal=1.0)
    known = replace(named_chip("GB200"), key="nobody-measured-it")
    chips = (known, replace(known, exponentials_per_clock=32))
    slow, fast = (learned_attention(columns, chip, "bf16", "bf16") for chip in chips)
    assert slow.generic
    assert fast.generic
    # GB200 over GB300 in the tables at head_dim 64: 1.2 to 1.4 by kernel.
    assert 1.1 < slow.time_s[0] / fast.time_s[0] < 1.6


def test_batched_products_with_unaligned_rows_leave_the_matrix_units() -> None:
    """torch.bmm on A100 under CUDA 11.6: pytorch/pytorch issue 83272 (August 2022), milliseconds.

    Its 9.232 ms in bf16 are more than four times what 560 columns take, so the rule of quarters holds them down.
    """
    chip = named_chip("A100-SXM4-40GB")
    aligned, unaligned = np.array([[512.0, 1024, 128, 1024]]), np.array([[384.0, 1024, 140, 1024]])
    for shape, precision, measured_ms in (
        (aligned, "fp16", 1.037), (aligned, "bf16", 1.036), (unaligned, "fp16", 2.092)
    ):  # fmt: skip
        assert learned_gemm(shape, chip, precision).time_s[0] * 1e3 == pytest.approx(measured_ms, rel=0.2)
    one, other = unaligned.copy(), named_chip("H100")
    whole = learned_gemm(np.array([[384.0, 1024, 560, 1024]]), chip, "bf16").time_s[0]
    assert whole < learned_gemm(unaligned, chip, "bf16").time_s[0] < 9.232e-3
    one[0, 0] = 1.0
    padded = np.array([[384.0, 1024, 144, 1024]])
    assert learned_gemm(one, chip, "bf16").time_s[0] < learned_gemm(unaligned, chip, "bf16").time_s[0] / 384 * 50
    for fast in (learned_gemm(padded, chip, "bf16"), learned_gemm(unaligned, other, "bf16")):
        assert fast.time_s[0] < 1.5e-3


def test_a_backward_in_8_bits_visits_all_keys() -> None:
    sizes = [np.array([float(v)]) for v in (1, 8, 8, 8192, 8192, 64)]
    whole, windowed = (attention_columns(*sizes, causal=1.0, window=w, backward=1.0) for w in (0.0, 128.0))
    assert attention_work(windowed, 1.0, 1.0)[0] == attention_work(whole, 1.0, 1.0)[0]
    assert attention_work(windowed, 2.0, 2.0)[0] < attention_work(whole, 2.0, 2.0)[0] / 10


def test_streams_grow_with_their_bytes() -> None:
    chip, one = named_chip("A100-SXM4-80GB"), np.ones(1)
    times = [
        learned_stream(2048 * f * one, 8192 * one, 2048 * f * 8192 * 6 * one, 0 * one, chip, op="add").time_s[0]
        for f in (1, 4, 16)
    ]
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("name", sorted({*GEMM_NETWORKS.values(), "attention", "stream"}))
def test_every_network_says_where_it_comes_from(name: str) -> None:
    for network in network_file(name).values():
        assert {"source", "fitted_on", "num_rows", "held_back"} <= set(network.facts)
        assert "*" in network.sigma_log
        assert (network.low <= network.high).all()
        assert network.first.size + network.second.size < 20_000


def test_a_broken_network_file_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "net.toml"
    good = "schema = 1\n[network.x]\nwidth = 1\nfeatures = ['a']\ncategories = []\nlow = '0'\nhigh = "
    path.write_text(good + "'1 2'")
    with pytest.raises(SpecError, match=r"network\.x\.high = 2: must hold \(1,\) finite numbers"):
        load_networks(path)
    path.write_text(good + "'one'")
    with pytest.raises(SpecError, match=r"network\.x\.high = 'one': must hold numbers only"):
        load_networks(path)
    path.write_text("schema = 2")
    with pytest.raises(SpecError, match="schema = 2: must be 1"):
        load_networks(path)


def test_convolution_batch_norm_and_quantise_have_prices() -> None:
    # ResNet-50's first 3x3 convolution: 64 images of 56 x 56, 64 channels in and out.
    pixels, channels = 64 * 56 * 56, 64
    rows = [
        OpRow(op_class=OpClass.CONVOLUTION, dtype=DType.BF16, dims=(1, pixels, channels, 9 * channels),
              flop=2.0 * pixels * channels**2 * 9, bytes_read=2.0 * pixels * channels,
              bytes_written=2.0 * pixels * channels),
        OpRow(op_class=OpClass.BATCH_NORM, dims=(pixels, channels), bytes_read=4.0 * pixels * channels,
              bytes_written=2.0 * pixels * channels),
        OpRow(op_class=OpClass.QUANTISE, dims=(8192, 4096), bytes_read=2.0 * 2**25, bytes_written=1.0 * 2**25),
    ]  # fmt: skip
    for cluster in ("a100-80gb-hdr", "h100-ndr", "mi300x-roce"):
        times = RooflineModel.shipped().kernel_times(build_graph(rows), device(cluster), stack())
        assert times.num_fallbacks == 0
        assert (times.time_s > [row.flop / 2.5e15 for row in rows]).all()
        assert (times.time_s < 1e-3).all()


def test_the_stack_names_the_attention_kernel() -> None:
    row = OpRow(op_class=OpClass.ATTENTION, dtype=DType.BF16, dims=(1, 32, 8, 8192, 8192, 128, 1, 0))
    model, graph = RooflineModel.shipped(), build_graph([row])
    named = {k: stack().model_copy(update={"attention_kernel": k}) for k in ("fa3", "triton")}
    fa3, triton = (model.kernel_times(graph, device("h100-ndr"), s).time_s[0] for s in named.values())
    default = model.kernel_times(graph, device("h100-ndr"), stack()).time_s[0]
    assert fa3 == pytest.approx(default, rel=0.15)
    assert triton > 1.2 * fa3


def test_the_backward_of_cudnn_is_the_same_in_graphs_and_tables() -> None:
    dims = (1, 128, 8, 8192, 8192, 128, 1, 0)
    rows = [
        OpRow(op_class=OpClass.ATTENTION, dtype=DType.BF16, phase=p, dims=dims) for p in (Phase.FORWARD, Phase.BACKWARD)
    ]
    columns = attention_columns(
        *(np.array([float(v)] * 2) for v in dims[:6]), causal=1.0, backward=np.array([0.0, 1.0])
    )
    named = stack().model_copy(update={"attention_kernel": "cudnn"})
    model = RooflineModel(MODEL.calibration, sustained=False)
    for cluster in ("h200-ndr", "gb200-nvl72", "gb300-nvl72"):
        found = model.kernel_times(build_graph(rows), device(cluster), named).time_s
        table = learned_attention(columns, chip_of(device(cluster)), "bf16", "bf16", kernel="cudnn").time_s
        np.testing.assert_allclose(found, table, rtol=1e-5)
        assert 2.5 < found[1] / found[0] < 4.0
    elsewhere = model.kernel_times(build_graph(rows), device("mi300x-roce"), named).time_s
    assert elsewhere[1] / elsewhere[0] == pytest.approx(3.0, abs=0.1)


def test_corrections_are_applied_last_and_to_their_class_only(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    table = '[[correction]]\ndevice = "a100-sxm4-80gb"\nop_class = "{}"\ndtype = "{}"\nmeasured = "sustained"\n'
    values = "time_us = [10, 1000]\nfactor = [2.0, 1.5]\nsigma_log = 0.04\nnum_rows = 5\n"
    head = 'schema = 1\nkind = "kernel-corrections"\n'
    path.write_text(head + table.format("gemm", "fp16") + values + table.format("norm", "any") + values)
    mine, shipped = RooflineModel(load_calibration(path)), RooflineModel.shipped()
    streams = [OpRow(op_class=op_class, bytes_read=1e8) for op_class in (OpClass.NORM, OpClass.COPY)]
    graph = build_graph([gemm(1, 8192, 8192, 8192), *streams])
    ratio = mine.kernel_times(graph, device(), stack()).time_s / shipped.kernel_times(graph, device(), stack()).time_s
    assert ratio[0] == pytest.approx(1.5)
    assert 1.5 < ratio[1] < 2
    assert ratio[2] == 1
    other = mine.kernel_times(graph, device("h100-ndr"), stack()).time_s
    np.testing.assert_array_equal(other, shipped.kernel_times(graph, device("h100-ndr"), stack()).time_s)
    assert mine.kernel_times(graph, device(), stack()).sigma_log[0] == 0.04
    assert "corrected by" in mine.reference


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("factor = [2.0, 1.5]", "factor = [2.0, 0.01]", "makes a longer kernel shorter"),
        ("factor = [2.0, 1.5]", "factor = [2.0]", "must ascend, one factor each"),
        ("factor = [2.0, 1.5]", "factor = [2.0, -1]", "must be a finite number above 0"),
        ('measured = "sustained"', 'measured = "sometimes"', "must be isolated or sustained"),
        ("sigma_log = 0.04", "sigma_log = 0", "must be a finite number above 0"),
        ('device = "x"', "device = 3", "must be a text"),
        ("schema = 1", "schema = 7", "must be 1"),
        ("num_rows = 5", "num_rows = 4", "num_rows = 4: must be 5 measurements or more"),
        ('op_class = "gemm"', 'op_class = "GEM"', "op_class = 'gem': is no class that is corrected; fix: use gemm"),
        ('dtype = "fp16"', 'dtype = "float16"', "dtype = 'float16': is no data type of gemm; fix: use fp32"),
    ],
)
def test_wrong_corrections_name_the_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (
        'schema = 1\nkind = "kernel-corrections"\n[[correction]]\ndevice = "x"\nop_class = "gemm"\ndtype = "fp16"\n'
        'measured = "sustained"\ntime_us = [10, 1000]\nfactor = [2.0, 1.5]\nsigma_log = 0.04\nnum_rows = 5\n'
    )
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(SpecError, match=said):
        load_calibration(path)


def test_corrections_of_another_gpu_are_said_to_count_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'schema = 1\nkind = "kernel-corrections"\n[[correction]]\ndevice = "h100-sxm5-80gb"\nop_class = "gemm"\n'
        'dtype = "fp16"\nmeasured = "sustained"\ntime_us = [10]\nfactor = [2.0]\nsigma_log = 0.04\nnum_rows = 5\n'
    )
    graph, mine = build_graph([gemm(1, 64, 64, 64)]), RooflineModel.from_file(path)
    said = "no correction is of a100-sxm4-80gb (they are of h100-sxm5-80gb), so none counts"
    assert any(said in line for line in mine.kernel_times(graph, device(), stack()).extrapolated)
    assert not any(
        "so none counts" in line for line in mine.kernel_times(graph, device("h100-ndr"), stack()).extrapolated
    )


@pytest.mark.parametrize("field", ["attention_kernel", "kernel_source"])
def test_kernels_of_a_stack_that_no_table_has_are_refused(field: str) -> None:
    wrong = stack().model_copy(update={field: "nosuch"})
    graph = build_graph([gemm(1, 64, 64, 64)])
    with pytest.raises(SpecError, match=f"stack.{field} = 'nosuch': is in no table of kernels; fix: use "):
        MODEL.kernel_times(graph, device(), wrong)
