"""Models of the transformers package: the translated ModelSpec is the real model, and PyTorch sends what it must."""

from typing import Any

import numpy as np
import pytest

from echo_explore.core import SpecError, TraceError
from echo_explore.graph import Axis, Collective, OpClass, Phase, RankTrace
from echo_explore.specs.huggingface import model_from_dict
from echo_explore.specs.parameters import count_parameters
from echo_explore.tracing import TraceService
from echo_explore.tracing.transformers_request import TransformersJob, language_model

pytestmark = pytest.mark.torch
HIDDEN, LAYERS, HEADS, WORDS, LENGTH = 512, 2, 8, 1000, 256
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 4,
    "vocab_size": WORDS, "max_position_embeddings": 512, "intermediate_size": 1408, "hidden_act": "silu",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama", "tie_word_embeddings": False},
    "mixtral": BASE
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen3_moe": BASE
    | {
        "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192,
        "head_dim": 64, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 512,
        "vocab_size": WORDS, "activation_function": "gelu_new",
    },
    "bert": BASE | {"model_type": "bert", "hidden_act": "gelu"},
}  # fmt: skip


def step(
    service: TraceService, family: str, parallelism: str = "fsdp2", *, rank: int | None = None, **changes: Any
) -> RankTrace:
    values: dict[str, Any] = {
        "config": CONFIGS[family], "parallelism": parallelism, "tensor_parallel": 1, "world_size": 4,
        "num_micro_batches": 1, "micro_batch_size": 2, "sequence_length": LENGTH, "recompute": "none",
        "precision": "bf16",
    }  # fmt: skip
    job = TransformersJob(**values | changes)
    return service.transformers_step(job, rank=job.world_size - 1 if rank is None else rank)


def attention_flop(family: str) -> float:
    """Of forward and backward: 2 b h s^2 (2 d + 5 d), half under a causal mask."""
    full = 2.0 * 2 * LENGTH**2 * HIDDEN * 7 * LAYERS
    return full if family == "bert" else full / 2


def product_flop(family: str) -> float:
    """Three products of 2 FLOP a parameter that a token meets; lookups and norms meet none."""
    config = CONFIGS[family]
    head = HIDDEN * WORDS
    wide = {
        "llama": 3 * HIDDEN * 1408,
        "mixtral": 2 * 3 * HIDDEN * 1408 + 8 * HIDDEN,
        "qwen3_moe": 4 * 3 * HIDDEN * 192 + 16 * HIDDEN,
        "gpt2": 8 * HIDDEN**2,
        "bert": 2 * HIDDEN * 1408,
    }[family]
    keys = config.get("num_key_value_heads", HEADS) if family not in ("gpt2", "bert") else HEADS
    attention = 2 * HIDDEN**2 + 2 * HIDDEN * keys * 64
    extra = HIDDEN**2 if family == "bert" else 0  # the transform before the head
    return 6.0 * 2 * LENGTH * (LAYERS * (attention + wide) + head + extra)


@pytest.mark.parametrize("family", CONFIGS)
def test_executed_flop_are_the_closed_form(service: TraceService, family: str) -> None:
    graph = step(service, family).graph
    assert graph.flop.sum() == pytest.approx(product_flop(family) + attention_flop(family), rel=1e-3)
    assert (graph.op_class == OpClass.ATTENTION).sum() == 2 * LAYERS
    grouped = {"mixtral": 6 * LAYERS, "qwen3_moe": 6 * LAYERS}.get(family, 0)
    assert (graph.op_class == OpClass.GROUPED_GEMM).sum() == grouped


WINDOWED = {
    "model_type": "", "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1000, "num_key_value_heads": 2,
    "sliding_window": 64, "max_position_embeddings": 256,
}  # fmt: skip
GPT_OSS = WINDOWED | {
    "model_type": "gpt_oss", "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
GEMMA3 = WINDOWED | {
    "model_type": "gemma3_text", "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "matrices", "attention_products"),
    [
        # Queries, keys, values, output, two of four experts, router; sinks: two products forward and four backward.
        (GPT_OSS, 2 * 256 * 256 + 2 * 256 * 64 + 2 * (256 * 512 + 256 * 256) + 256 * 4, 6),
        # A window is a mask: the memory-efficient kernel, which recomputes the scores in its backward.
        (GEMMA3, 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512, 7),
    ],
    ids=["gpt_oss", "gemma3_text"],
)
def test_models_with_windows_and_sinks_execute_the_closed_form(
    service: TraceService, config: dict[str, Any], matrices: int, attention_products: int
) -> None:
    tokens, width = 2 * 128, config["num_attention_heads"] * config["head_dim"]
    changes: dict[str, Any] = {"config": config, "sequence_length": 128}
    graph = step(service, "llama", **changes).graph
    products = 6.0 * tokens * (2 * matrices + 256 * 1000)
    attention = 2 * attention_products * 2.0 * tokens * 128 * width
    assert graph.flop.sum() == pytest.approx(products + attention, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gpt2"])
def test_the_translated_model_has_the_parameters_of_the_real_one(service: TraceService, family: str) -> None:
    graph = step(service, family, world_size=1).graph
    updated = graph.dims[graph.op_class == OpClass.OPTIMIZER, 0].sum()
    translated = count_parameters(model_from_dict(CONFIGS[family], name=family)).total
    assert updated == translated


def test_fsdp2_gathers_and_reduces_in_closed_form(service: TraceService) -> None:
    trace = step(service, "llama", num_micro_batches=2, recompute="full")
    graph = trace.graph
    # A micro-batch: root and layers are gathered forward, layers again backward; root and layers are reduced.
    assert (graph.collective == Collective.ALL_GATHER).sum() == 2 * (1 + 2 * LAYERS)
    assert (graph.collective == Collective.REDUCE_SCATTER).sum() == 2 * (1 + LAYERS)
    parameters = count_parameters(model_from_dict(CONFIGS["llama"], name="llama")).total
    reduced = graph.message_bytes[graph.collective == Collective.REDUCE_SCATTER].sum()
    assert reduced == pytest.approx(2 * 4 * parameters, rel=1e-2)  # padded to the ranks
    assert (graph.phase == Phase.RECOMPUTE).sum() > 0


def test_ddp_reduces_once_a_step(service: TraceService) -> None:
    one, two = (step(service, "gpt2", "ddp", num_micro_batches=n).graph for n in (1, 2))
    for graph in (one, two):
        reduced = graph.message_bytes[graph.collective == Collective.ALL_REDUCE].sum()
        assert reduced == 4 * count_parameters(model_from_dict(CONFIGS["gpt2"], name="gpt2")).total


NORMS = {"llama": 2 * LAYERS + 1, "mixtral": 2 * LAYERS + 1, "qwen3_moe": 2 * LAYERS + 1}
ROUTED = {"mixtral": (8, 2, 3 * HIDDEN * 1408), "qwen3_moe": (16, 4, 3 * HIDDEN * 192)}
"""Experts of a layer, those that a token visits, and the parameters of one."""
# Calls of matrices in columns in a layer, whose input gradients are summed apart; experts take their input once.
COLUMNS = {"llama": 5, "mixtral": 3, "qwen3_moe": 3, "gpt2": 2, "bert": 4}


def whole_on_every_rank(family: str) -> int:
    """Parameters that tensor parallelism does not split: norms, positions, biases behind a sum, routers, transforms."""
    if family == "gpt2":  # norms with a bias; two biases of rows a layer
        return 2 * HIDDEN * (2 * LAYERS + 1) + 512 * HIDDEN + 2 * HIDDEN * LAYERS
    if family == "bert":  # also the types of tokens, and the transform and the norm before the head
        norms, places = 2 * HIDDEN * (2 * LAYERS + 2), (512 + 2) * HIDDEN
        return norms + places + 2 * HIDDEN * LAYERS + HIDDEN**2 + HIDDEN
    norms, router = (2 * LAYERS + 1) * HIDDEN, ROUTED[family][0] * HIDDEN * LAYERS if family in ROUTED else 0
    return norms + router + (2 * LAYERS * 64 if family == "qwen3_moe" else 0)


def all_parameters(family: str) -> int:
    if family != "bert":
        return count_parameters(model_from_dict(CONFIGS[family], name=family)).total
    layer = 4 * (HIDDEN**2 + HIDDEN) + 2 * HIDDEN * 1408 + 1408 + HIDDEN + 4 * HIDDEN
    return LAYERS * layer + (WORDS + 512 + 2) * HIDDEN + 2 * HIDDEN + HIDDEN**2 + 3 * HIDDEN + WORDS


SPLITS = [
    ("llama", 2, 1), ("mixtral", 2, 1), ("qwen3_moe", 2, 1), ("gpt2", 2, 1), ("bert", 2, 1), ("llama", 4, 1),
    ("mixtral", 1, 2), ("mixtral", 2, 2), ("qwen3_moe", 2, 4),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tensor", "experts"), SPLITS, ids=[f"{f}-tp{t}-ep{e}" for f, t, e in SPLITS])
def test_split_models_have_the_closed_form(service: TraceService, family: str, tensor: int, experts: int) -> None:
    """On 4 GPUs: FLOP, parameters and every collective of a micro-batch."""
    trace = step(service, family, tensor_parallel=tensor, expert_parallel=experts)
    graph, tokens = trace.graph, 2 * LENGTH
    # FLOP: everything is split but routers and BERT's transform before the head; choices are shared out evenly.
    head = {"bert": HIDDEN**2}.get(family, 0)
    alone = 6.0 * tokens * (LAYERS * ROUTED[family][0] * HIDDEN if family in ROUTED else head)
    whole = product_flop(family) + attention_flop(family)
    assert graph.flop.sum() == pytest.approx((whole - alone) / tensor + alone, rel=1e-3)
    # Parameters that this rank updates: the rest is sharded over the ranks of the same part.
    routed = LAYERS * ROUTED[family][0] * ROUTED[family][2] if experts > 1 else 0
    same = whole_on_every_rank(family)
    split = all_parameters(family) - same - routed
    updated = graph.dims[graph.op_class == OpClass.OPTIMIZER, 0].sum()
    assert updated == split / 4 + same * tensor / 4 + routed / 4

    def sent(kind: Collective, axis: Axis, phase: Phase) -> list[float]:
        rows = (graph.collective == kind) & (graph.axis == axis) & (graph.phase == phase) & (graph.message_bytes > 1e3)
        return sorted(graph.message_bytes[rows].tolist())

    states, logits, pairs = 2.0 * tokens * HIDDEN, 2.0 * tokens * WORDS, ROUTED.get(family, (0, 0))[1]
    if tensor > 1:
        dispatched = LAYERS if experts > 1 else 0
        summed = [states] * (1 + 2 * LAYERS - dispatched)
        assert sent(Collective.ALL_REDUCE, Axis.TENSOR, Phase.FORWARD) == summed
        gathered = sorted([states] * dispatched + [logits])
        assert sent(Collective.ALL_GATHER, Axis.TENSOR, Phase.FORWARD) == gathered
        choices = (2.0 if family == "qwen3_moe" else 4.0) * tokens * pairs  # weights; Mixtral's stay in fp32
        weights = [choices] * LAYERS if family in ROUTED and experts == 1 else []
        columns = COLUMNS[family] * LAYERS + 1 + (LAYERS if weights else 0)
        assert sent(Collective.ALL_REDUCE, Axis.TENSOR, Phase.BACKWARD) == sorted(weights + [states] * columns)
    if experts > 1:
        carried = [2.0 * tokens // tensor * pairs * HIDDEN] * 2 * LAYERS
        assert sent(Collective.ALL_TO_ALL, Axis.EXPERT, Phase.FORWARD) == carried
        assert sent(Collective.ALL_TO_ALL, Axis.EXPERT, Phase.BACKWARD) == carried
        counted = (graph.collective == Collective.ALL_TO_ALL) & (graph.message_bytes == 8 * ROUTED[family][0])
        assert counted.sum() == LAYERS
        waits = [o for o in trace.oracles if "expert_parallel" in o["source"]]
        assert [o["assumed"] for o in waits] == [tokens * pairs // tensor // experts] * LAYERS
    rows = np.flatnonzero(graph.is_collective)
    groups = {(int(graph.axis[row]), trace.groups[trace.group_of_row[row]]) for row in rows}
    dense = {(2, 3) if tensor == 2 else (0, 1, 2, 3)}
    assert {g for axis, g in groups if axis == Axis.TENSOR} == (dense if tensor > 1 else set())
    assert {g for axis, g in groups if axis == Axis.EXPERT} <= {(2, 3), (0, 1, 2, 3)}
    reduced = graph.message_bytes[graph.collective == Collective.REDUCE_SCATTER].sum() / 4
    copies = tensor < 4 and (experts < 4) * routed / experts
    dense_bytes = (split / tensor + same) if tensor < 4 else 0
    assert reduced == pytest.approx(dense_bytes + copies, rel=1e-2)  # padded to the ranks


def test_a_vocabulary_that_does_not_divide_is_split_unevenly(service: TraceService) -> None:
    changes: dict[str, Any] = {"config": CONFIGS["gpt2"] | {"vocab_size": WORDS + 1}, "tensor_parallel": 2}
    first, second = (step(service, "gpt2", rank=rank, **changes).graph.flop.sum() for rank in (2, 3))
    assert first - second == pytest.approx(6.0 * 2 * LENGTH * HIDDEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 3}, "layout.tp = 3: must divide the 4 GPUs"),
        ({"tensor_parallel": 2, "parallelism": "ddp"}, "is not combined with ddp"),
        ({"expert_parallel": 2, "parallelism": "ddp"}, "layout.ep = 2: is not combined with ddp"),
        ({"expert_parallel": 2, "tensor_parallel": 4}, "layout.ep = 2: must be a multiple of tp = 4"),
        ({"expert_parallel": 3}, "layout.ep = 3: must divide the 4 GPUs"),
        ({"expert_parallel": 4, "config": CONFIGS["mixtral"] | {"num_local_experts": 6}}, "divide the 6 experts"),
        (
            {
                "expert_parallel": 4,
                "config": CONFIGS["mixtral"] | {"num_experts_per_tok": 1},
                "micro_batch_size": 1,
                "sequence_length": 6,
            },
            "must divide the 6 choices",
        ),
        ({"recompute": "selective"}, "recompute = 'selective'"),
        ({"precision": "fp8"}, "precision = 'fp8'"),
        ({"config": {}}, "model_type"),
        ({"config": CONFIGS["llama"] | {"num_hidden_layers": 0}}, "config: num_hidden_layers = 0: must be a whole"),
        ({"config": CONFIGS["llama"] | {"num_hidden_layers": "2"}}, "config: num_hidden_layers = '2': must be a whole"),
        ({"config": CONFIGS["llama"] | {"num_attention_heads": 8, "num_key_value_heads": 3}}, "must divide num_att"),
        ({"config": CONFIGS["llama"] | {"rms_norm_eps": float("nan")}}, "config = 'NaN or Infinity'"),
    ],
)
def test_what_cannot_be_run_is_refused(service: TraceService, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        step(service, "llama", **changes)


def test_a_heading_of_the_framework_comes_with_what_it_heads(service: TraceService) -> None:
    with pytest.raises(TraceError, match=r"Validation error for field .rope_parameters.: .+"):
        step(service, "llama", config=CONFIGS["llama"] | {"rope_scaling": "yes"})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"tensor_parallel": 2, "config": CONFIGS["bert"] | {"model_type": "roberta"}}, "has no `tp_plan`"),
        ("llama", {"expert_parallel": 2}, "layout.ep: transformers refuses it for llama: .* has no `ep_plan`"),
        (
            "llama",
            {"tensor_parallel": 4, "config": BASE | {"model_type": "llama", "num_key_value_heads": 2}},
            "layout.tp = 4: must divide num_key_value_heads = 2",
        ),
        (
            "gpt2",
            {"tensor_parallel": 4, "config": CONFIGS["gpt2"] | {"n_head": 2}},
            "layout.tp = 4: must divide num_attention_heads = 2",
        ),
        ("mixtral", {"parallelism": "ddp"}, "use transformers-fsdp2"),
        ("llama", {"config": {"model_type": "no-such-family"}}, "transformers does not know it"),
    ],
)
def test_what_transformers_cannot_do_is_said(
    service: TraceService, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        step(service, family, **changes)


def test_the_language_model_of_a_config_with_several_is_its_text_config(service: TraceService) -> None:
    whole = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {"hidden_size": 64}}
    assert language_model(whole) == GEMMA3
    assert language_model(GEMMA3) == GEMMA3
    with pytest.raises(SpecError, match=r"^config: model_type = 'gemma3': describes text and other inputs"):
        step(service, "llama", config=whole)
    with pytest.raises(SpecError, match=r"^config: text_config.model_type"):
        language_model({"model_type": "gemma3", "text_config": {"hidden_size": 64}})


def test_a_value_that_only_a_gpu_knows_names_its_line_while_the_model_is_made(service: TraceService) -> None:
    """A padding index beside the vocabulary is read from the GPU when transformers fills the table."""
    with pytest.raises(TraceError, match=r" at transformers/initialization\.py:\d+ = \(unknown\).*trace --script"):
        step(
            service,
            "llama",
            config={
                "model_type": "gemma3",
                "vision_config": {
                    "hidden_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 4,
                    "intermediate_size": 128,
                    "image_size": 56,
                    "patch_size": 14,
                },
            },
        )
