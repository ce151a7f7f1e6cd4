"""Echo Explore: predict how fast a model trains on a GPU cluster, and search for the fastest layout, without a GPU."""

from echo_explore.core.versions import MODEL_VERSION, PACKAGE_VERSION

__version__ = PACKAGE_VERSION

__all__ = ["MODEL_VERSION", "__version__"]
