"""The driver without Ray: complete, certified, the same after any interruption, and honest about failures."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_explore.core import SpecError, StudyError
from echo_explore.search.ledger import read_ledger
from echo_explore.search.objective import format_objective
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Bounds, TrialRecord
from echo_explore.search.result import format_interval
from echo_explore.search.run import SearchOptions, run_search
from echo_explore.search.space import enumerate_points
from echo_explore.testing.fakes import FakeEvaluator, FakeFactory, Faults
from tests.search.support import MAIN_SPACE, SMALL, fake_search, ledger_lines, resolved, write_space

DRIVER = """
import sys
from tests.search.support import fake_search
from echo_explore.testing.fakes import Faults
from pathlib import Path
faults = Faults(slow_s=0.01, log=sys.argv[4])
result = fake_search(Path(sys.argv[1]), study=sys.argv[2], sampler=sys.argv[3], faults=faults)
print(result.ending, result.exit_code)
sys.exit(result.exit_code)
"""


def _start(space: Path, study: str, sampler: str, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(space), study, sampler, str(log)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_enumeration_finds_the_best_of_the_main_space_and_covers_it() -> None:
    space = resolved(MAIN_SPACE)
    evaluator = FakeEvaluator(space=space)
    outcomes = {point: evaluator.evaluate(point) for point in enumerate_points(space)}
    best = min((o.step_time_s, p.order) for p, o in outcomes.items() if o.fits)
    result = fake_search(MAIN_SPACE, study="main")
    assert (result.best[0].values[0], result.best[0].point.order) == best
    assert result.certified
    assert result.counts.num_evaluated + result.counts.num_bounded == result.counts.num_legal == 3144
    assert result.counts.num_evaluated < 400
    assert "3,144 legal points" in result.certificate()
    for record in (r for r in _records("main") if r.state == "bounded"):
        outcome = outcomes[record.point]
        assert not outcome.fits or outcome.step_time_s > best[0]


def _records(study: str) -> list[TrialRecord]:
    contents = read_ledger(Path(os.environ["ECHO_EXPLORE_HOME"], "studies", study, "ledger.jsonl"))
    assert contents is not None
    return list(contents.records)


def test_finished_study_is_printed_without_evaluating(tmp_path: Path) -> None:
    space = write_space(tmp_path)
    first = fake_search(space)
    lines = ledger_lines(first)
    log = tmp_path / "log"
    second = fake_search(space, faults=Faults(log=str(log)))
    assert second.to_json() == first.to_json()
    assert ledger_lines(second) == lines
    assert not log.exists()
    assert first.study.startswith("small-")
    assert len(first.study) == len("small-") + 8


def test_default_name_moves_with_space_seed_and_calibration(tmp_path: Path) -> None:
    space = write_space(tmp_path)
    names = {fake_search(space, seed=seed).study for seed in (0, 1)}
    factory = FakeFactory(space=resolved(space), calibration="other")
    options = SearchOptions(space=str(space), address="none")
    names.add(run_search(options, factory=factory, stream=io.StringIO()).study)
    names.add(fake_search(write_space(tmp_path, SMALL.replace("[1, 2]", "[1]", 1))).study)
    assert len(names) == 4


def test_same_name_with_other_contents_is_refused(tmp_path: Path) -> None:
    first = fake_search(write_space(tmp_path), study="same")
    lines = ledger_lines(first)
    other = write_space(tmp_path, SMALL.replace("192", "96"), "other")
    with pytest.raises(StudyError, match="study same: space_hash"):
        fake_search(other, study="same")
    with pytest.raises(StudyError, match="study same: seed = 5: the study of that name has 0"):
        fake_search(write_space(tmp_path), study="same", seed=5)
    with pytest.raises(StudyError, match="study same: sampler = 'tpe'"):
        fake_search(write_space(tmp_path), study="same", sampler="tpe")
    assert ledger_lines(first) == lines


def test_resume_needs_a_study(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="does not exist"):
        fake_search(write_space(tmp_path), study="nowhere", resume=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sampler": "tpee"}, "sampler = 'tpee'"),
        ({"trials": 0}, "trials = 0"),
        ({"window": -1}, "window = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"study": "../x"}, "study = '../x'"),
        ({"objective": "speed"}, "unknown objective"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        fake_search(write_space(tmp_path), **options)


@pytest.mark.parametrize("sampler", ["enumerate", "tpe"])
def test_window_not_timing_decides(tmp_path: Path, sampler: str) -> None:
    """Trials in steps of one --trials give the same ledger as trials in one go."""
    space = write_space(tmp_path)
    whole = fake_search(space, study=f"whole-{sampler}", sampler=sampler, trials=20, window=4)
    for trials in (3, 4, 11, 20):
        parts = fake_search(space, study=f"parts-{sampler}", sampler=sampler, trials=trials, window=4)
    strip = [line for line in ledger_lines(parts) if not line.startswith('{"end"')]
    assert strip == [line for line in ledger_lines(whole) if not line.startswith('{"end"')]


@pytest.mark.parametrize("sampler", ["enumerate", "nsga2"])
def test_killed_driver_goes_on_with_every_trial_once(tmp_path: Path, sampler: str) -> None:
    log, study = tmp_path / "log", f"killed-{sampler}"
    reference = fake_search(MAIN_SPACE, study=f"quiet-{sampler}", sampler=sampler)
    for size in (10, 40):
        process = _start(MAIN_SPACE, study, sampler, log)
        while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < size):
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
    process = _start(MAIN_SPACE, study, sampler, log)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.split()[0] in ("exhausted", "trials")
    path = Path(os.environ["ECHO_EXPLORE_HOME"], "studies", study, "ledger.jsonl")
    assert path.read_text().splitlines() == ledger_lines(reference)
    evaluated = Counter(log.read_text().splitlines())
    assert max(evaluated.values()) <= 3  # at least once, and again only what each of two kills cut short
    assert len(evaluated) == reference.counts.num_evaluated


def test_ctrl_c_once_stops_cleanly_and_the_same_command_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = _start(MAIN_SPACE, "ctrl-c", "enumerate", log)
    while process.poll() is None and not log.exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == "interrupted 130\n"
    assert "stopping" in stderr
    num_trials = len(_records("ctrl-c"))
    assert fake_search(MAIN_SPACE, study="ctrl-c").certified
    assert len(_records("ctrl-c")) == 3144 > num_trials


def test_failures_are_recorded_and_three_stop_the_study(tmp_path: Path) -> None:
    space = write_space(tmp_path, SMALL.replace('"full"]', '"full", "none"]').replace("[1, 2]", "[1, 2, 4, 8]"))
    points = [record.point for record in fake_search(space, study="healthy").best]
    faults = Faults(raise_on=frozenset(p.key for p in points[:4]))
    result = fake_search(space, study="sick", faults=faults, window=1)
    assert result.ending == "failures"
    assert result.exit_code == 1
    assert 1 <= len(result.failures) <= 3
    assert "ZeroDivisionError: fake crash" in result.failures[0]
    again = fake_search(space, study="sick", window=1)
    assert again.ending == "failures"
    still = fake_search(space, study="sick", window=1, resume=True, faults=faults)
    assert still.ending == "failures" or not still.certified
    healed = fake_search(space, study="sick", window=1, resume=True)
    assert healed.ending == "exhausted"
    assert healed.certified
    assert not healed.failures
    assert healed.best[0].values == fake_search(space, study="healthy").best[0].values


@pytest.mark.parametrize("sampler", ["enumerate", "tpe"])
def test_a_retry_is_a_trial_of_its_own_and_the_study_can_be_gone_through_again(tmp_path: Path, sampler: str) -> None:
    """Failures are retried by --resume alone; with retries in the ledger the study still goes on trial by trial."""
    space = write_space(tmp_path)
    points = [record.point for record in fake_search(space, study="retry-healthy").best]
    faults = Faults(raise_on=frozenset({points[1].key}))
    options: dict[str, Any] = {"study": f"retry-sick-{sampler}", "sampler": sampler, "window": 2}
    sick = fake_search(space, faults=faults, **options)
    assert sick.counts.num_failed == 1
    before = _records(f"retry-sick-{sampler}")
    part = fake_search(space, resume=True, trials=len(before), **options)
    assert part.counts.num_failed == 0
    after = _records(f"retry-sick-{sampler}")
    assert after[: len(before)] == before
    retry = after[len(before)]
    assert (retry.point, retry.state) == (points[1], "evaluated")
    whole = fake_search(space, **options)
    assert _records(f"retry-sick-{sampler}")[: len(after)] == after
    assert [r.point for r in _records(f"retry-sick-{sampler}")].count(points[1]) == 2
    assert whole.ending == "exhausted"
    assert whole.certified


def test_a_failure_that_stays_does_not_stop_a_resumed_study(tmp_path: Path) -> None:
    space = write_space(tmp_path)
    points = [record.point for record in fake_search(space, study="stays-healthy").best]
    faults = Faults(raise_on=frozenset({points[0].key}))
    fake_search(space, study="stays-sick", window=1, faults=faults)
    resumed = fake_search(space, study="stays-sick", window=1, faults=faults, resume=True)
    assert resumed.ending == "exhausted"
    assert resumed.counts.num_failed == 1
    assert not resumed.certified
    assert "a better one may exist" in resumed.certificate()


def test_fewer_trials_than_an_interrupted_study_has_ends(tmp_path: Path) -> None:
    space = write_space(tmp_path)
    whole = fake_search(space, study="cut")
    path = whole.folder / "ledger.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:9]) + "\n")
    assert fake_search(space, study="cut", trials=3).ending == "trials"
    assert len(_records("cut")) == 8


def test_a_full_disk_stops_the_search_and_fails_no_trial(tmp_path: Path) -> None:
    space = write_space(tmp_path)
    points = [record.point for record in fake_search(space, study="disk-healthy").best]
    with pytest.raises(SpecError, match="No space left on device"):
        fake_search(space, study="full", window=1, faults=Faults(no_space_on=frozenset({points[0].key})))
    assert all(record.state != "failed" for record in _records("full"))
    assert fake_search(space, study="full", window=1).certified


def test_nothing_is_said_to_fit_only_where_something_was_evaluated(tmp_path: Path) -> None:
    space = write_space(tmp_path)
    keys = frozenset(point.key for point in enumerate_points(resolved(space)))
    result = fake_search(space, study="nothing-sick", window=1, faults=Faults(raise_on=keys))
    assert result.counts.num_evaluated == 0
    assert result.to_text().startswith("no layout was evaluated")


def test_a_refused_search_leaves_no_folder_and_prints_no_progress(tmp_path: Path) -> None:
    stream = io.StringIO()
    path = write_space(tmp_path, SMALL.replace("[4, 8]", "[7]"))
    options = SearchOptions(space=str(path), address="none", study="none-legal")
    with pytest.raises(SpecError, match="no point of the space is legal"):
        run_search(options, factory=FakeFactory(space=resolved(path)), stream=stream)
    assert not Path(os.environ["ECHO_EXPLORE_HOME"], "studies", "none-legal").exists()
    with pytest.raises(SpecError, match="is a folder; fix: give the name of a file"):
        fake_search(write_space(tmp_path), storage=str(tmp_path))
    assert stream.getvalue() == ""


def test_something_else_in_place_of_ledger_or_folder(tmp_path: Path) -> None:
    studies = Path(os.environ["ECHO_EXPLORE_HOME"], "studies")
    (studies / "odd/ledger.jsonl").mkdir(parents=True)
    (studies / "file").touch()
    for study in ("odd", "file"):
        with pytest.raises(StudyError, match="cannot be opened"):
            fake_search(write_space(tmp_path), study=study)


def test_small_jobs_have_digits() -> None:
    assert format_interval(0.0213, 0.0249) == "21.30..24.90 ms"
    assert format_interval(7.911, 10.77) == "7.91..10.77 s"
    assert format_objective("step_time_s", 0.021234) == "21.234 ms"
    assert format_objective("step_time_s", 9.23) == "9.230 s"
    assert format_objective("cost_usd", 0.00012346) == "0.0001235 USD a step"
    assert format_objective("cost_usd", 3.25) == "3.2500 USD a step"


def test_ctrl_c_while_starting_ends_the_search(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
from pathlib import Path
from echo_explore.testing.fakes import FakeFactory
from tests.search.support import fake_search
def slow(self):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
FakeFactory.shared = slow
try:
    fake_search(Path(sys.argv[1]), study="starting")
except KeyboardInterrupt:
    sys.exit(130)
"""
    command = [sys.executable, "-c", script, str(write_space(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 130, done.stderr
    assert "stopping" in done.stderr


def test_nothing_feasible_exits_1(tmp_path: Path) -> None:
    text = SMALL.replace("[4, 8]", "[1]").replace("[6, 12, 24]", "[1]").replace('["selective", "full"]', '["none"]')
    result = fake_search(write_space(tmp_path, text))
    assert result.exit_code == 1
    assert not result.best
    assert "none of them fits" in result.certificate()


def test_json_and_text(tmp_path: Path) -> None:
    result = fake_search(write_space(tmp_path), objective="step_time,energy")
    row = json.loads(json.dumps(result.to_json()))["best"][0]
    assert {"label", "step_time_s", "energy_j", "mfu", "peak_memory_bytes", "breakdown", "params"} <= set(row)
    assert str(result.folder) in result.to_text()
    assert "kWh a step" in result.to_text()
    assert result.folder.is_absolute()
    assert json.loads((result.folder / "best.json").read_text())[0]["label"] == row["label"]
    assert result.timeline is not None
    assert result.timeline.exists()


def test_a_bound_that_lies_voids_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FakeEvaluator.lower_bounds

    def lie(self: FakeEvaluator, point: SearchPoint) -> Bounds:
        bounds = honest(self, point)
        return replace(bounds, step_time_s=bounds.step_time_s * 2.0)

    monkeypatch.setattr(FakeEvaluator, "lower_bounds", lie)
    result = fake_search(write_space(tmp_path), study="lying")
    assert not result.certified


def test_a_script_that_hides_a_package_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optuna_dashboard.py").write_text("raise SystemExit(3)")
    monkeypatch.delitem(sys.modules, "optuna_dashboard", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpecError, match="hides the package optuna_dashboard; fix: rename it"):
        fake_search(write_space(tmp_path))
