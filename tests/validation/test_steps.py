"""`validate steps`: a table in, a table out, nothing lost when it is interrupted, nothing overwritten."""

import csv
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from echo_explore.core import SpecError, TraceError
from echo_explore.specs import Candidate
from echo_explore.validation import validate_steps
from tests.validation.tables import write_table


@dataclass(frozen=True)
class Fake:
    """A prediction."""

    step_time_s: float = 3.0
    step_time_low_s: float = 2.0
    step_time_high_s: float = 4.0
    reserved_memory_bytes: float = 1e9
    fits: bool = True
    breakdown: Mapping[str, float] = field(default_factory=lambda: {"compute_s": 2.0, "bubble_s": 1.0})


def constant(candidate: Candidate) -> Fake:
    return Fake(step_time_s=1.5, step_time_low_s=1.0)


def read(path: Path) -> list[dict[str, str]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz"])
def test_table_and_scores(tmp_path: Path, name: str) -> None:
    measured = write_table(
        tmp_path / "m.csv", [{}, {"task": "distillation"}, {"tp": "4", "dp": "1", "step_time_s": "3"}]
    )
    told: list[str] = []
    scores = validate_steps(measured, tmp_path / name, constant, progress=told.append)
    rows = read(tmp_path / name)
    assert list(rows[0]) == [
        *("id", "step_time_s", "step_time_low_s", "step_time_high_s", "peak_memory_bytes", "fits", "reason", "assumed"),
        *("bubble_s", "compute_s"),
    ]
    assert [r["step_time_s"] for r in rows] == ["1.5", "", "1.5"]
    assert rows[0]["fits"] == "True"
    assert rows[1]["reason"] == "task distillation is not represented yet"
    assert scores.num_rows == 3
    assert scores.coverage == pytest.approx(2 / 3)
    assert told[-1].startswith("3/3 rows, 1 declined")
    assert not (tmp_path / f"{name}.partial").exists()


def test_only_core_rows_are_scored_where_there_are_any(tmp_path: Path) -> None:
    rows = [{"core": "yes"}, {"core": "no", "step_time_s": "9"}, {"core": "yes", "step_time_s": ""}]
    scores = validate_steps(write_table(tmp_path / "m.csv", rows), tmp_path / "p.csv", constant)
    assert scores.num_rows == 1
    assert scores.pooled_mean == 0.0
    assert len(read(tmp_path / "p.csv")) == 3


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    measured = write_table(tmp_path / "m.csv", [{}])
    out = tmp_path / "p.csv"
    out.write_text("mine")
    with pytest.raises(SpecError, match="exists, and nothing is overwritten; fix: give another file or delete it"):
        validate_steps(measured, out, constant)
    assert out.read_text() == "mine"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    measured = write_table(tmp_path / "m.csv", [{}])
    with pytest.raises(SpecError, match="cannot be written: No such file or directory; fix: give a folder of yours"):
        validate_steps(measured, tmp_path / "absent" / "p.csv", constant)


def interrupted_after(count: int) -> tuple[list[str], Callable[[Candidate], Fake]]:
    seen: list[str] = []

    def predict(candidate: Candidate) -> Fake:
        if len(seen) == count:
            raise KeyboardInterrupt
        seen.append(candidate.layout.label())
        return Fake()

    return seen, predict


ROWS = [{"tp": "1", "dp": "4"}, {"tp": "2"}, {"tp": "4", "dp": "1"}, {"tp": "1", "pp": "1", "dp": "8"}]


def test_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    measured, out = write_table(tmp_path / "m.csv", ROWS), tmp_path / "p.csv"
    first, predict = interrupted_after(2)
    with pytest.raises(KeyboardInterrupt):
        validate_steps(measured, out, predict)
    assert not out.exists()
    with (tmp_path / "p.csv.partial").open("a") as file:
        file.write('{"id": "run-2", "step')  # a crash in the middle of a line
    told: list[str] = []
    second, predict = interrupted_after(99)
    validate_steps(measured, out, predict, progress=told.append)
    assert told[0].endswith("2 of 4 rows are done")
    assert [*first, *second] == ["tp1 pp2 dp4", "tp2 pp2 dp2", "tp4 pp2 dp1", "tp1 pp1 dp8"]
    whole = tmp_path / "whole.csv"
    validate_steps(measured, whole, lambda candidate: Fake())
    assert out.read_bytes() == whole.read_bytes()


def test_other_inputs_do_not_continue(tmp_path: Path) -> None:
    measured, out = write_table(tmp_path / "m.csv", ROWS), tmp_path / "p.csv"
    _, predict = interrupted_after(2)
    with pytest.raises(KeyboardInterrupt):
        validate_steps(measured, out, predict)
    before = (tmp_path / "p.csv.partial").read_bytes()
    with pytest.raises(
        SpecError, match="was begun with other inputs or versions; fix: delete it or give another --out"
    ):
        validate_steps(measured, out, constant, settings={"calibration": "other"})
    with pytest.raises(SpecError, match="was begun with other inputs"):
        validate_steps(write_table(tmp_path / "n.csv", ROWS[:3]), out, constant)
    assert (tmp_path / "p.csv.partial").read_bytes() == before


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    measured = write_table(tmp_path / "m.csv", ROWS)
    (tmp_path / "p.csv.partial").write_text("some notes\n")
    with pytest.raises(SpecError, match="is not a file of finished rows; fix: delete it or give another --out"):
        validate_steps(measured, tmp_path / "p.csv", constant)
    assert (tmp_path / "p.csv.partial").read_text() == "some notes\n"


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    measured, out = write_table(tmp_path / "m.csv", ROWS), tmp_path / "p.csv"

    def nested(candidate: Candidate) -> Fake:
        with pytest.raises(SpecError, match="is being written by another run; fix: wait or give another --out"):
            validate_steps(measured, out, constant)
        return Fake()

    validate_steps(measured, out, nested)


def test_errors_become_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def predict(candidate: Candidate) -> Fake:
        if candidate.layout.tensor_parallel == 1:
            raise TraceError("no compiler")
        if candidate.layout.tensor_parallel == 2:
            raise ZeroDivisionError("oh")
        return Fake(step_time_s=float("nan"))

    out = tmp_path / "p.csv"
    scores = validate_steps(write_table(tmp_path / "m.csv", ROWS[:3]), out, predict)
    reasons = [r["reason"] for r in read(out)]
    assert reasons == ["no compiler", "internal error: ZeroDivisionError: oh", "internal error: predicted nan s"]
    assert scores.coverage == 0.0
    assert "run-1" in caplog.text


def test_equal_candidates_are_predicted_once(tmp_path: Path) -> None:
    seen, predict = interrupted_after(99)
    measured = write_table(tmp_path / "m.csv", [{}, {"step_time_s": "1.6"}, {"tp": "4", "dp": "1"}])
    validate_steps(measured, tmp_path / "p.csv", predict)
    assert len(seen) == 2
    assert len(read(tmp_path / "p.csv")) == 3


def test_the_partial_file_is_plain(tmp_path: Path) -> None:
    _, predict = interrupted_after(1)
    with pytest.raises(KeyboardInterrupt):
        validate_steps(write_table(tmp_path / "m.csv", ROWS), tmp_path / "p.csv", predict)
    header, line = (json.loads(text) for text in (tmp_path / "p.csv.partial").read_text().splitlines())
    assert set(header) == {"measured", "package", "model_version", "tracer_version", "settings"}
    assert (line["id"], line["step_time_s"]) == ("run-0", 3.0)


MIXTURE = {"moe_experts": "8", "moe_topk": "2", "tp": "1", "pp": "1", "dp": "8", "ep": "8", "model_name": "other"}


def test_routing_comes_from_a_column_a_file_or_the_option(tmp_path: Path) -> None:
    """Numbers in the cell, the name of a file beside the table, the option where a cell is empty; dense rows: none."""
    (tmp_path / "load.txt").write_text("3\n" + 7 * "1\n")
    rows = [{}, MIXTURE | {"routing": "2 1 1 1 1 1 1 1"}, MIXTURE | {"routing": "load.txt"}, MIXTURE]
    seen: list[tuple[float, ...]] = []

    def note(candidate: Candidate) -> Fake:
        seen.append(candidate.recipe.expert_load)
        return Fake()

    measured = write_table(tmp_path / "m.csv", rows)
    validate_steps(measured, tmp_path / "p.csv", note, expert_load=(4.0, *7 * (1.0,)))
    assert seen == [(), (2.0, *7 * (1.0,)), (3.0, *7 * (1.0,)), (4.0, *7 * (1.0,))]


def test_a_load_that_does_not_fit_declines_the_row(tmp_path: Path) -> None:
    measured = write_table(tmp_path / "m.csv", [MIXTURE | {"routing": "1 1 1"}, {}])
    validate_steps(measured, tmp_path / "p.csv", constant)
    first, second = read(tmp_path / "p.csv")
    assert first["reason"].startswith("recipe.expert_load = '(3 entries)': ")
    assert second["step_time_s"] == "1.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("../load.txt", r"m.csv: run-0: routing = '../load.txt': must be numbers, or the name of a file beside"),
        ("nan 1 1 1 1 1 1 1", r"routing = 'nan 1 1 1 1 1 1 1': must be numbers, or"),
        ("none.txt", r"routing = .*none.txt': is not a text file that can be read; fix: check the path"),
    ],
)
def test_a_routing_that_cannot_be_read_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        validate_steps(write_table(tmp_path / "m.csv", [MIXTURE | {"routing": text}]), tmp_path / "p.csv", constant)


def test_rows_that_are_no_runs_are_declined_and_the_others_go_on(tmp_path: Path) -> None:
    cells = [
        {}, {"step_time_s": "500 ms"}, {"num_gpus": "8 GPUs"}, {"step_time_s": "-1"}, {"tp": "nan"}, {"gpu": ""},
        {"dp": "3"}, {"id": "run-0"}, {"id": " "}, {},
    ]  # fmt: skip
    out, told = tmp_path / "p.csv", list[str]()
    scores = validate_steps(write_table(tmp_path / "m.csv", cells), out, constant, progress=told.append)
    rows = {row["id"]: row for row in read(out)}
    own = ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5", "run-6", "run-9"]
    assert sorted(rows) == ["(row 10)", "run-0", "run-0 (row 9)", *own[1:]]
    assert "id = 'run-0': appears twice" in rows["run-0 (row 9)"]["reason"]
    assert [row["id"] for row in rows.values() if row["step_time_s"]] == ["run-0", "run-9"]
    assert "run-1: step_time_s = '500 ms': must be a positive number of seconds or empty" in rows["run-1"]["reason"]
    assert "run-2: num_gpus = '8 GPUs': must be a whole number" in rows["run-2"]["reason"]
    assert "run-3: step_time_s = '-1'" in rows["run-3"]["reason"]
    assert "run-4: tp = 'nan': must be a whole number" in rows["run-4"]["reason"]
    assert rows["run-5"]["reason"] == "no cluster for GPU ''"
    assert "num_gpus" in rows["run-6"]["reason"]
    declined = [line for line in told if line.startswith("declined: ")]
    assert len(declined) == 6
    assert "m.csv: row 9: id = 'run-0': appears twice; fix: give each row its own id" in declined[4]
    assert "m.csv: row 10: id = " in declined[5]
    # Times that can be read count as not predicted; a second row of one id does not count again.
    assert scores.num_rows == 6
    assert scores.coverage == pytest.approx(2 / 6)


def test_a_table_without_a_run_is_refused(tmp_path: Path) -> None:
    measured = write_table(tmp_path / "m.csv", [{"tp": "x"}, {"step_time_s": "1 s"}])
    with pytest.raises(SpecError, match=r"run-1: step_time_s = '1 s'"):
        validate_steps(measured, tmp_path / "p.csv", constant)


def test_times_of_another_unit_are_told(tmp_path: Path) -> None:
    # run-0 says 16 * 2048 / 8 / 1.5 = 2,731 tokens/s a GPU, and 1,500 s (1.5 s in ms) would be 2.7.
    cells = [{"tokens_per_s_per_gpu": "2731"}, {"step_time_s": "1500", "tokens_per_s_per_gpu": "2731"}]
    cells += [{"step_time_s": "1500"}, {"tokens_per_s_per_gpu": "2.7"}, {"tokens_per_s_per_gpu": "fast"}]
    out, told = tmp_path / "p.csv", list[str]()
    validate_steps(write_table(tmp_path / "m.csv", cells), out, constant, progress=told.append)
    reasons = {row["id"]: row["reason"] for row in read(out)}
    rule = "gives 2.731 tokens/s a GPU, where tokens_per_s_per_gpu says 2731; fix: check the units of both"
    assert reasons["run-1"] == f"m.csv: run-1: step_time_s = '1500': {rule}"
    assert "gives 2731 tokens/s a GPU, where tokens_per_s_per_gpu says 2.7;" in reasons["run-3"]
    assert [reasons[name] for name in ("run-0", "run-2", "run-4")] == ["", "", ""]
    doubtful = "doubtful: m.csv: run-2: step_time_s = 1500: predicted are 1.5 s; is the unit seconds?"
    assert [line for line in told if line.startswith("doubtful")] == [doubtful]
