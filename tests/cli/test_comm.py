"""`comm`, `calibrate nccl-tests`, `validate collectives`."""

import csv
import json

from tests.calibration.logs import log_text
from tests.cli.support import Cli

COMM = ("comm", "--cluster", "h100-ndr", "--collective", "all_reduce", "--ranks", "8", "--bytes", "1KiB:1GiB")


def test_bandwidth_over_size_names_what_runs(cli: Cli) -> None:
    done = cli(*COMM)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) == 2 + 21
    assert "ring/LL" in lines[2]
    assert "nvls/Simple" in lines[-1]


def test_json_is_one_object(cli: Cli) -> None:
    done = cli(*COMM, "--json", "--dtype", "int8")
    facts = json.loads(done.out)
    assert facts["num_ranks"] == 8
    assert len(facts["points"]) == 21
    last = facts["points"][-1]
    assert last["chosen"] == "ring/Simple"
    assert last["bus_bandwidth_bytes_per_s"] > 1e11
    assert last["num_sms"] == last["plan"]["num_channels"]


def test_an_algorithm_can_be_forced_and_plotted(cli: Cli) -> None:
    done = cli(*COMM, "--algo", "ring", "--proto", "LL128", "--plot", "curve.svg")
    assert done.code == 0
    assert all("ring/LL128" in line for line in done.out.splitlines()[2:])
    text = (cli.folder / "curve.svg").read_text()
    assert text.startswith("<svg ")
    assert text.count("<polyline") == 5  # chosen, three protocols of rings, the switch


def test_models_beside_nccls_are_named(cli: Cli) -> None:
    vllm = json.loads(cli(*COMM, "--library", "vllm-0.19", "--json").out)["points"]
    assert [vllm[i]["chosen"] for i in (0, 11, -1)] == ["one-shot/own", "in-switch/own", "nvls/Simple"]
    forced = cli(*COMM, "--library", "trtllm", "--algo", "two-shot").out.splitlines()[2:]
    assert all("two-shot/own" in line for line in forced)
    halving = cli(*COMM, "--algo", "halving-doubling").out.splitlines()
    assert all("halving-doubling/Simple" in line for line in halving[2:])
    assert len({len(line) for line in halving[1:]}) == 1
    rccl = cli("comm", "--cluster", "mi300x-roce", *COMM[3:], "--library", "rccl", "--algo", "Ring,Tree")
    assert all("ring/" in line for line in rccl.out.splitlines()[2:])


def test_comm_refuses_in_one_line(cli: Cli) -> None:
    def refused(**changes: str) -> str:
        options = dict(zip(COMM[1::2], COMM[2::2], strict=True)) | {f"--{k}": v for k, v in changes.items()}
        return cli.refuses("comm", *(part for pair in options.items() for part in pair))

    assert "collective = 'gossip'" in refused(collective="gossip")
    assert "bytes = '1024': a bare number has no unit" in refused(bytes="1024")
    assert "needs 0 < first <= last" in refused(bytes="1GiB:1KiB")
    assert "ranks = 1" in refused(ranks="1")
    assert "algorithm = 'star'" in refused(algo="star")
    assert "does not exist for this collective" in refused(algo="tree")
    assert "library = 'mpi'" in refused(library="mpi")
    assert "dtype = 'fp7'" in refused(dtype="fp7")
    assert "algorithm = 'ring,star'" in refused(algo="ring,star")
    assert "algorithm = 'one-shot': is an all-reduce of an inference framework; fix: give --library" in refused(
        algo="one-shot"
    )
    assert "'halving-doubling/any protocol': does not exist" in refused(algo="halving-doubling", ranks="6")


def test_a_calibration_of_logs_is_used(cli: Cli) -> None:
    (cli.folder / "run.log").write_text(log_text(lambda size: 30.0 + 1.75 * size / 100e9 * 1e6))
    done = cli("calibrate", "nccl-tests", "run.log", "--cluster", "h100-ndr", "--out", "mine.toml")
    assert done.code == 0
    assert "all_reduce" in done.out
    before, after = (
        json.loads(cli(*COMM, "--json", *more).out)["points"][-1]["time_s"]
        for more in ((), ("--calibration", "mine.toml"))
    )
    assert after > 1.5 * before
    assert "the run failed" in _failed(cli)


def _failed(cli: Cli) -> str:
    (cli.folder / "bad.log").write_text("node0: Test NCCL failure common.cu:958\n")
    return cli.refuses("calibrate", "nccl-tests", "bad.log", "--cluster", "h100-ndr")


def test_a_log_without_a_table_is_named(cli: Cli) -> None:
    (cli.folder / "empty.log").write_text("node0: NCCL INFO Bootstrap : Using eth0\n")
    assert "holds no table" in cli.refuses("calibrate", "nccl-tests", "empty.log", "--cluster", "h100-ndr")


def test_measured_collectives_are_scored(cli: Cli) -> None:
    # NVIDIA/nccl-tests issue 309 (2025), 8 hosts of 8 H100 on 8 x 400 Gbit/s: 26,438 us for 4 GiB.
    with (cli.folder / "measured.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("gpu", "fabric", "collective", "dtype", "num_gpus", "nodes", "size_bytes", "latency_us", "algo"),
                ("H100-SXM5-80GB", "8x400G", "all_reduce", "float32", 64, 8, 2**32, 26438, "auto"),
            ]
        )
    done = cli("validate", "collectives", "measured.csv", "--out", "predicted.csv")
    assert done.code == 0
    assert "H100-SXM5-80GB" in done.out
    with (cli.folder / "predicted.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert abs(float(row["predicted_us"]) / 26438 - 1) < 0.2
