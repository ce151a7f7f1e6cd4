"""Find and load what a user names: a path, a file of theirs under ECHO_EXPLORE_HOME, or a shipped one."""

from pathlib import Path
from typing import Literal

from echo_explore.core import SpecError, check_name, nearest
from echo_explore.core.home import find_data_file, list_data_files
from echo_explore.specs.base import load_spec
from echo_explore.specs.cluster import ClusterSpec
from echo_explore.specs.huggingface import model_from_config
from echo_explore.specs.model import ModelSpec
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
        path = Path(name).expanduser()
        if not path.is_file():
            raise SpecError(singular, name, "does not exist or is not a file", f"give a path or a name of `{kind}`")
        return path
    check_name(name, field=singular)
    path_or_none = find_data_file(kind, name)
    if path_or_none is None:
        near = ", ".join(nearest(name, list_data_files(kind)))
        raise SpecError(singular, name, f"is not a known {singular}", f"did you mean {near}?")
    return path_or_none


def load_model(name: str) -> ModelSpec:
    """The model of that name, TOML file, or Hugging Face `config.json`."""
    path = locate("models", name)
    return model_from_config(path) if path.suffix == ".json" else load_spec(ModelSpec, path)


def load_cluster(name: str) -> ClusterSpec:
    """The cluster of that name or TOML file."""
    return load_spec(ClusterSpec, locate("clusters", name))


def load_stack(name: str) -> StackProfile:
    """The stack profile of that name or TOML file."""
    return load_spec(StackProfile, locate("stacks", name))


def load_space(name: str) -> SearchSpace:
    """The search space of that name or TOML file; its name defaults to the file's."""
    path = locate("spaces", name)
    space = load_spec(SearchSpace, path)
    return space if space.name else space.model_copy(update={"name": check_name(path.stem, field="space")})
