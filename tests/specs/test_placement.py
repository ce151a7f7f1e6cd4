"""Placements as users write them: orders, maps, files, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs import ParallelConfig, Placement, candidate_of, job_options, parse_placement
from echo_explore.specs.placement import ORDERS, order_that_matters, placement_number

JOB = {
    "model": "gpt-22b",
    "cluster": "h100-ndr",
    "layout": "tp=4,pp=4",
    "global_batch_size": 8,
    "micro_batch_size": 1,
}


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40, unique=True))
def test_a_written_map_is_read_back(devices: list[int]) -> None:
    assert parse_placement(",".join(map(str, devices))).device_of_rank == tuple(devices)


def test_ranges_orders_and_both() -> None:
    assert parse_placement("0-3,8-11").device_of_rank == (0, 1, 2, 3, 8, 9, 10, 11)
    assert parse_placement("pp-tp-cp-ep-dp") == Placement(order="pp-tp-cp-ep-dp")
    assert parse_placement("pp-tp-cp-ep-dp:1,0") == Placement(order="pp-tp-cp-ep-dp", device_of_rank=(1, 0))
    assert parse_placement("tp-cp-ep-dp-pp").is_default


def test_files_hold_maps_or_pairs(tmp_path: Path) -> None:
    file = tmp_path / "map.toml"
    file.write_text('schema = 1\norder = "tp-cp-ep-pp-dp"\npairs = [[1, 0], [0, 5]]\n')
    assert parse_placement(str(file)) == Placement(order="tp-cp-ep-pp-dp", device_of_rank=(5, 0))
    file.write_text("schema = 1\ndevice_of_rank = [2, 1]\n")
    assert parse_placement(str(file)).device_of_rank == (2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = 1\npairs = [[0, 0], [0, 1]]\n", "the rank is mapped twice, to GPU 0 and to 1"),
        ("schema = 1\npairs = [[0, 0], [2, 1]]\n", "the rank is not mapped"),
        ("schema = 1\ndevice_of_rank = [3, 3]\n", "ranks 0 and 1 are both mapped to it"),
        ("schema = 1\npairs = [[0, 0]]\ndevice_of_rank = [0]\n", "gives both"),
        ("schema = 1\ndevices = [0]\n", "is not a known key"),
    ],
)
def test_wrong_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "map.toml"
    file.write_text(text)
    with pytest.raises(SpecError, match=message):
        parse_placement(str(file))


def test_a_candidate_is_of_its_placement() -> None:
    plain = candidate_of(job_options(dict(JOB)))
    other = candidate_of(job_options({**JOB, "placement": "pp-tp-cp-ep-dp"}))
    assert plain.hash != other.hash
    assert candidate_of(job_options({**JOB, "placement": "tp-cp-ep-dp-pp"})).hash == plain.hash
    assert other.label() == "tp4 pp4 dp1 pp-tp-cp-ep-dp"


def test_orders_of_axes_with_one_rank_are_equal() -> None:
    layout = ParallelConfig(tensor_parallel=4, pipeline_parallel=2, data_parallel=3)
    assert {order_that_matters(order, layout) for order in ORDERS} == {
        "-".join(names)
        for names in (
            ("tp", "dp", "pp"),
            ("tp", "pp", "dp"),
            ("dp", "tp", "pp"),
            ("dp", "pp", "tp"),
            ("pp", "tp", "dp"),
            ("pp", "dp", "tp"),
        )
    }
    assert placement_number("tp-cp-ep-dp-pp") == 0 < placement_number("0,1")
