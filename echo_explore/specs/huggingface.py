"""A model from a Hugging Face `config.json` (file only, no hub access)."""

from pathlib import Path

from echo_explore.core import SpecError
from echo_explore.specs.model import ModelSpec


def model_from_config(path: Path) -> ModelSpec:
    """The model that a `config.json` describes."""
    raise SpecError("model", str(path), "config.json is not read yet", "give a TOML file")
