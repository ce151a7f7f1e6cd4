"""Layouts that predictions cannot tell apart are said to be tied."""

import math
from pathlib import Path

import pytest

from echo_explore.search.ties import TIE_LOG, num_tied, tie_line
from tests.search.support import fake_search, write_space


def test_the_result_counts_those_within_the_measured_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(tmp_path))
    result = fake_search(write_space(tmp_path))
    times = [record.outcome.step_time_s for record in result.best if record.outcome is not None]
    within = [time for time in times if time <= times[0] * math.exp(TIE_LOG)]
    assert result.num_tied == len(within) == result.to_json()["num_tied"]
    assert (tie_line(len(within), len(times)) in result.to_text()) == (len(within) > 1)


def test_nothing_is_tied_with_nothing() -> None:
    assert num_tied(()) == 0
    assert tie_line(1, 5) == ""
    assert tie_line(3, 5).startswith("1 to 3 are tied")
    assert tie_line(5, 5).startswith("all of these are tied")
