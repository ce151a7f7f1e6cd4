from pathlib import Path

import pytest

from scripts import eflops_study


def test_a_missing_folder_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(eflops_study, "server_study", lambda: pytest.fail("computed first"))
    with pytest.raises(SystemExit) as stop:
        eflops_study.main(["--out", str(tmp_path / "nowhere")])
    assert stop.value.code == 2
    assert "nowhere: is not a folder" in capsys.readouterr().err
