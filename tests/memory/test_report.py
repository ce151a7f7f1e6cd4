"""Scores of memory verdicts."""

import math

import pytest

from scripts.memory_report import Verdict, balanced_accuracy, scores


def test_scores_count_what_is_missing_as_wrong() -> None:
    verdicts = [
        Verdict(ran=True, fits=True, reserved_gib=40.0, predicted_gib=44.0, hard=True),
        Verdict(ran=True, fits=False, reserved_gib=70.0, predicted_gib=84.0, hard=True),
        Verdict(ran=True, fits=None, reserved_gib=50.0),
        Verdict(ran=False, fits=False, hard=True),
    ]
    found = scores(verdicts)
    assert found["coverage"] == 3 / 4
    assert found["balanced_accuracy"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["band_balanced_accuracy"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["wrongly_refused"] == pytest.approx(2 / 3)
    assert found["reserved_median_abs_error"] == pytest.approx(0.2)  # of 10, 20 and 100 %


def test_without_either_verdict_there_is_no_balance() -> None:
    assert math.isnan(balanced_accuracy([Verdict(ran=True, fits=True)]))
