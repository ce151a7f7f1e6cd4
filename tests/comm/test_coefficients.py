from pathlib import Path

import pytest

from echo_explore.comm import load_coefficients
from echo_explore.comm.coefficient_file import has_comm_tables, shipped_coefficients, user_coefficients
from echo_explore.comm.coefficients import LL128_SHARE, LL_SHARE
from echo_explore.core import SpecError, UnitError
from echo_explore.core.home import find_data_file
from echo_explore.specs import load_cluster


def shipped_text() -> str:
    path = find_data_file("calibrations", "comm")
    assert path is not None
    return path.read_text()


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = shipped_text()
    assert old in text
    path = tmp_path / "comm.toml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_fabrics_have_their_own_coefficients_or_the_default() -> None:
    coefficients = shipped_coefficients()
    keys = {
        n: coefficients.scale_up_of(load_cluster(n)).key
        for n in ("a100-80gb-hdr", "h800-ndr", "gb200-nvl72", "mi300x-roce")
    }
    assert keys == {
        "a100-80gb-hdr": "nvswitch-a100-sxm4-80gb",
        "h800-ndr": "nvswitch-hopper",
        "gb200-nvl72": "nvswitch-gb200",
        "mi300x-roce": "default",
    }
    assert coefficients.network_of(load_cluster("h100-p5-efa")).key == "efa-hopper"
    assert coefficients.network_of(load_cluster("h100-p5-efa"), "nccl-2.18").key == "efa-hopper-nccl-2.18"
    assert coefficients.network_of(load_cluster("h100-p5-efa"), "nccl-2.19").key == "efa-hopper"
    assert coefficients.network_of(load_cluster("h100-ndr"), "nccl-2.18").key == "infiniband-hopper"
    assert coefficients.network_of(load_cluster("b200-ndr")).key == "infiniband"
    assert coefficients.network_of(load_cluster("mi300x-roce")).key == "default"


def test_every_table_says_where_it_comes_from() -> None:
    lines = shipped_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("["):
            assert lines[number - 1].startswith("# ")


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("schema = 2", "schema = 1", SpecError, "schema = 1: must be 2"),
        ("local_efficiency = ", "local_effort = ", SpecError, r"local_efficiency = .*must be given"),
        ("tree_efficiency = 0", "tree_efficiency = 7", SpecError, "tree_efficiency = 7.*from 0 to 1"),
        ('base = "', 'base = 20 # "', UnitError, "a bare number has no unit"),
        ('launch = ["', 'launch = ["1 us", "', SpecError, r"launch = .*needs 3 entries"),
        ("[scale_up.default]", "[scale_up", SpecError, "is not valid TOML"),
        ('same_as = "', 'same_as = "no-', SpecError, "names no table with values"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, old: str, new: str, error: type[SpecError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        load_coefficients(edited(tmp_path, old, new))
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere.toml.*cannot be read"):
        load_coefficients(tmp_path / "nowhere.toml")


def test_a_file_without_tables_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "comm.toml"
    path.write_text("schema = 2\n")
    with pytest.raises(SpecError, match="must hold one table a fabric"):
        load_coefficients(path)


def test_a_users_file_lies_over_the_shipped_one_table_by_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = shipped_text()
    start = text.index("[network.default]")
    table = text[start : text.index("\n\n", start)].replace("[network.", "[comm.network.")
    path.write_text(
        "schema = 1\n[comm]\nschema = 2\n" + table.replace("rail_efficiency = ", "rail_efficiency = 0.5 # ")
    )
    assert has_comm_tables(path)
    own, shipped = user_coefficients(path), shipped_coefficients()
    assert own.network["default"].rail_efficiency == 0.5
    assert own.network["efa"] == shipped.network["efa"]
    assert own.scale_up == shipped.scale_up
    path.write_text("schema = 1\ncomm = 3\n")
    with pytest.raises(SpecError, match="comm = 3: must be a table"):
        user_coefficients(path)


def test_shipped_constants_are_within_what_physics_permits() -> None:
    coefficients = shipped_coefficients()
    for scale_up in coefficients.scale_up.values():
        for ring in (scale_up.all_reduce, scale_up.all_gather, scale_up.reduce_scatter):
            assert list(ring.hop_factor) == sorted(ring.hop_factor)
            assert list(ring.launch_s) == sorted(ring.launch_s)
            assert ring.efficiency[0] <= LL_SHARE * ring.efficiency[2] * 1.001
            assert ring.efficiency[1] <= LL128_SHARE * ring.efficiency[2] * 1.001
            assert 0.5 <= ring.hop_factor[0] <= 10
            assert ring.hop_factor[2] <= 50
    for network in coefficients.network.values():
        assert network.protocol_efficiency[0] <= LL_SHARE
        assert network.protocol_efficiency[1] <= LL128_SHARE * 1.001
        assert list(network.hop_factor) == sorted(network.hop_factor)
        assert 0.5 <= network.hop_factor[0] <= 5
        assert network.hop_factor[2] <= 40


def test_a_flag_must_be_true_or_false(tmp_path: Path) -> None:
    path = edited(tmp_path, "simple_only = true", 'simple_only = "yes"')
    with pytest.raises(SpecError, match=r"network.efa-ampere.simple_only = 'yes': must be true or false"):
        load_coefficients(path)


def test_a_file_is_read_into_coefficients_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "comm.toml"
    text = shipped_text()
    path.write_text(text, encoding="utf-8")
    first = load_coefficients(path)
    assert load_coefficients(path) is first
    path.write_text(text.replace("schema = 2", "schema = 1", 1), encoding="utf-8")
    with pytest.raises(SpecError, match="schema = 1: must be 2"):
        load_coefficients(path)
