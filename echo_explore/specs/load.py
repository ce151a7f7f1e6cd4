"""Find and load what a user names: a path, a file of theirs under ECHO_EXPLORE_HOME, or a shipped one."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from echo_explore.core import SpecError, check_name, nearest
from echo_explore.core.home import find_data_file, list_data_files
from echo_explore.specs.base import load_spec, validate
from echo_explore.specs.cluster import ClusterSpec
from echo_explore.specs.huggingface import model_from_config
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.overrides import Override, overridden
from echo_explore.specs.recipe import StackProfile
from echo_explore.specs.space import SearchSpace

Kind = Literal["clusters", "models", "spaces", "stacks"]


def locate(kind: Kind, name: str) -> Path:
    """The file that `name` means: a path if it looks like one, else the user's file of that name, else the shipped one.

    Raises:
        SpecError: no such file; names the three nearest.
    """
    singular = kind.removesuffix("s")
    if "/" in name or name.endswith((".toml", ".json")):
        path = Path(os.path.expanduser(name))
        if not path.is_file():
            raise SpecError(singular, name, "does not exist or is not a file", f"give a path or a name of `{kind}`")
        return path
    check_name(name, field=singular)
    path_or_none = find_data_file(kind, name)
    if path_or_none is None:
        near = ", ".join(nearest(name, list_data_files(kind)))
        raise SpecError(singular, name, f"is not a known {singular}", f"did you mean {near}?")
    return path_or_none


def load_model(name: str, overrides: Sequence[Override] = ()) -> ModelSpec:
    """The model of that name, TOML file, or Hugging Face `config.json`, with the overrides under `model`."""
    path = locate("models", name)
    if path.suffix == ".json":
        model = model_from_config(path)
        data = model.model_dump(by_alias=True, exclude_none=True)
        return validate(ModelSpec, overridden(data, overrides, "model"), where=f"{path.name}: ") if overrides else model
    return load_spec(ModelSpec, path, lambda data: overridden(data, overrides, "model"))


def load_cluster(name: str, overrides: Sequence[Override] = ()) -> ClusterSpec:
    """The cluster of that name or TOML file, with the overrides under `cluster`."""
    return load_spec(ClusterSpec, locate("clusters", name), lambda data: overridden(data, overrides, "cluster"))


def load_stack(name: str, overrides: Sequence[Override] = ()) -> StackProfile:
    """The stack profile of that name or TOML file, with the overrides under `stack`."""
    return load_spec(StackProfile, locate("stacks", name), lambda data: overridden(data, overrides, "stack"))


def load_space(name: str) -> SearchSpace:
    """The search space of that name or TOML file; its name defaults to the file's."""
    path = locate("spaces", name)
    space = load_spec(SearchSpace, path)
    return space if space.name else space.model_copy(update={"name": check_name(path.stem, field="space")})
