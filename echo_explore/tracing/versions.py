"""Versions of the traced frameworks, read from their metadata: nothing is imported."""

import importlib.metadata

from echo_explore.core import MissingExtra

FRAMEWORKS = ("torch", "megatron-core")


def framework_versions() -> dict[str, str]:
    """Version of each framework; a local part such as `+cpu` says how torch was built, not what it does.

    Raises:
        MissingExtra: one of them is not installed.
    """
    try:
        return {name: importlib.metadata.version(name).partition("+")[0] for name in FRAMEWORKS}
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("tracing a model", "trace") from None
