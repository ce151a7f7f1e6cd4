"""Echo Explore: predict how fast a model trains on a GPU cluster, and search for the fastest layout, without a GPU."""

from typing import TYPE_CHECKING, Any

from echo_explore.core.versions import MODEL_VERSION, PACKAGE_VERSION

if TYPE_CHECKING:
    from echo_explore.api import predict, predict_script, search
    from echo_explore.specs import load_cluster, load_model

__version__ = PACKAGE_VERSION

__all__ = ["MODEL_VERSION", "__version__", "load_cluster", "load_model", "predict", "predict_script", "search"]

_LAZY = {
    "predict": "echo_explore.api",
    "predict_script": "echo_explore.api",
    "search": "echo_explore.api",
    "load_cluster": "echo_explore.specs",
    "load_model": "echo_explore.specs",
}


def __getattr__(name: str) -> Any:
    """Load the public functions on first use, so that importing the package stays cheap."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
