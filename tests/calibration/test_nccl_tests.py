from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_explore.calibration.link_checks import check_devices
from echo_explore.calibration.nccl_log import read_nccl_log
from echo_explore.calibration.nccl_tests import calibrate_links
from echo_explore.comm import CollectiveRequest, HierarchicalModel
from echo_explore.comm.coefficient_file import shipped_coefficients
from echo_explore.core import SpecError
from echo_explore.graph import Collective
from echo_explore.specs import load_cluster
from echo_explore.topology import GroupShape
from tests.calibration.logs import log_text

H100 = load_cluster("h100-ndr")


def rows_of(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "run.log"
    path.write_text(text)
    return read_nccl_log(path)


def test_a_slower_fabric_is_found_and_can_be_used(tmp_path: Path) -> None:
    def slower(size: float) -> float:
        return 25.0 + 1.75 * size / 150e9 * 1e6

    rows = rows_of(tmp_path, log_text(slower))
    found = calibrate_links(rows, H100, shipped_coefficients(), num_starts=1)
    errors = np.array([size.error for size in found.sizes])
    assert errors.mean() < 0.12
    assert errors.mean() < 0.5 * np.mean([size.before for size in found.sizes])
    path = tmp_path / "mine.toml"
    path.write_text(found.text)
    model = HierarchicalModel.from_file(path)
    request = CollectiveRequest(
        collective=Collective.ALL_REDUCE, message_bytes=2**30, group=GroupShape(num_ranks=8, ranks_per_node=8)
    )
    assert model.collective_time(request, H100).time_s == pytest.approx(slower(2**30) * 1e-6, rel=0.1)


def test_rows_over_hosts_give_the_network(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, log_text(lambda s: 60.0 + s / 80e9 * 1e6, hosts=2))
    found = calibrate_links(rows, H100, shipped_coefficients(), num_starts=1)
    assert "[comm.network.infiniband-hopper]" in found.text
    assert "scale_up" not in found.text
    assert {(s.num_ranks, s.num_hosts) for s in found.sizes} == {(16, 2)}


def test_logs_of_other_machines_are_refused(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, log_text(lambda s: 10 + s / 1e5, per_host=16))
    with pytest.raises(SpecError, match="16 ranks on 1 hosts, but h100-ndr has 8 GPUs a host"):
        calibrate_links(rows, H100, shipped_coefficients())
    rows = rows_of(tmp_path, log_text(lambda s: 10 + s / 1e5, per_host=1))
    with pytest.raises(SpecError, match=r"all are of one rank.*build the tests with MPI=1"):
        calibrate_links(rows, H100, shipped_coefficients())
    with pytest.raises(SpecError, match="none is of all_reduce"):
        calibrate_links([replace(row, collective="gather") for row in rows], H100, shipped_coefficients())


@pytest.mark.parametrize(
    ("device", "cluster"),
    [
        ("NVIDIA A100-SXM4-80GB", "h100-ndr"),
        ("AMD Instinct MI300X", "h100-ndr"),
        ("NVIDIA GeForce RTX 4090", "h100-ndr"),
        ("NVIDIA H100 PCIe", "h100-ndr"),
        ("NVIDIA H100 80GB HBM3", "v100-25gbe"),
        ("NVIDIA H100 80GB HBM3", "h800-ndr"),
        ("NVIDIA GB200", "b200-ndr"),
    ],
)
def test_a_log_of_another_gpu_is_refused(device: str, cluster: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, log_text(lambda s: 25 + s / 1e5).replace("] NVIDIA", f"] {device}"))
    with pytest.raises(SpecError, match=f"log = '{device}': is not the GPU of {cluster}.*give --cluster"):
        calibrate_links(rows, load_cluster(cluster), shipped_coefficients())


@pytest.mark.parametrize(
    ("device", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-ndr"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-hdr"),
        ("Tesla V100-SXM2-32GB", "v100-25gbe"),
        ("NVIDIA B200", "b200-ndr"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("AMD Instinct MI300X OAM", "mi300x-roce"),
        ("gfx942", "mi300x-roce"),
        ("", "h100-ndr"),
    ],
)
def test_the_names_that_drivers_give_are_known(device: str, cluster: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, log_text(lambda s: 25 + s / 1e5).replace("] NVIDIA", f"] {device}"))
    check_devices(rows, load_cluster(cluster))


@pytest.mark.parametrize(
    ("cluster", "hosts", "bytes_per_s", "most"),
    [("h100-ndr", 1, 2300e9, 837), ("v100-25gbe", 1, 200e9, 159), ("h100-ndr", 2, 600e9, 797)],
)
def test_more_than_the_links_carry_is_refused(
    cluster: str, hosts: int, bytes_per_s: float, most: int, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path, log_text(lambda s: 25 + s / bytes_per_s * 1e6, hosts=hosts))
    with pytest.raises(SpecError, match=rf"bus bandwidth = .*{cluster} carry at most {most} GB/s"):
        calibrate_links(rows, load_cluster(cluster), shipped_coefficients())


def test_a_fit_that_explains_nothing_is_refused(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, log_text(lambda s: 3e7 / s if s < 1e6 else 5e5 * (1 + (s > 1e8) * 9)))
    with pytest.raises(SpecError, match=r"error of the fit = .*above 50%"):
        calibrate_links(rows, H100, shipped_coefficients(), num_starts=1)


def test_in_place_times_are_taken_where_they_are_asked_for(tmp_path: Path) -> None:
    rows = [replace(row, in_place_s=None) for row in rows_of(tmp_path, log_text(lambda s: 10 + s / 1e5))]
    with pytest.raises(SpecError, match="none has a time in place"):
        calibrate_links(rows, H100, shipped_coefficients(), in_place=True)


@pytest.mark.parametrize(
    ("test", "kind"), [("broadcast_perf", Collective.BROADCAST), ("reduce_perf", Collective.REDUCE)]
)
def test_chains_are_fitted_too(test: str, kind: Collective, tmp_path: Path) -> None:
    def slower(size: float) -> float:
        return 30.0 + size / 120e9 * 1e6

    rows = rows_of(tmp_path, log_text(slower, test=test))
    found = calibrate_links(rows, H100, shipped_coefficients(), num_starts=1)
    assert found.num_skipped == 0
    path = tmp_path / "mine.toml"
    path.write_text(found.text)
    request = CollectiveRequest(collective=kind, message_bytes=2**30, group=GroupShape(num_ranks=8, ranks_per_node=8))
    time_s = HierarchicalModel.from_file(path).collective_time(request, H100).time_s
    assert time_s == pytest.approx(slower(2**30) * 1e-6, rel=0.1)


def test_rccl_logs_calibrate_amd_hosts(tmp_path: Path) -> None:
    cluster = load_cluster("mi300x-roce")
    text = log_text(lambda s: 40.0 + s / 170e9 * 1e6).replace(" Group  0", "")
    found = calibrate_links(
        rows_of(tmp_path, text), cluster, shipped_coefficients(), num_starts=1, library_name="rccl", source="rccl-tests"
    )
    assert f"[comm.scale_up.{cluster.node.link}-{cluster.device.calibration}]" in found.text
    assert np.mean([size.error for size in found.sizes]) < 0.1
