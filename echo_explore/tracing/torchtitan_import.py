"""Imports torchtitan 0.2.2 into a tracing process: its Llama 3, its parallelize function and their configuration.

The package's own imports reach data loading (datasets, pandas), logging (tensorboard) and Triton kernels of experts;
none runs in a step of Llama 3, and there is no Triton without a GPU. Empty modules stand for these files.
"""

import importlib
import importlib.metadata
import logging
import sys
import types
from typing import Any

from echo_explore.core import MissingExtra, TraceError

VERSION = "0.2.2"
"""The version that was tried, 2026-12-01; 0.3.0 has no `scaled_dot_product_attention` and another configuration."""
_UNUSED = {
    "torchtitan.models.moe.kernels": ("generate_permute_indices",),
    "torchtitan.components.validate": ("build_validator", "BaseValidator", "Validator"),
    "torchtitan.components.metrics": ("build_metrics_processor", "MetricsProcessor"),
    "torchtitan.hf_datasets.text_datasets": ("build_text_dataloader",),
}


def titan(name: str) -> Any:
    """The module `torchtitan.{name}`.

    Raises:
        MissingExtra: torchtitan is not installed.
        TraceError: another version.
    """
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("a model of torchtitan", "trace") from None
    if version != VERSION:
        raise TraceError(f"torchtitan = {version}: the tracer knows {VERSION}; fix: pip install torchtitan=={VERSION}")
    for path, members in _UNUSED.items():
        if path not in sys.modules:
            module = types.ModuleType(path)
            module.__dict__.update(dict.fromkeys(members))
            sys.modules[path] = module
    logging.getLogger("torchtitan").setLevel(logging.WARNING)
    return importlib.import_module(f"torchtitan.{name}")
