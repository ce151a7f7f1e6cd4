"""The ledger: whole lines survive anything, torn ones are cut off, and nobody writes into another's study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import StudyError
from echo_explore.core.versions import LEDGER_SCHEMA
from echo_explore.search.ledger import Ledger, read_ledger, record_from_json, record_to_json
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Outcome, TrialRecord

HEADER: Mapping[str, Any] = {"schema": LEDGER_SCHEMA, "space_hash": "abc", "seed": 0, "window": 4, "written_by": "0.1"}


def _record(trial: int, value: float = 1.5) -> TrialRecord:
    point = SearchPoint(num_gpus=8, tensor_parallel=2, pipeline_parallel=2, micro_batch_size=trial + 1)
    outcome = Outcome(
        step_time_s=value,
        step_time_low_s=value,
        step_time_high_s=value,
        mfu=0.1 + 0.2,
        mfu_causal=0.3,
        hfu=0.4,
        tokens_per_s=1e5 / 3,
        peak_memory_bytes=7e10,
        memory_capacity_bytes=8e10,
        breakdown={"compute_s": value},
        warnings=("near",),
    )
    return TrialRecord(
        trial=trial, point=point, state="evaluated", values=(value,), memory_overshoot=-0.125, outcome=outcome
    )


def _written(path: Path, num_records: int) -> bytes:
    with Ledger(path, HEADER) as ledger:
        ledger.append([_record(i) for i in range(num_records)])
    return path.read_bytes()


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0.0))
def test_records_survive_the_round_trip_exactly(value: float) -> None:
    assert record_from_json(record_to_json(_record(0, value))) == _record(0, value)


def test_cut_anywhere_leaves_the_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "study/ledger.jsonl"
    path.parent.mkdir()
    data = _written(path, 3)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(0, len(data), 7):
        path.write_bytes(data[:cut])
        with Ledger(path, HEADER) as ledger:
            whole = sum(end <= cut for end in ends)
            assert ledger.records == [_record(i) for i in range(max(0, whole - 1))]
            ledger.append([_record(i) for i in range(len(ledger.records), 3)])
        assert path.read_bytes() == data


def test_zeros_after_the_last_line_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    data = _written(path, 2)
    path.write_bytes(data + b"\0\0\0\n\0\0")
    with Ledger(path, HEADER) as ledger:
        assert len(ledger.records) == 2
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], lines[1][: len(lines[1]) // 2], *lines[2:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b'"point"', b'"pint"'), *lines[2:]],
    ],
)
def test_damage_in_the_middle_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "ledger.jsonl"
    damaged = b"\n".join(damage(_written(path, 3).split(b"\n")))
    path.write_bytes(damaged)
    with pytest.raises(StudyError, match="line 2"):
        Ledger(path, HEADER)
    assert path.read_bytes() == damaged


def test_another_study_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "mine/ledger.jsonl"
    path.parent.mkdir()
    data = _written(path, 1)
    with pytest.raises(StudyError, match="study mine: seed = 7: the study of that name has 0; fix: give another name"):
        Ledger(path, {**HEADER, "seed": 7})
    Ledger(path, {**HEADER, "written_by": "9.9"}).close()
    assert path.read_bytes() == data


@pytest.mark.parametrize("content", [b"hello", b"hello\n", b'{"a": 1}\n', b"[]\n"])
def test_a_file_that_is_no_ledger_is_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(content)
    with pytest.raises(StudyError, match="is not a ledger"):
        Ledger(path, HEADER)
    assert path.read_bytes() == content


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"schema": 99, "space_hash": "abc"}\n')
    with pytest.raises(StudyError, match="schema = 99"):
        Ledger(path, HEADER)


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, HEADER), pytest.raises(StudyError, match="another driver is writing it"):
        Ledger(path, HEADER)
    Ledger(path, HEADER).close()


def test_end_is_the_last_line_or_none(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, HEADER) as ledger:
        ledger.append([_record(0)])
        ledger.append_end({"ending": "trials"})
    contents = read_ledger(path)
    assert contents is not None
    assert contents.end == {"ending": "trials"}
    with Ledger(path, HEADER) as ledger:
        ledger.append_end({"ending": "trials"})
        ledger.append([_record(1)])
    contents = read_ledger(path)
    assert contents is not None
    assert contents.end is None
    assert len(contents.records) == 2
    assert path.read_bytes().count(b'{"end"') == 1


def test_missing_and_empty_files_hold_nothing(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger.jsonl") is None
    (tmp_path / "ledger.jsonl").write_bytes(b'{"schema"')
    assert read_ledger(tmp_path / "ledger.jsonl") is None
