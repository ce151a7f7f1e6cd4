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
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Bounds, TrialRecord
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
    healed = fake_search(space, study="sick", window=1, resume=True)
    assert healed.ending == "exhausted"
    assert not healed.certified
    assert "a better one may exist" in healed.certificate()


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
