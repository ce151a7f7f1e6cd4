"""Every field of megatron-core's configurations has been decided about, and is answered by name where it is given."""

import ast
import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from echo_explore.core import SpecError
from echo_explore.specs import ModelSpec, ParallelConfig, StackProfile, TrainingRecipe
from echo_explore.specs import megatron_flags as table
from echo_explore.specs.base import StrictModel, validate
from echo_explore.specs.megatron_flags import megatron_flags

CONFIGURATIONS = {
    "model_parallel_config.py": ["ModelParallelConfig"],
    "transformer/transformer_config.py": ["TransformerConfig", "MLATransformerConfig"],
    "distributed/distributed_data_parallel_config.py": ["DistributedDataParallelConfig"],
    "optimizer/optimizer_config.py": ["OptimizerConfig"],
}
OURS: dict[str, type[StrictModel]] = {
    "layout": ParallelConfig,
    "recipe": TrainingRecipe,
    "stack": StackProfile,
    "model": ModelSpec,
}
TABLE = Path(table.__file__).with_suffix(".toml")
TRACING = TABLE.parents[1] / "tracing"


def fields_of(path: Path, classes: list[str]) -> set[str]:
    """Annotated names in the bodies of dataclasses; read, not imported, for megatron-core imports torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    assert sorted(node.name for node in found) == sorted(classes), f"{path}: a configuration was renamed"
    return {
        line.target.id
        for node in found
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def upstream() -> dict[str, str]:
    """Name of every field of the installed megatron-core, and the class file that has it."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    core = next(p for p in (Path(place, "core") for place in spec.submodule_search_locations) if p.is_dir())
    return {name: file for file, classes in CONFIGURATIONS.items() for name in fields_of(core / file, classes)}


def undecided(fields: dict[str, str]) -> str:
    """What to do about fields that the table has not, or has and should not; empty: nothing."""
    new = sorted(f"{name} ({file})" for name, file in fields.items() if name not in megatron_flags())
    gone = sorted(name for name in megatron_flags() if name not in fields)
    return "; ".join(
        f"{what}: {', '.join(names)}: decide in specs/megatron_flags.toml"
        for what, names in (("fields that megatron-core has and the table has not", new), ("fields gone", gone))
        if names
    )


def test_every_field_of_megatron_core_has_been_decided_about() -> None:
    assert undecided(upstream()) == ""


def test_a_new_field_fails_with_its_name() -> None:
    fields = {name: "f.py" for name in megatron_flags()} | {"fold_space": "transformer/transformer_config.py"}
    fields.pop("hidden_size")
    assert re.search(r"has not: fold_space \(transformer/transformer_config.py\): decide in", undecided(fields))
    assert undecided(fields).endswith("fields gone: hidden_size: decide in specs/megatron_flags.toml")


def test_each_field_stands_once_and_the_version_is_the_one_that_is_traced() -> None:
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    patched = tomllib.loads((TRACING / "upstream.toml").read_text(encoding="utf-8"))
    assert [tables.pop("version")] == list(patched["megatron-core"])
    assert max(Counter(name for part in tables.values() for name in part).values()) == 1
    assert set(tables) == set(table.STANDINGS)


def test_a_field_of_ours_is_one() -> None:
    for flag in megatron_flags().values():
        if flag.standing == "ours":
            kind, _, name = flag.note.partition(".")
            assert name in OURS[kind].model_fields, flag


def test_what_a_trace_sets_is_ours_or_fixed() -> None:
    """A setting of `config_of` is not among the flags that are refused or have no part in time."""
    source = (TRACING / "megatron_config.py").read_text(encoding="utf-8")
    settings = {name for name in re.findall(r'^ +"(\w+)":', source, re.M) if name in megatron_flags()}
    assert len(settings) > 40
    no_part = {name for name in settings if megatron_flags()[name].standing not in ("ours", "fixed")}
    assert no_part <= {"init_method", "output_layer_init_method", "embedding_init_method"}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optimizer_cpu_offload", "is a flag of megatron-core that is not modelled (optimizer states in the memory"),
        ("tp_comm_overlap", "is megatron-core's name; fix: use recipe.overlap_tensor"),
        ("adam_eps", "is a flag of megatron-core without a part in time or memory (is a summand); fix: leave it out"),
        ("clip_grad", "is a flag of megatron-core that cannot be chosen here (1.0, as Megatron-LM's default"),
    ],
)
def test_a_flag_is_answered_by_name(key: str, message: str) -> None:
    recipe = {"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": 1, key: 1}
    with pytest.raises(SpecError, match=rf"^recipe\.{key} = 1: {re.escape(message)}"):
        validate(TrainingRecipe, recipe, where="recipe.")
