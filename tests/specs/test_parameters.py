"""Parameter counts against published ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs import ModelSpec, load_model
from echo_explore.specs.parameters import count_parameters

EXACT = {
    # total parameters in the safetensors index of the model on the Hugging Face hub, read 2023 to 2025
    "llama2-7b": 6_738_415_616,  # meta-llama/Llama-2-7b-hf (2023)
    "llama2-70b": 68_976_648_192,  # meta-llama/Llama-2-70b-hf (2023)
    "llama3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B (2024)
    "llama3-70b": 70_553_706_496,  # meta-llama/Meta-Llama-3-70B (2024)
    "llama3-405b": 405_853_388_800,  # meta-llama/Llama-3.1-405B (2024)
    "mixtral-8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1 (2023)
    "qwen3-30b-a3b": 30_532_122_624,  # Qwen/Qwen3-30B-A3B (2025)
    "qwen3-235b-a22b": 235_093_634_560,  # Qwen/Qwen3-235B-A22B (2025)
    "gpt-oss-120b": 116_829_156_672,  # ggml-org/gpt-oss-120b-GGUF (2025): general.parameter_count; 116.83 B in its card
    "gpt-oss-20b": 20_914_757_184,  # ggml-org/gpt-oss-20b-GGUF (2025): general.parameter_count; 20.91 B in its card
}
ROUNDED = {
    "gpt3-175b": (174.6e9, 1e-3),  # arXiv 2005.14165 (2020), table D.1: 174,600 million
    "gpt-22b": (22e9, 5e-3),  # arXiv 2205.05198 (2022), table 3
    "gpt-530b": (530e9, 1e-3),  # arXiv 2205.05198 (2022), table 3: 529.6 by its equation
    "gpt-1t": (1000e9, 1e-2),  # arXiv 2205.05198 (2022), table 3
    "mixtral-8x22b": (141e9, 5e-3),  # mistralai/Mixtral-8x22B-v0.3 model card (2024)
    "deepseek-v3": (671e9, 1e-3),  # arXiv 2412.19437 (2024), abstract
}
ACTIVE = {
    "mixtral-8x7b": (12.9e9, 5e-3),  # arXiv 2401.04088 (2024), section 2: 13B; 12.9B in Mistral's post (2023)
    "mixtral-8x22b": (39e9, 5e-3),  # mistralai/Mixtral-8x22B-v0.3 model card (2024)
    "deepseek-v3": (37e9, 2e-2),  # arXiv 2412.19437 (2024), abstract
    "qwen3-30b-a3b": (3.3e9, 2e-2),  # Qwen/Qwen3-30B-A3B model card (2025)
    "qwen3-235b-a22b": (22e9, 1e-2),  # Qwen/Qwen3-235B-A22B model card (2025)
    # arXiv 2508.10925 (2025), table 1: 5.13 B and 3.61 B without the input embedding of 201,088 x 2,880
    "gpt-oss-120b": (5.13e9 + 201088 * 2880, 1e-3),
    "gpt-oss-20b": (3.61e9 + 201088 * 2880, 1e-3),
}


@pytest.mark.parametrize("name", EXACT)
def test_total_equals_the_published_count(name: str) -> None:
    assert count_parameters(load_model(name)).total == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_total_is_near_the_published_figure(name: str) -> None:
    figure, tolerance = ROUNDED[name]
    assert count_parameters(load_model(name)).total == pytest.approx(figure, rel=tolerance)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_is_near_the_published_figure(name: str) -> None:
    figure, tolerance = ACTIVE[name]
    assert count_parameters(load_model(name)).active == pytest.approx(figure, rel=tolerance)


def test_prediction_layer_of_deepseek_v3() -> None:
    # arXiv 2412.19437 (2024): 14B in the repository hold the layer and copies of embedding and output layer
    model = load_model("deepseek-v3")
    copies = 2 * model.vocab_size * model.hidden_size
    assert count_parameters(model).prediction + copies == pytest.approx(14e9, rel=0.05)


def test_padded_vocabulary() -> None:
    model = load_model("gpt3-175b")
    padded = count_parameters(model, vocab_rows=model.padded_vocab_size(8))
    assert padded.total - count_parameters(model).total == (51200 - 50257) * 12288
    with pytest.raises(SpecError, match=r"vocab_rows = 50000: is below vocab_size = 50257; fix: "):
        count_parameters(model, vocab_rows=50000)


@given(layers=st.integers(1, 200), heads=st.integers(1, 64), width=st.integers(1, 128), vocab=st.integers(1, 10**6))
def test_dense_gpt_equals_the_closed_form(layers: int, heads: int, width: int, vocab: int) -> None:
    hidden = heads * width
    model = ModelSpec(
        name="gpt",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        vocab_size=vocab,
        max_sequence_length=1024,
    )
    # arXiv 2104.04473 (2021), equation 2: P = 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh); and the last norm
    expected = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + 1024) * hidden + 2 * hidden
    count = count_parameters(model)
    assert count.total == count.active == expected


@given(experts=st.integers(1, 64), data=st.data())
def test_active_never_exceeds_total(experts: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(1, experts))
    model = load_model("mixtral-8x7b")
    assert model.moe is not None
    moe = model.moe.model_copy(update={"num_experts": experts, "experts_per_token": used})
    count = count_parameters(model.model_copy(update={"moe": moe}))
    assert count.active <= count.total
    assert (count.active == count.total) == (used == experts)
