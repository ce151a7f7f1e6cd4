"""Points of a space: the published count, legality by `specs` alone, one point for what is the same."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.search.point import SearchPoint
from echo_explore.search.space import enumerate_points, resolve_space, with_objective
from echo_explore.specs import SearchSpace, load_space
from echo_explore.specs.recompute import KINDS
from tests.examples import examples
from tests.search.support import MAIN_SPACE, SMALL, resolved, write_space


def test_main_space_has_3144_points() -> None:
    # counted by hand in a separate script over divisors, 2026-11-30
    assert len(enumerate_points(resolved(MAIN_SPACE))) == 3144


def test_points_are_exactly_the_candidates_that_specs_accept() -> None:
    space = resolved(MAIN_SPACE)
    points = set(enumerate_points(space))
    axes = space.axes
    accepted = set()
    for tensor, pipeline, virtual in product(axes.tensor_parallel, axes.pipeline_parallel, (1, 2, 3, 8)):
        for micro_batch, sequence in product(axes.micro_batch_size, axes.sequence_parallel):
            point = SearchPoint(
                num_gpus=96,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                virtual_pipeline=virtual,
                micro_batch_size=micro_batch,
                sequence_parallel=sequence and tensor > 1,
            )
            try:
                candidate = space.candidate(point)
            except SpecError:
                continue
            if candidate.model.num_layers % candidate.layout.num_chunks == 0:
                accepted.add(point)
    assert accepted == {p for p in points if p.recompute == "none" and p.virtual_pipeline in (1, 2, 3, 8)}


def test_order_and_hash_do_not_depend_on_the_order_in_the_file(tmp_path: Path) -> None:
    other = SMALL.replace("[4, 8]", "[8, 4]").replace("[6, 12, 24]", "[24, 6, 12]")
    first = enumerate_points(resolved(write_space(tmp_path)))
    second = enumerate_points(resolved(write_space(tmp_path, other)))
    assert first == second
    assert list(first) == sorted(first, key=lambda p: p.order)
    assert len({p.key for p in first}) == len(first)


def test_sequence_parallel_without_tensor_parallel_is_one_point(tmp_path: Path) -> None:
    text = SMALL.replace("tensor_parallel = [4, 8]", "tensor_parallel = [1]").replace("[true]", "[true, false]")
    points = enumerate_points(resolved(write_space(tmp_path, text)))
    assert not any(p.sequence_parallel for p in points)
    both = text.replace("[true, false]", "[true]")
    assert enumerate_points(resolved(write_space(tmp_path, both))) == points


def test_rules_cut_points_away(tmp_path: Path) -> None:
    every = enumerate_points(resolved(write_space(tmp_path)))
    text = SMALL + '[constraints]\nrules = ["pipeline_parallel * virtual_pipeline <= 12", "not recompute_full"]\n'
    kept = enumerate_points(resolved(write_space(tmp_path, text)))
    assert kept == tuple(
        p for p in every if p.pipeline_parallel * p.virtual_pipeline <= 12 and p.recompute == "selective"
    )
    assert kept


SCHEDULES = SMALL.replace(
    "[search]",
    '[search]\nschedule = ["zbv", "1f1b", "auto", "interleaved", "zb-h1", "gpipe", '
    '"dualpipev", "dualpipe", "no-pipelining"]',
).replace("[6, 12, 24]", "[1, 12, 24]")


def test_schedules_are_offered_where_they_fit_and_megatrons_own_once(tmp_path: Path) -> None:
    points = enumerate_points(resolved(write_space(tmp_path, SCHEDULES)))
    by_shape: dict[tuple[int, int], set[str]] = {}
    for point in points:
        by_shape.setdefault((point.pipeline_parallel, point.virtual_pipeline), set()).add(point.schedule)
    assert by_shape[1, 1] == {"auto"}
    assert by_shape[12, 1] == {"auto", "gpipe", "zb-h1"}
    assert by_shape[12, 2] == {"auto", "zbv", "dualpipev", "dualpipe"}
    assert len({p.key for p in points}) == len(set(points)) == len(points)
    plain = enumerate_points(resolved(write_space(tmp_path, SCHEDULES.replace("schedule =", "# schedule ="))))
    assert {p for p in points if p.schedule == "auto"} == set(plain)
    space = resolved(write_space(tmp_path, SCHEDULES))
    for point in points[:: max(1, len(points) // 40)]:
        candidate = space.candidate(point)
        assert point.schedule in ("auto", candidate.schedule.name)
        assert point.label().endswith(point.schedule) == (point.schedule != "auto")


def test_dualpipev_needs_its_micro_batches(tmp_path: Path) -> None:
    text = SCHEDULES.replace("global_batch_size = 192", "global_batch_size = 24")
    points = enumerate_points(resolved(write_space(tmp_path, text)))
    many = [p for p in points if p.schedule == "dualpipev"]
    assert all(24 // (p.micro_batch_size * p.data_parallel) >= 2 * p.pipeline_parallel for p in many)
    assert any(p.schedule == "zbv" and p.pipeline_parallel == 24 for p in points)
    assert not any(p.pipeline_parallel == 24 for p in many)


def test_rules_may_name_schedules(tmp_path: Path) -> None:
    rule = '[constraints]\nrules = ["schedule_zb_h1 or schedule_1f1b"]\n'
    points = enumerate_points(resolved(write_space(tmp_path, SCHEDULES + rule)))
    assert {(p.schedule, p.virtual_pipeline) for p in points} == {("auto", 1), ("zb-h1", 1)}


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (
            "[search]",
            '[search]\nschedule = ["zvb"]',
            r"search.schedule = 'zvb': is not a schedule by name; fix: use auto",
        ),
        ("[search]", '[search]\nschedule = ["custom"]', r"search.schedule = 'custom': is not a schedule by name"),
        ("[search]", '[search]\nschedule = ["gpipe", "gpipe"]', r"search.schedule .* names a value twice"),
        ("= [1, 2]", '= [1]\nschedule = ["dualpipev"]', r"no point of the space is legal .*does not fit"),
        ("[4, 8]", "[0, 8]", r"search.tensor_parallel = 0: must be 1 or more"),
        ("[4, 8]", "[]", "search.tensor_parallel"),
        ("[4, 8]", "[7]", "no point of the space is legal"),
        ("num_gpus = 96", "num_gpus = 10000000", "max_nodes"),
        ("num_gpus = 96", "num_gpus = 97", "no point of the space is legal"),
        ('"full"]', '"al"]', "search.recompute = 'al'"),
        ('"h800-ndr"', '"h800"', "did you mean"),
        ("[search]", '[objective]\nminimize = ["speed"]\n[search]', "objective.minimize = 'speed'"),
        ("[search]", "[objective]\nminimize = []\n[search]", "needs each objective once"),
        ("[search]", '[constraints]\nrules = ["tensor <= 8"]\n[search]', "unknown name 'tensor'"),
        ("[search]", '[constraints]\nrules = ["tensor_parallel"]\n[search]', "not true or false"),
    ],
)
def test_bad_spaces(tmp_path: Path, old: str, new: str, match: str) -> None:
    assert old in SMALL
    path = write_space(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(SpecError, match=match):
        enumerate_points(resolved(path))


def test_objectives_by_flag() -> None:
    space = load_space(str(MAIN_SPACE))
    assert with_objective(space, "energy, step_time").objective.minimize == ("energy_j", "step_time_s")
    with pytest.raises(SpecError, match="unknown objective 'coast'; fix: use cost"):
        with_objective(space, "coast")


def _divisors(values: list[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True)


@examples(25)
@given(
    gpus=st.lists(st.sampled_from([8, 16, 32, 48, 96]), min_size=1, max_size=2, unique=True),
    tensor=_divisors([1, 2, 3, 4, 8, 16]),
    pipeline=_divisors([1, 2, 3, 4, 6, 8]),
    virtual=_divisors([1, 2, 3, 4]),
    micro=_divisors([1, 2, 3, 4]),
    recompute=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    batch=st.sampled_from([16, 48, 64, 192]),
)
def test_every_point_is_a_legal_candidate(
    gpus: list[int],
    tensor: list[int],
    pipeline: list[int],
    virtual: list[int],
    micro: list[int],
    recompute: list[str],
    batch: int,
) -> None:
    data = load_space(str(MAIN_SPACE)).model_dump(mode="python", by_alias=True)
    data["cluster_size"] = {"num_gpus": gpus}
    data["recipe"]["global_batch_size"] = batch
    data["search"] |= {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "virtual_pipeline": virtual}
    data["search"] |= {"micro_batch_size": micro, "recompute": recompute}
    space = resolve_space(SearchSpace.model_validate(data))
    try:
        points = enumerate_points(space)
    except SpecError:
        return
    assert max(Counter(points).values()) == 1
    for point in points:
        candidate = space.candidate(point)
        assert candidate.num_gpus == point.num_gpus
        assert candidate.layout.data_parallel == point.data_parallel
        assert len(set(candidate.chunk_layers)) == 1
        assert SearchPoint.from_params(point.params()) == point


def test_placements_multiply_points_where_they_differ(tmp_path: Path) -> None:
    orders = '["tp-cp-ep-dp-pp", "cp-tp-ep-dp-pp", "pp-tp-cp-ep-dp"]'  # the first two are alike without cp
    every = enumerate_points(resolved(write_space(tmp_path)))
    text = SMALL.replace("[search]\n", f"[search]\nplacement = {orders}\n")
    placed = enumerate_points(resolved(write_space(tmp_path, text)))
    counts = Counter(p.placement for p in placed)
    assert counts == {"tp-cp-ep-dp-pp": len(every), "pp-tp-cp-ep-dp": len(every)}
    assert list(placed) == sorted(placed, key=lambda p: p.order)
    point = next(p for p in placed if p.placement != "tp-cp-ep-dp-pp")
    assert resolved(write_space(tmp_path, text)).candidate(point).placement.order == "pp-tp-cp-ep-dp"
    assert SearchPoint.from_params(point.params()) == point


def test_a_wrong_order_in_a_space_is_refused(tmp_path: Path) -> None:
    text = SMALL.replace("[search]\n", '[search]\nplacement = ["tp-pp"]\n')
    with pytest.raises(SpecError, match="must name tp, cp, ep, dp, pp once each"):
        resolved(write_space(tmp_path, text))
