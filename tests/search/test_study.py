"""The study for the dashboard: equal to the ledger, rebuilt at any time, never in the way of the search."""

import logging
import os
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from echo_explore.core import SpecError, StudyError
from echo_explore.search.ledger import read_ledger
from echo_explore.search.ports import TrialRecord
from echo_explore.search.result import SearchResult
from echo_explore.search.storage_name import masked, resolve_storage, with_environment
from echo_explore.search.study import StudyMirror, open_storage
from echo_explore.testing.fakes import Faults
from tests.search.support import MAIN_SPACE, fake_search, write_space

STATES = {"evaluated": TrialState.COMPLETE, "bounded": TrialState.PRUNED, "failed": TrialState.FAIL}


def _study(result: SearchResult, storage: str | None = None) -> optuna.Study:
    return optuna.load_study(study_name=result.study, storage=open_storage(storage or str(result.folder / "study.log")))


def _records(result: SearchResult) -> tuple[TrialRecord, ...]:
    contents = read_ledger(result.folder / "ledger.jsonl")
    assert contents is not None
    return contents.records


def _check_equal(result: SearchResult, study: optuna.Study) -> None:
    records, trials = _records(result), study.get_trials(deepcopy=False)
    assert [t.number for t in trials] == [r.trial for r in records]
    assert [t.state for t in trials] == [STATES[r.state] for r in records]
    assert [t.params for t in trials] == [r.point.params() for r in records]
    for trial, record in zip(trials, records, strict=True):
        if record.state != "failed":  # the list form is what optuna-dashboard 0.21 reads
            assert trial.system_attrs["constraints"] == [record.memory_overshoot]
            assert trial.constraints == {"0": record.memory_overshoot}
        if record.state == "evaluated":
            assert tuple(trial.values) == record.values
            assert record.outcome is not None
            assert trial.user_attrs["mfu"] == record.outcome.mfu
            assert trial.user_attrs["peak_memory_gib"] == record.outcome.peak_memory_bytes / 2**30
        assert all(isinstance(value, str | int | float) for value in trial.user_attrs.values())


def test_mirror_equals_ledger_and_is_rebuilt() -> None:
    result = fake_search(MAIN_SPACE, study="mirrored", trials=200)
    path = result.folder / "study.log"
    study = _study(result)
    _check_equal(result, study)
    assert study.metric_names == ["step_time_s"]
    assert study.best_trial.params == result.best[0].point.params()
    storage = open_storage(str(path))
    attributes = storage.get_study_system_attrs(storage.get_study_id_from_name(result.study))
    assert any("--tensor-model-parallel-size" in str(note) for note in attributes.values())
    path.unlink()
    result = fake_search(MAIN_SPACE, study="mirrored", trials=210)
    _check_equal(result, _study(result))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])  # torn in the middle of a line
    Path(f"{path}.lock").symlink_to(path)
    os.utime(f"{path}.lock", (0, 0), follow_symlinks=False)
    result = fake_search(MAIN_SPACE, study="mirrored", trials=220)
    _check_equal(result, _study(result))


def test_failed_trials_and_sqlite(tmp_path: Path) -> None:
    space = write_space(tmp_path)
    point = fake_search(space, study="to-fail").best[0].point
    storage = f"sqlite:///{tmp_path}/study.db"
    result = fake_search(space, study="failing", storage=storage, faults=Faults(raise_on=frozenset({point.key})))
    study = _study(result, storage)
    _check_equal(result, study)
    (failed,) = study.get_trials(states=[TrialState.FAIL])
    assert "fake crash" in failed.user_attrs["cause"]
    assert not (result.folder / "study.log").exists()


def test_a_finished_study_is_mirrored_anywhere(tmp_path: Path) -> None:
    result = fake_search(write_space(tmp_path), study="finished")
    (result.folder / "study.log").unlink()
    storage = str(tmp_path / "elsewhere.log")
    log = tmp_path / "log"
    again = fake_search(write_space(tmp_path), study="finished", storage=storage, faults=Faults(log=str(log)))
    _check_equal(again, _study(again, storage))
    again = fake_search(write_space(tmp_path), study="finished", faults=Faults(log=str(log)))
    _check_equal(again, _study(again))
    assert not log.exists()


def test_a_study_of_that_name_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    theirs = optuna.create_study(study_name="theirs", storage=storage)
    theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(StudyError, match="has one of that name that is not ours; fix: give another --study"):
        fake_search(write_space(tmp_path), study="theirs", storage=storage)
    fake_search(write_space(tmp_path), study="ours", storage=storage)
    (Path(os.environ["ECHO_EXPLORE_HOME"]) / "studies/ours/ledger.jsonl").unlink()
    with pytest.raises(StudyError, match="has another search of that name"):
        fake_search(write_space(tmp_path), study="ours", storage=storage, seed=9)


def test_a_mirror_that_breaks_does_not_stop_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: StudyMirror, batch: object) -> None:
        raise OSError("the server is gone")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(StudyMirror, "_write", broken)
        result = fake_search(write_space(tmp_path), study="broken-mirror", trials=5)
    assert len(_records(result)) == 5
    assert "the ledger has them" in caplog.text
    result = fake_search(write_space(tmp_path), study="broken-mirror")
    _check_equal(result, _study(result))


def test_passwords_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="the password is written out") as caught:
        resolve_storage("postgresql://me:secret@host/db")
    assert "secret" not in str(caught.value)
    url = resolve_storage("postgresql://me:${ECHO_TEST_PASSWORD}@host/db")
    with pytest.raises(SpecError, match="is not set in the environment"):
        with_environment(url)
    monkeypatch.setenv("ECHO_TEST_PASSWORD", "secret")
    assert with_environment(url) == "postgresql://me:secret@host/db"
    assert masked(with_environment(url)) == "postgresql://me:***@host/db"


def test_storage_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_storage("s.log") == str(tmp_path / "s.log")
    assert resolve_storage("sqlite:///s.db") == f"sqlite:///{tmp_path}/s.db"
    assert resolve_storage(f"sqlite:///{tmp_path}/s.db") == f"sqlite:///{tmp_path}/s.db"
    with pytest.raises(SpecError, match="is not a known kind"):
        resolve_storage("redis://host")
    with pytest.raises(SpecError, match="after the job"):
        resolve_storage("/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_1/s.log")


def test_a_database_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_TEST_PASSWORD", "secret")
    with pytest.raises(SpecError, match="cannot be opened") as caught:
        fake_search(
            write_space(tmp_path), study="no-server", storage="postgresql://me:${ECHO_TEST_PASSWORD}@127.0.0.1:1/db"
        )
    assert "secret" not in str(caught.value)
    with pytest.raises(SpecError, match="storage"):
        fake_search(write_space(tmp_path), study="no-folder", storage="/proc/nowhere/s.log")


def test_a_missing_database_driver_is_named() -> None:
    """SQLAlchemy's default driver for MySQL comes with another package than the extra brings."""
    with pytest.raises(SpecError, match=r"needs the Python package mysqlclient; fix: pip install mysqlclient"):
        open_storage("mysql://me@127.0.0.1:1/db")
