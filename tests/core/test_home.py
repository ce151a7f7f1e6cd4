"""The state folder: where it is, that it can be written, that it survives; and look-up of data files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_explore.core import SpecError
from echo_explore.core.home import find_data_file, home, list_data_files, refuse_job_copy, state_folder

NOBODY = 65534


def test_default_and_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(tmp_path / "state"))
    assert home() == tmp_path / "state"
    assert state_folder("traces") == tmp_path / "state" / "traces"
    assert (tmp_path / "state" / "traces").is_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ECHO_EXPLORE_HOME", "~/other")
    assert home() == tmp_path / "other"
    monkeypatch.delenv("ECHO_EXPLORE_HOME")
    assert home() == tmp_path / ".local/share/echo-explore"


def test_a_relative_home_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHO_EXPLORE_HOME", "state")
    assert home() == tmp_path / "state"


def test_a_file_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").write_text("")
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(tmp_path / "state"))
    with pytest.raises(
        SpecError, match=r"ECHO_EXPLORE_HOME = '.*/state': must be writable \(.*; fix: set it to a folder"
    ):
        state_folder("studies")


def test_read_only(tmp_path: Path) -> None:
    """In a child process, as another user where the tests run as root, who may write anywhere."""
    folder = tmp_path / "state"
    (folder / "studies").mkdir(parents=True)
    for path in (folder / "studies", folder):
        path.chmod(0o555)
    code = "from echo_explore.core.home import state_folder; state_folder('studies')"
    if os.getuid() == 0:
        for parent in (tmp_path, *tmp_path.parents[:-2]):
            parent.chmod(parent.stat().st_mode | 0o055)
        code = f"import os, echo_explore.core.home; os.setuid({NOBODY}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ECHO_EXPLORE_HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert "SpecError: ECHO_EXPLORE_HOME = " in done.stderr
    assert "must be writable (Permission denied); fix: set it to a folder of yours" in done.stderr


def test_the_copy_of_a_ray_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "session/runtime_resources/working_dir_files/_ray_pkg_0"
    copy.mkdir(parents=True)
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(copy / "state"))
    with pytest.raises(
        SpecError, match="copy of the working folder that Ray deletes after the job; fix: give an absolute"
    ):
        state_folder("studies")
    assert list(copy.iterdir()) == []
    refuse_job_copy(tmp_path / "working_dir_files/state", field="x")


def test_a_file_of_the_user_goes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(tmp_path))
    shipped = find_data_file("clusters", "h800-ndr")
    assert shipped is not None
    assert find_data_file("clusters", "none-such") is None
    mine = tmp_path / "clusters/h800-ndr.toml"
    mine.parent.mkdir()
    mine.write_text("")
    (tmp_path / "clusters/aaa.toml").write_text("")
    assert find_data_file("clusters", "h800-ndr") == mine
    listed = list_data_files("clusters")
    assert listed["h800-ndr"] == mine
    assert list(listed) == sorted(listed)
    assert next(iter(listed)) == "a100-40gb-hdr"
    assert set(list_data_files("models")) >= {"gpt3-175b", "llama3-8b"}
