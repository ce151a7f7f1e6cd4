"""One typed wrapper round numba: the cache is keyed by the sources of all kernels, and Python stays reachable.

numba's own cache looks only at the file of the cached function, so a changed helper in another file would go unnoticed
and give wrong numbers (numba 0.68, tried 2026-11-30). The folder here is named by the hash of every kernel source.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
_PACKAGE = Path(__file__).resolve().parent.parent
_KERNEL_PACKAGES = ("core", "topology", "comm", "compute", "interference", "timeline")
_KEPT_VERSIONS = 8
_KEPT_S = 86400.0


def kernel_cache_folder() -> Path:
    """The folder of compiled kernels for these sources; private and writable, made if needed.

    Where it is made, folders of other sources that no process of the last day opened go, but for the latest seven.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return _folder(_PACKAGE, base, tempfile.gettempdir())


@functools.cache  # sources do not change while a process runs
def _folder(package: Path, base: str, temporary: str) -> Path:
    name = f"numba-{_digest_of_kernels(package)[:12]}"
    for folder in (Path(base, "echo-explore", name), Path(temporary, f"echo-explore-{os.getuid()}", name)):
        try:
            is_new = not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                os.utime(folder)  # used now: the last to go
                if is_new:
                    _prune(folder.parent)
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="echo-explore-numba-"))


def _digest_of_kernels(root: Path) -> str:
    digest = hashlib.sha256()
    for package in _KERNEL_PACKAGES:
        for path in sorted((root / package).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _prune(parent: Path) -> None:
    """Delete what no recent version of the sources uses."""
    used: list[tuple[float, Path]] = []
    for folder in parent.glob("numba-*"):
        with contextlib.suppress(OSError):  # another process may delete it
            used.append((folder.stat().st_mtime, folder))
    for when, folder in sorted(used, reverse=True)[_KEPT_VERSIONS:]:
        if time.time() - when > _KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled by numba at first call and cached on disk; `python_of` gives the original back."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache_folder()))
    import numba

    setattr(numba.config, "CACHE_DIR", os.environ["NUMBA_CACHE_DIR"])  # noqa: B010 (numba sets its options at run time)
    return cast("Callable[P, R]", numba.njit(cache=True)(function))


def python_of(function: Callable[P, R]) -> Callable[P, R]:
    """The Python function behind a `jit` one: the oracle in tests."""
    return cast("Callable[P, R]", getattr(function, "py_func", function))
