"""Which layers each chunk holds."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs import ModelSpec, ParallelConfig, layers_of_chunks, load_model


def model(layers: int, *, vocab: int = 32000) -> ModelSpec:
    return load_model("llama2-7b").model_copy(update={"num_layers": layers, "vocab_size": vocab})


def split(layers: int, pp: int, vpp: int, rule: str) -> tuple[int, ...]:
    return layers_of_chunks(model(layers), ParallelConfig(pipeline_parallel=pp, virtual_pipeline=vpp), rule)


def test_equal_where_the_layers_divide() -> None:
    for rule in ("none", "balanced", "balanced-or-last", "first-last-light", "remainder-first"):
        assert split(96, 12, 2, rule) == (4,) * 24


def test_the_last_chunk_holds_what_is_left_beside_loss_and_prediction() -> None:
    """DeepSeek-V3's 61 layers and Llama 3.1's 126 in recipes of Megatron-Bridge (2025)."""
    assert split(61, 4, 1, "balanced-or-last") == (16, 16, 16, 13)
    assert split(61, 8, 1, "balanced-or-last") == (*([8] * 7), 5)
    assert split(61, 4, 4, "balanced-or-last") == (*([4] * 15), 1)
    assert split(126, 8, 4, "balanced-or-last") == split(126, 8, 4, "balanced")


def test_balanced_counts_embedding_and_loss() -> None:
    # Llama 3.1 405B over 8 stages of 4 chunks: arXiv 2407.21783 (2024), section 3.3.2: one layer less at both ends
    assert split(126, 8, 4, "balanced") == (3, *([4] * 30), 3)
    assert split(70, 12, 1, "balanced") == (5, *([6] * 10), 5)  # BLOOM (2022): 72 = 70 + 2 over 12 stages
    assert split(126, 16, 8, "balanced") == (0, *([1] * 126), 0)


def test_other_rules() -> None:
    assert split(10, 4, 1, "remainder-first") == (3, 3, 2, 2)
    assert split(10, 4, 1, "first-last-light") == (2, 3, 3, 2)


def test_no_rule() -> None:
    with pytest.raises(SpecError) as error:
        split(10, 4, 1, "none")
    assert str(error.value) == (
        "num_layers = 10: is not divisible by pp*vpp = 4 and the stack has no rule for it; "
        "fix: choose a pp*vpp that divides 10, or give --layer-split"
    )


def test_by_compute_weighs_the_output_layer() -> None:
    # 16 layers of 4 h^2 + 3 h f = 67.1M and an output layer of 268.4M: 20 layers in all, 10 a stage, the 11th stays
    small = ModelSpec(
        name="small",
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        vocab_size=131072,
        max_sequence_length=4096,
        activation="swiglu",
    )
    assert layers_of_chunks(small, ParallelConfig(pipeline_parallel=2), "by-compute") == (11, 5)


def test_by_modules_embedding_norm_and_output_layer_count_one_each() -> None:
    """40 layers over 4 stages: 43 modules are 11, 11, 11 and 10 (Aleph Alpha scaling, 2024, pipe_partition_uniform)."""
    layout = ParallelConfig(pipeline_parallel=4)
    assert layers_of_chunks(model(40), layout, "modules") == (10, 11, 11, 8)
    assert layers_of_chunks(model(40), ParallelConfig(pipeline_parallel=1), "modules") == (40,)
    with pytest.raises(SpecError, match="less than two modules for each of 4 chunks"):
        layers_of_chunks(model(2), layout, "modules")


def test_an_explicit_split_wins_and_must_add_up() -> None:
    layout = ParallelConfig(pipeline_parallel=3, layer_split=(1, 2, 3))
    assert layers_of_chunks(model(6), layout, "none") == (1, 2, 3)
    with pytest.raises(
        SpecError, match=r"layer_split = '\[1, 2, 3\]': sums to 6, not num_layers = 7; fix: correct the list"
    ):
        layers_of_chunks(model(7), layout, "none")


@given(
    layers=st.integers(1, 128),
    pp=st.integers(2, 64),
    vpp=st.integers(1, 4),
    rule=st.sampled_from(["balanced", "balanced-or-last", "first-last-light", "remainder-first", "by-compute"]),
    vocab=st.integers(1, 300_000),
)
def test_every_layer_lies_in_one_chunk(layers: int, pp: int, vpp: int, rule: str, vocab: int) -> None:
    assume(rule != "by-compute" or layers >= 8 * pp * vpp)  # by compute, a large vocabulary can leave a chunk empty
    assume(rule == "by-compute" or layers >= pp * vpp)
    assume(rule != "by-compute" or vocab <= 1000)
    layout = ParallelConfig(pipeline_parallel=pp, virtual_pipeline=vpp)
    chunks = layers_of_chunks(model(layers, vocab=vocab), layout, rule)
    assert sum(chunks) == layers
    assert len(chunks) == pp * vpp
    assert min(chunks[1:-1], default=1) >= 1
    if rule != "by-compute":
        assert max(chunks) <= -(-layers // (pp * vpp)) + 1


def test_by_compute_a_large_output_layer_leaves_the_chunk_before_it_empty() -> None:
    model = ModelSpec.model_validate(
        {
            "name": "small", "architecture": "llama", "num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192,
            "num_attention_heads": 32, "vocab_size": 131072, "max_sequence_length": 4096, "activation": "swiglu",
        }
    )  # fmt: skip
    layout = ParallelConfig(pipeline_parallel=8)
    # 16 layers and an output layer of four: 2.5 a chunk (nanotron 0.4, 2024, models/base.py, build_model).
    assert layers_of_chunks(model, layout, "by-compute") == (3, 3, 2, 3, 2, 3, 0, 0)
    with pytest.raises(SpecError, match="would hold nothing"):
        layers_of_chunks(model, layout.model_copy(update={"layer_split": (3, 3, 2, 3, 2, 3, 0, 0)}), "none")
