"""What each layer of a model is: mixtures and windows, and that a changed copy of a model has kinds of its own."""

from echo_explore.specs import load_model


def test_mixtures_and_windows() -> None:
    model = load_model("mixtral-8x7b")
    assert model.moe is not None
    dense_first = model.moe.model_copy(update={"first_dense_layers": 1, "layer_frequency": 2})
    mixed = model.model_copy(update={"num_layers": 6, "moe": dense_first})
    assert mixed.layer_kinds == ("dense", "moe", "dense", "moe", "dense", "moe")
    windowed = mixed.model_copy(update={"attention_window": 128, "full_attention_every": 3})
    assert windowed.layer_kinds == ("dense-window", "moe-window", "dense", "moe-window", "dense-window", "moe")
    assert windowed.model_copy(update={"moe": None}).feed_forward_kinds == ("dense",) * 6
    everywhere = mixed.model_copy(update={"attention_window": 128, "full_attention_every": 0})
    assert all(kind.endswith("-window") for kind in everywhere.layer_kinds)
    assert mixed.model_copy(update={"num_layers": 2}).layer_kinds == ("dense", "moe")
