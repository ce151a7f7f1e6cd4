"""Compiled kernels: the cache is named by all their sources, and Python stays reachable."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from echo_explore.core import jit as jit_module
from echo_explore.core.jit import jit, kernel_cache_folder, python_of


def _double(value: float) -> float:
    return 2.0 * value


def test_the_same_function_compiled_and_as_python() -> None:
    compiled = jit(_double)
    assert compiled(1.5) == 3.0
    assert python_of(compiled) is _double
    assert python_of(_double) is _double


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one kernel file, and a cache folder of its own."""
    folder = tmp_path / "package"
    (folder / "timeline").mkdir(parents=True)
    (folder / "timeline/engine.py").write_text("one")
    monkeypatch.setattr(jit_module, "_PACKAGE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def folder_of_a_new_process() -> Path:
    jit_module._folder.cache_clear()
    return kernel_cache_folder()


def test_the_folder_changes_with_any_source(package: Path) -> None:
    first = folder_of_a_new_process()
    assert folder_of_a_new_process() == first
    (package / "timeline/engine.py").write_text("two")
    second = folder_of_a_new_process()
    (package / "core").mkdir()
    (package / "core/helper.py").write_text("")  # a helper in another file, which numba itself would miss
    assert len({first, second, folder_of_a_new_process()}) == 3


def test_sources_are_read_once_in_a_process(package: Path) -> None:
    first = kernel_cache_folder()
    (package / "timeline/engine.py").unlink()
    assert kernel_cache_folder() == first


def test_folders_of_old_versions_go(package: Path) -> None:
    folders = []
    for version in range(12):
        (package / "timeline/engine.py").write_text(str(version))
        folders.append(folder_of_a_new_process())
    assert all(folder.is_dir() for folder in folders)  # all were used today
    other = folders[0].parent / "guard"
    other.mkdir()
    for age, folder in enumerate([*reversed(folders), other]):
        days_ago = folder.stat().st_mtime - 86400.0 * (2 + age)
        os.utime(folder, (days_ago, days_ago))
    (package / "timeline/engine.py").write_text("0")
    used = folder_of_a_new_process()
    assert used == folders[0]
    assert all(folder.is_dir() for folder in folders)  # only a new version makes room
    (package / "timeline/engine.py").write_text("new")
    kept = {folder_of_a_new_process(), used, *folders[-6:]}
    assert set(used.parent.glob("numba-*")) == kept
    assert other.is_dir()


def test_the_folder_is_private(package: Path, tmp_path: Path) -> None:
    folder = kernel_cache_folder()
    assert folder.is_relative_to(tmp_path / "cache/echo-explore")
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert folder.stat().st_uid == os.getuid()


def test_another_folder_where_the_first_cannot_be_made(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "cache").write_text("a file where the folder should be")
    folder = kernel_cache_folder()
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path / "temporary")
