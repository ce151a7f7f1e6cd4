"""The shipped examples: what their models compute, and what DDP sends for them."""

from pathlib import Path

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective, DType, OpClass, Phase, RankTrace
from echo_explore.simulate import default_simulator, predict_trace
from echo_explore.specs import load_cluster, load_stack
from echo_explore.testing.traces import HandmadeTracer
from echo_explore.tracing import TraceService

pytestmark = pytest.mark.torch
EXAMPLES = Path(__file__).parents[2] / "examples"
# Parameters in millions, and forward operations of one image or sequence in 1e9 (a multiply-add is 2), of products,
# convolutions and attention. ResNets: multiply-adds of He et al., arXiv 1512.03385, table 1, times 2 (3.8e9, 11.3e9;
# their stride lies in the first 1x1 convolution, here in the 3x3: torchvision, 2015, counts 4.09e9 and 11.51e9).
# VGG-19: arXiv 1409.1556, table 2 (144 million), 19.6e9 multiply-adds. GPT-2, BERT: 24 s h^2 (1 + s/6h) a layer and the
# head.
CASES = {
    ("vision_ddp.py", "resnet50"): (25.56, 2 * 4.09),
    ("vision_ddp.py", "resnet50_fp32"): (25.56, 2 * 4.09),
    ("vision_ddp.py", "resnet152"): (60.19, 2 * 11.51),
    ("vision_ddp.py", "vgg19"): (143.67, 2 * 19.63),
    ("language_ddp.py", "gpt2"): (124.44, None),
    ("language_ddp.py", "bert_large"): (335.17, None),
}


def step(service: TraceService, name: str, function: str, *, world_size: int = 8, rank: int = 3) -> RankTrace:
    return service.script_step(EXAMPLES / name, function, world_size=world_size, rank=rank)


SLOW = ("resnet152", "bert_large")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c[1] in SLOW else (), id=c[1]) for c in CASES]
)
def test_gradients_of_all_parameters_are_reduced_in_buckets(service: TraceService, case: tuple[str, str]) -> None:
    trace = step(service, *case)
    graph = trace.graph
    reduced = (graph.collective == Collective.ALL_REDUCE) & (graph.message_bytes > 1e4)
    parameters, giga_flop = CASES[case]
    assert graph.message_bytes[reduced].sum() / 4e6 == pytest.approx(parameters, rel=2e-3)
    assert (graph.message_bytes[reduced][:-1] >= 2**20).all()
    assert set(graph.axis[reduced].tolist()) == {Axis.DATA}
    assert graph.asynchronous[reduced].all()
    awaited = graph.awaits[graph.awaits >= 0]
    assert set(np.flatnonzero(reduced)) <= set(awaited.tolist())
    assert trace.groups == (tuple(range(8)),)
    if giga_flop is not None:
        convolutions = (graph.op_class == OpClass.CONVOLUTION) | (graph.op_class == OpClass.GEMM)
        forward = convolutions & (graph.phase == 0)
        images = 64 if case[1] == "resnet50_fp32" else 32
        assert (DType.BF16 in graph.dtype[forward]) == (images == 32)
        assert graph.flop[forward].sum() / (images * 1e9) == pytest.approx(giga_flop, rel=0.01)
        assert (graph.op_class == OpClass.OTHER).sum() == 0


@pytest.mark.parametrize(
    ("function", "layers", "length", "hidden", "head"),
    [
        ("gpt2", 12, 1024, 768, 50257 * 768),
        pytest.param("bert_large", 24, 512, 1024, 30522 * 1024 + 1024 * 1024, marks=pytest.mark.slow),
    ],
)
def test_language_models_execute_the_closed_form(
    service: TraceService, function: str, layers: int, length: int, hidden: int, head: int
) -> None:
    graph = step(service, "language_ddp.py", function).graph
    tokens, causal = 8 * length, function == "gpt2"
    products = tokens * layers * 24 * hidden**2 + 2 * tokens * head
    attention = tokens * layers * 4 * length * hidden / (2 if causal else 1)
    assert graph.flop.sum() == pytest.approx(3 * products + 3.5 * attention, rel=1e-3)
    assert (graph.op_class == OpClass.ATTENTION).sum() == 2 * layers


def test_convolutions_of_fp32_run_in_tf32(service: TraceService, tmp_path: Path) -> None:
    text = (EXAMPLES / "vision_ddp.py").read_text(encoding="utf-8").replace("torch.bfloat16", "torch.float32")
    path = tmp_path / "fp32.py"
    path.write_text(text, encoding="utf-8")
    graph = service.script_step(path, "resnet50", world_size=8, rank=0).graph
    dtypes = graph.dtype[graph.op_class == OpClass.CONVOLUTION]
    assert set(dtypes.tolist()) == {DType.TF32}


def test_fsdp_gathers_the_next_layer_while_one_runs(service: TraceService) -> None:
    trace = step(service, "train_step.py", "build", world_size=16)
    graph = trace.graph
    gathers = np.flatnonzero(graph.collective == Collective.ALL_GATHER)
    kernels = np.flatnonzero(graph.op_class == OpClass.GEMM)
    waits = {int(graph.awaits[row]): int(row) for row in np.flatnonzero(graph.awaits >= 0)}
    beside = [((kernels > row) & (kernels < waits[int(row)])).sum() for row in gathers]
    assert sum(count > 0 for count in beside) >= 5
    simulator = default_simulator(tracer=HandmadeTracer())
    done = predict_trace(
        trace, cluster=load_cluster("a100-80gb-hdr"), stack=load_stack("torchtitan-fsdp2"), simulator=simulator
    )
    assert done.breakdown["data_s"] < 0.7 * done.busy_s["data"]


@pytest.mark.parametrize("rank", [4, 5, 7])
@pytest.mark.parametrize(
    ("function", "chunks"), [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble", 2), ("dual_pipe", 2)]
)
def test_every_schedule_computes_and_sends_what_its_stages_must(
    service: TraceService, function: str, chunks: int, rank: int
) -> None:
    graph = step(service, "pipeline_step.py", function, rank=rank).graph
    place, rows, hidden, batches = rank % 4, 1024, 512, 8
    product = 2.0 * rows * hidden * 4 * hidden
    held = {
        "interleaved": [place, place + 4], "zero_bubble": [place, 7 - place], "dual_pipe": [place, 7 - place],
    }.get(function, [place])  # fmt: skip
    inputs = 0 if 0 in held else 1  # the first stage needs no gradient of its input
    backward = 3 * len(held) + sum(1 if stage else 0 for stage in held)
    assert inputs >= 0
    assert graph.flop.sum() == pytest.approx(batches * product * (2 * len(held) + backward))
    last = 4 * chunks - 1
    local = 1 if function in ("zero_bubble", "dual_pipe") and 3 in held else 0  # both sides of the turn
    forwards = sum(stage < last for stage in held) - local
    backwards = sum(stage > 0 for stage in held) - local
    for kind, expected in (
        (Collective.SEND, (forwards, backwards)),
        (Collective.RECV, (sum(stage > 0 for stage in held) - local, sum(stage < last for stage in held) - local)),
    ):
        here = graph.collective == kind
        found = [graph.micro_batch[here & (graph.phase == phase)].tolist() for phase in (Phase.FORWARD, Phase.BACKWARD)]
        assert [sorted(numbers) for numbers in found] == [sorted([*range(batches)] * count) for count in expected]
    # Also gradients of weights that are made apart, and added up outside of autograd.
    passes = graph.phase[graph.flop > 0]
    assert (passes == Phase.FORWARD).sum() == batches * 2 * len(held)
    added = np.array(graph.strings)[graph.name] == "aten.add_"
    assert set(graph.phase[added].tolist()) <= {Phase.BACKWARD}
    assert set(graph.chunk[graph.flop > 0].tolist()) == set(range(chunks))


def test_context_parallelism_sends_keys_and_values_round_and_runs_attention_again(service: TraceService) -> None:
    graph = step(service, "long_sequence_step.py", "context", world_size=16).graph
    batch, length, hidden, ranks = 2, 2048, 512, 4
    tokens = batch * length // ranks
    products = 2.0 * tokens * 4 * hidden**2
    attention = 2.0 * batch * length**2 * hidden / ranks  # half of the square
    again = products + attention - 2.0 * tokens * hidden**2  # it stops before the last product, which saves nothing
    assert graph.flop[graph.phase == Phase.RECOMPUTE].sum() == pytest.approx(again, rel=1e-3)
    # Input gradients are not asked for: the first product has none.
    backward = 2 * products - 2.0 * tokens * 3 * hidden**2 + 2.5 * attention
    assert graph.flop.sum() == pytest.approx(products + attention + again + backward, rel=1e-3)
    sent = graph.is_collective & (graph.axis == Axis.CONTEXT)
    keys_and_values = 2.0 * 2 * tokens * hidden
    assert sent.sum() > 0
    assert set((graph.message_bytes[sent] % (keys_and_values / 2)).tolist()) == {0.0}


def test_sequence_parallelism_gathers_and_scatters(service: TraceService) -> None:
    graph = step(service, "long_sequence_step.py", "sequence", world_size=16).graph
    sizes = graph.message_bytes[graph.axis == Axis.TENSOR].tolist()
    kinds = graph.collective[graph.axis == Axis.TENSOR].tolist()
    states = 2.0 * 2 * 2048 * 512
    large = [kind for kind, size in zip(kinds, sizes, strict=True) if size > 1e5]
    assert large == [Collective.ALL_GATHER, Collective.REDUCE_SCATTER] * 2
    assert {size for size in sizes if size > 1e5} == {states}
