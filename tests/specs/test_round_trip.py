"""What is written is what is read: TOML files, templates, layouts, hashes."""

from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core.home import list_data_files
from echo_explore.core.units import UNITS, parse_quantity
from echo_explore.specs import ModelSpec, ParallelConfig, load_cluster, load_model, load_space, load_stack, parse_layout
from echo_explore.specs.base import validate
from echo_explore.specs.template import template


@given(
    layers=st.integers(1, 200),
    heads=st.sampled_from([1, 8, 12, 64]),
    width=st.integers(1, 256),
    vocab=st.integers(1, 300_000),
    groups=st.sampled_from([1, 2, 4]),
    gated=st.booleans(),
    tied=st.booleans(),
)
def test_model_to_toml_and_back(
    tmp_path_factory: pytest.TempPathFactory,
    layers: int,
    heads: int,
    width: int,
    vocab: int,
    groups: int,
    gated: bool,
    tied: bool,
) -> None:
    model = ModelSpec(
        name="m",
        num_layers=layers,
        hidden_size=heads * width,
        ffn_hidden_size=4 * heads * width,
        num_attention_heads=heads,
        num_key_value_heads=groups if heads % groups == 0 else heads,
        vocab_size=vocab,
        max_sequence_length=2048,
        activation="swiglu" if gated else "gelu",
        tied_embeddings=tied,
    )
    path = tmp_path_factory.mktemp("model") / "m.toml"
    path.write_text(tomli_w.dumps(model.model_dump(mode="json", by_alias=True, exclude_none=True)), encoding="utf-8")
    assert load_model(str(path)) == model


@pytest.mark.parametrize("name", list_data_files("models"))
def test_shipped_models_survive_their_own_dump(name: str) -> None:
    model = load_model(name)
    assert validate(ModelSpec, model.model_dump(mode="json")) == model


@given(
    degrees=st.fixed_dictionaries({k: st.integers(1, 64) for k in ("tp", "pp", "vpp", "dp", "cp", "ep")}),
    sp=st.booleans(),
)
def test_layout_text_and_back(degrees: dict[str, int], sp: bool) -> None:
    degrees = degrees | ({"vpp": 1} if degrees["pp"] == 1 else {})
    layout = parse_layout(",".join(f"{k}={v}" for k, v in degrees.items()) + f",sp={int(sp)}")
    assert layout == ParallelConfig(
        tensor_parallel=degrees["tp"],
        pipeline_parallel=degrees["pp"],
        virtual_pipeline=degrees["vpp"],
        data_parallel=degrees["dp"],
        context_parallel=degrees["cp"],
        expert_parallel=degrees["ep"],
        sequence_parallel=sp and degrees["tp"] > 1,
    )
    assert layout.num_gpus == degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["dp"]


@given(number=st.just(0.0) | st.floats(1e-5, 1e12), data=st.data())
def test_quantities_scale_with_their_unit(number: float, data: st.DataObject) -> None:
    dimension = data.draw(st.sampled_from(sorted(UNITS)))
    spelled, factor = data.draw(st.sampled_from(sorted(UNITS[dimension].items())))
    assert parse_quantity(f"{number!r} {spelled}", unit=dimension, field="x") == pytest.approx(number * factor)


@pytest.mark.parametrize(
    ("kind", "load"),
    [("clusters", load_cluster), ("models", load_model), ("spaces", load_space), ("stacks", load_stack)],
)
def test_templates_load_as_they_stand(tmp_path: Path, kind: str, load: object) -> None:
    path = tmp_path / "new.toml"
    path.write_text(template(kind), encoding="utf-8")  # type: ignore[arg-type]
    assert callable(load)
    load(str(path))


def test_space_template_names_what_is_shipped(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    path.write_text(template("spaces"), encoding="utf-8")
    space = load_space(str(path))
    load_model(space.model)
    load_cluster(space.cluster)


def test_cluster_template_says_what_every_line_is(tmp_path: Path) -> None:
    lines = template("clusters").splitlines()
    silent = [line for line in lines if " = " in line and "#" not in line]
    assert [line.split(" ")[0] for line in silent] == ["schema", "name", "description", "name", "calibration"]
