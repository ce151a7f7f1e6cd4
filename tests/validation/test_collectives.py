import csv
import gzip
from pathlib import Path

import pytest

from echo_explore.comm import HierarchicalModel
from echo_explore.core import SpecError
from echo_explore.validation.collectives import library_name, validate_collectives
from echo_explore.validation.fabrics import FABRICS, fabric_of, links_of_fabric

MODEL = HierarchicalModel.shipped()
COLUMNS = (
    "gpu",
    "fabric",
    "collective",
    "dtype",
    "num_gpus",
    "nodes",
    "size_bytes",
    "latency_us",
    "algo",
    "lib",
    "tool",
)
H100 = ("H100-SXM5-80GB", "NVSwitch NVLink4", "all_reduce", "float16", "8", "1", "536870912")


def table(tmp_path: Path, *rows: tuple[str, ...], name: str = "measured.csv") -> Path:
    path = tmp_path / name
    opener = gzip.open if name.endswith("gz") else open
    with opener(path, "wt", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_predicted_and_scored(tmp_path: Path) -> None:
    measured = table(
        tmp_path,
        # aiconfigurator-core 0.12.0 (Apache-2.0, 2026): 2,111 us and, for 8-bit integers, 2,677 us; vLLM 4.6 us
        (*H100, "2111", "auto", "NCCL 2.29.2", "nccl-tests"),
        (*H100[:3], "int8", *H100[4:], "2677", "auto", "NCCL 2.29.2", "nccl-tests"),
        (*H100[:6], "1024", "4.6", "custom:vLLM_custom_graph", "vllm 0.24.0", "framework custom all-reduce"),
        name="measured.csv.gz",
    )
    out = tmp_path / "predicted.csv"
    scores = validate_collectives(measured, out, MODEL)
    rows = read(out)
    for row, value in zip(rows, (2111, 2677, 4.6), strict=True):
        assert float(row["predicted_us"]) == pytest.approx(value, rel=0.12)
        assert row["reason"] == ""
    assert scores.groups[0][:4] == ("H100-SXM5-80GB", "all_reduce", 2, 1.0)
    assert scores.custom[0][2] == 1
    assert "mean of medians" in scores.text()


def test_what_is_not_known_is_declined_with_a_reason(tmp_path: Path) -> None:
    measured = table(
        tmp_path,
        ("TPU-v5", *H100[1:], "100", "auto", "", ""),
        (*H100[:2], "gossip", *H100[3:], "100", "auto", "", ""),
        (*H100, "100", "star", "", ""),
    )
    out = tmp_path / "predicted.csv"
    scores = validate_collectives(measured, out, MODEL)
    rows = read(out)
    assert [row["predicted_us"] for row in rows] == ["", "", ""]
    assert "no fabric of it is known" in rows[0]["reason"]
    assert "must be one of all_reduce" in rows[1]["reason"]
    assert "algorithm = 'star'" in rows[2]["reason"]
    assert {group[3] for group in scores.groups} == {0.0}


def test_a_tools_launch_is_part_of_what_it_measures(tmp_path: Path) -> None:
    small = (*H100[:6], "1024", "1", "auto", "NCCL")
    measured = table(
        tmp_path, (*small, "nccl-tests"), (*small, "XLA collective_perf_table_gen (1 groups concurrently)")
    )
    out = tmp_path / "predicted.csv"
    validate_collectives(measured, out, MODEL)
    plain, xla = (float(row["predicted_us"]) for row in read(out))
    assert xla == pytest.approx(plain + 1e6 * MODEL.coefficients.tools["xla"].launch_s, rel=1e-3)


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("gpu,fabric\nA,B\n")
    with pytest.raises(SpecError, match="has no column collective, dtype"):
        validate_collectives(path, tmp_path / "out.csv", MODEL)
    with pytest.raises(SpecError, match="cannot be read"):
        validate_collectives(tmp_path / "nowhere.csv", tmp_path / "out.csv", MODEL)


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    for text, rule in (("", "is empty"), (",".join(COLUMNS) + "\n", "has a header but no row")):
        path.write_text(text)
        with pytest.raises(SpecError, match=rule):
            validate_collectives(path, tmp_path / "out.csv", MODEL)


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("num_gpus", "1", "whole number of 2 or more"),
        ("num_gpus", "4.5", "whole number"),
        ("num_gpus", "4096", "at most 8 GPUs"),
        ("nodes", "0", "whole number of 1 or more"),
        ("nodes", "9", "at most num_gpus"),
        ("size_bytes", "0", "above 0"),
        ("size_bytes", "nan", "must be a number"),
        ("dtype", "int3", "must be one of float64"),
        ("latency_us", "abc", "must be a number"),
        ("latency_us", "-1", "above 0, or empty"),
        ("collective", "gossip", "must be one of all_reduce"),
        ("proto", "foo", "must be one of auto"),
        ("lib", "foo 1.0", "must be one of nccl"),
        ("tool", "foo", "must name one of nccl-tests"),
    ],
)
def test_a_cell_that_says_nothing_declines_its_row_alone(column: str, value: str, rule: str, tmp_path: Path) -> None:
    good = dict(zip(COLUMNS, (*H100, "2111", "auto", "NCCL 2.29.2", "nccl-tests"), strict=True)) | {"proto": "auto"}
    path, out = tmp_path / "measured.csv", tmp_path / "predicted.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(good))
        writer.writeheader()
        writer.writerows([good, good | {column: value}, good])
    validate_collectives(path, out, MODEL)
    rows = read(out)
    assert [bool(row["predicted_us"]) for row in rows] == [True, False, True]
    assert [bool(row["reason"]) for row in rows] == [False, True, False]
    assert rows[1]["reason"].startswith(f"{column} = ")
    assert rule in rows[1]["reason"]


def test_rows_of_other_lengths_are_declined_alone(tmp_path: Path) -> None:
    good = (*H100, "2111", "auto", "NCCL 2.29.2", "nccl-tests")
    out = tmp_path / "predicted.csv"
    validate_collectives(table(tmp_path, good, good[:5], (*good, "more")), out, MODEL)
    reasons = [row["reason"] for row in read(out)]
    assert reasons[0] == ""
    assert "has no cell in this column" in reasons[1]
    assert "more cells" in reasons[2]


def test_every_fabric_has_its_constants() -> None:
    for fabric in FABRICS:
        links = links_of_fabric(fabric, MODEL.coefficients)
        assert links.scale_up_bytes_per_s > 0


@pytest.mark.parametrize(
    ("gpu", "fabric", "key"),
    [
        ("H100-SXM5-80GB", "NVSwitch NVLink4 + 32x100G EFA (p5)", "efa-hopper"),
        ("H100-SXM5-80GB", "NVSwitch NVLink4 + 32x100G EFA (p5, k8s)", "efa-hopper-k8s"),
        ("H100-SXM5-80GB", "NVSwitch NVLink4", "infiniband-hopper"),
        ("H100-SXM5-80GB", "NVSwitch", "kineto-h100"),
        ("A100-SXM4-80GB", "pairwise NVLink bridge (others PCIe)", "kineto-a100-bridge"),
        ("A100-SXM4-80GB", "something else", "infiniband-ampere"),
    ],
)
def test_the_text_of_a_fabric_picks_its_constants(gpu: str, fabric: str, key: str) -> None:
    found = fabric_of(gpu, fabric)
    assert found is not None
    assert found.network == key


def test_library_names() -> None:
    assert library_name("NCCL 2.27.3") == "nccl-2.27"
    assert library_name("NCCL (XLA)") == "nccl-2.27"
    assert library_name("oneCCL 2021.17.2") == "oneccl"
