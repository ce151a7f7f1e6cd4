"""Which functions of other libraries the tracer replaces or leans on, and as which source it knows them: upstream.toml.

A test compares the installed sources with its digests, so that an upgrade is noticed function by function; the
tracing process compares versions before it patches anything.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_explore.core import TraceError
from echo_explore.tracing.torchtitan_import import titan
from echo_explore.tracing.versions import framework_versions

DATA = Path(__file__).with_name("upstream.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched:
    """One function, class or operator of another library.

    Attributes:
        package: distribution that it belongs to.
        version: of the library (its beginning) whose source it is.
        target: `module:name`.
        digest: the first 16 hex digits of the SHA-256 of its source.
        where: the module of the tracer that was written for it.
    """

    package: str
    version: str
    target: str
    digest: str
    where: str


@functools.cache
def patched() -> tuple[Patched, ...]:
    """Everything that is listed, for every version."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return tuple(
        Patched(package=library, version=version, target=target, digest=digest, where=where)
        for library, versions in data.items()
        for version, modules in versions.items()
        for where, targets in modules.items()
        for target, digest in targets.items()
    )


def known_versions(library: str) -> tuple[str, ...]:
    """Versions of a library (their beginnings) that the patches were written for and tried with."""
    return tuple(dict.fromkeys(p.version for p in patched() if p.package == library))


def _known_as(library: str, version: str) -> str | None:
    return next((k for k in known_versions(library) if version == k or version.startswith(f"{k}.")), None)


def check_versions(versions: Mapping[str, str] | None = None) -> None:
    """Refuse versions that the patches were not written for.

    Args:
        versions: by library; None: those of the traced frameworks that are installed.

    Raises:
        TraceError: another version of a library.
    """
    for name, version in (versions or framework_versions()).items():
        if _known_as(name, version) is None:
            known = known_versions(name)
            newest = known[-1]
            wanted = newest if newest.count(".") == 2 else f"{newest}.*"
            raise TraceError(
                f"{name} = {version}: the tracer's patches know {', '.join(known)}; fix: pip install {name}=={wanted}"
            )


def check_version(library: str) -> None:
    """Refuse a version of an installed library that the patches were not written for.

    Raises:
        TraceError: another version of it.
    """
    check_versions({library: importlib.metadata.version(library).partition("+")[0]})


def of_installed(versions: Mapping[str, str]) -> tuple[Patched, ...]:
    """What is listed for these versions, by library."""
    found = {name: _known_as(name, version) for name, version in versions.items()}
    return tuple(p for p in patched() if found.get(p.package) == p.version)


def digest_of(target: str) -> str:
    """The digest of what is installed: of the source, of the schema of an operator, of the signature of a builtin.

    Raises:
        AttributeError: it is gone.
        ImportError: its module is gone.
    """
    module, _, path = target.partition(":")
    library, _, inside = module.partition(".")
    value = titan(inside) if library == "torchtitan" else importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    text = _schema(value)
    if text is None:
        try:
            text = inspect.getsource(value)
        except TypeError:  # written in C++
            text = _doc(value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _schema(value: Any) -> str | None:
    schema = getattr(value, "_schema", None)
    return None if schema is None else str(schema)


def _doc(value: Any) -> str:
    return value.__doc__ or ""


def moved(known: Patched) -> str | None:
    """What to do about a function that is not what it was; None if it is."""
    try:
        found = digest_of(known.target)
    except (ImportError, AttributeError) as error:
        found = f"gone: {error}"
    if found == known.digest:
        return None
    return (
        f"{known.target} of {known.package} is not what echo_explore/tracing/{known.where}.py was written for "
        f"(version {known.version}, digest {known.digest}; now {found}): read its source, adapt the patch, "
        f"then change the digest in {DATA.name}"
    )
