"""Scores by hand-computed examples and by what must hold for any table."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.validation.score import Outcome, kendall_tau, score, top1_regret


def outcome(measured: float, predicted: float | None, *, family: str = "a", **more: object) -> Outcome:
    cells = {"family": family} | {k: str(v) for k, v in more.items() if k not in ("low_s", "high_s", "reason")}
    ends = {k: v for k, v in more.items() if k in ("low_s", "high_s", "reason")}
    return Outcome(cells=cells, measured_s=measured, predicted_s=predicted, **ends)  # type: ignore[arg-type]


def test_by_hand() -> None:
    rows = [outcome(1.0, 1.0 + 0.08 * i, tp=i) for i in range(8)]  # errors 0, 8, ... 56 %
    rows += [outcome(2.0, None, family="b", tp=i, reason="no") for i in range(8)]
    scores = score(rows)
    assert scores.coverage == 0.5
    assert scores.families["a"].median_abs_error == pytest.approx(0.28)
    assert scores.families["b"].median_abs_error == 1.0
    assert scores.families["b"].bias is None
    assert scores.family_score == pytest.approx((0.28 + 1.0) / 2)
    assert scores.within_10 == pytest.approx(2 / 16)
    assert scores.bias == pytest.approx(0.28)
    assert scores.declined == {"no": 8}
    assert scores.kendall_tau is None  # all measured times are equal: nothing to rank


def test_small_families_are_pooled() -> None:
    rows = [outcome(1.0, 2.0, family=f"f{i}") for i in range(5)]
    assert list(score(rows).families) == ["small families"]


def test_intervals() -> None:
    rows = [outcome(1.0, 1.0, low_s=0.9, high_s=1.1) for _ in range(9)] + [outcome(2.0, 1.0, low_s=0.9, high_s=1.1)]
    scores = score([*rows, outcome(1.0, 1.0)])  # without an interval: outside
    assert scores.interval_rows == 10
    assert scores.interval_hit == pytest.approx(9 / 11)
    assert scores.interval_worst == pytest.approx(9 / 11)
    assert scores.interval_width == pytest.approx(0.2)


def test_tau_and_regret() -> None:
    group = [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (4.0, 40.0)]
    assert kendall_tau(group) == 1.0
    assert kendall_tau([(-p, m) for p, m in group]) == -1.0
    assert kendall_tau([(p, 10.0 + 0.1 * i) for i, (p, _) in enumerate(group)]) is None  # within the noise
    assert top1_regret(group) == 0.0
    assert top1_regret([(3.0, 10.0), (2.0, 20.0), (4.0, 40.0)]) == 1.0
    assert top1_regret([(2.0, 10.0), (2.0, 20.0)]) == pytest.approx(0.5)  # a tie counts as its mean
    assert top1_regret([(math.inf, 10.0), (2.0, 20.0)]) == 1.0


def test_repeats_count_as_their_mean() -> None:
    rows = [outcome(m, p, tp=tp) for tp, m, p in ((1, 1, 1), (1, 3, 3), (2, 4, 4), (4, 6, 6), (8, 9, 9))]
    scores = score(rows)
    assert scores.ranking_groups == 1
    assert scores.kendall_tau == 1.0
    assert score(rows[:4]).ranking_groups == 0  # three layouts only


def test_nothing_to_score() -> None:
    scores = score([])
    assert (scores.num_rows, scores.coverage, scores.family_score) == (0, 0.0, None)
    assert "family_score None" in scores.text()


TIMES = st.floats(1e-3, 1e3)


@given(st.lists(TIMES, min_size=1, max_size=30), st.floats(0.5, 2.0))
def test_scaling_every_prediction_is_seen(times: list[float], factor: float) -> None:
    scores = score([outcome(t, t * factor, tp=i) for i, t in enumerate(times)])
    assert scores.family_score == pytest.approx(abs(factor - 1))
    assert scores.top1_regret is None or scores.top1_regret == pytest.approx(0, abs=1e-6)
    assert scores.kendall_tau is None or scores.kendall_tau == 1.0


@given(st.lists(st.tuples(TIMES, st.none() | TIMES), min_size=1, max_size=30))
def test_declining_never_pays_against_a_prediction_below_twice_the_truth(
    rows: list[tuple[float, float | None]],
) -> None:
    outcomes = [outcome(m, None if p is None else min(p, 2 * m), tp=i) for i, (m, p) in enumerate(rows)]
    refused = [Outcome(cells=o.cells, measured_s=o.measured_s, predicted_s=None) for o in outcomes]
    some, none = score(outcomes).family_score, score(refused).family_score
    assert some is not None
    assert none == 1.0
    assert some <= none + 1e-9
