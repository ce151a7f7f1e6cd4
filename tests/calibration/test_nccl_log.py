import re
from pathlib import Path

import pytest

from echo_explore.calibration.nccl_log import read_nccl_log
from echo_explore.core import SpecError
from tests.calibration.logs import END, HEADER, log_text, ranks_text


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.log"
    path.write_text(text)
    return path


def test_a_log_of_several_hosts(tmp_path: Path) -> None:
    rows = read_nccl_log(written(tmp_path, log_text(lambda s: 10 + s / 1e5, hosts=2)))
    assert len(rows) == 21
    assert {(r.collective, r.dtype, r.num_ranks, r.num_hosts) for r in rows} == {("all_reduce", "float", 16, 2)}
    assert rows[0].size_bytes == 1024
    assert rows[0].time_s == rows[0].in_place_s == pytest.approx(10.01e-6)


def test_threads_of_one_process_are_ranks(tmp_path: Path) -> None:
    text = re.sub(r"Pid \d+", "Pid 4242", log_text(lambda s: 10 + s / 1e5)).replace(
        "nThread 1 nGpus 1", "nThread 8 nGpus 1"
    )
    rows = read_nccl_log(written(tmp_path, text))
    assert {(r.num_ranks, r.num_hosts) for r in rows} == {(8, 1)}


def test_lines_in_between_are_passed_over(tmp_path: Path) -> None:
    noise = "node0:1000:1010 [0] NCCL INFO Channel 00/24 : 0 1 2\nnode1: NCCL WARN Call to ibv_modify_qp failed\n"
    rows = read_nccl_log(written(tmp_path, log_text(lambda s: 10 + s / 1e5, between=noise)))
    assert len(rows) == 21


def test_old_formats_without_a_check_or_in_place(tmp_path: Path) -> None:
    text = (
        "./all_gather_perf\n"
        + ranks_text(1, 2, group=False)
        + HEADER
        + "  1024   256   float   20.5  0.05  0.02  0e+00"
        "    19.5  0.05  0.02  0e+00\n  2048   512   half  21.5  0.05  0.02  N/A\n" + END
    )
    rows = read_nccl_log(written(tmp_path, text))
    assert [(r.collective, r.dtype) for r in rows] == [("all_gather", "float"), ("all_gather", "half")]
    assert [r.time_s for r in rows] == pytest.approx([20.5e-6, 21.5e-6])
    assert rows[0].in_place_s == pytest.approx(19.5e-6)
    assert rows[1].in_place_s is None


def test_rows_with_wrong_results_are_left_out(tmp_path: Path) -> None:
    row = "  {size}   256   float  sum  -1  20.5  0.05  0.02  {wrong}   19.5  0.05  0.02  {wrong}\n"
    text = (
        "./all_reduce_perf\n"
        + ranks_text(1, 2)
        + HEADER
        + row.format(size=1024, wrong=3)
        + row.format(size=2048, wrong=0)
        + END
    )
    assert [r.size_bytes for r in read_nccl_log(written(tmp_path, text))] == [2048]


def test_several_tables_in_one_log_and_one_that_failed(tmp_path: Path) -> None:
    good = log_text(lambda s: 10 + s / 1e5, test="reduce_scatter_perf", per_host=4)
    cut = (
        log_text(lambda s: 10 + s / 1e5).partition("# Out of")[0]
        + "node0: Test NCCL failure common.cu:958 'unhandled'\n"
    )
    rows = read_nccl_log(written(tmp_path, cut + good))
    assert {(r.collective, r.num_ranks) for r in rows} == {("reduce_scatter", 4)}


def test_a_failed_run_names_its_failure(tmp_path: Path) -> None:
    text = ranks_text(1, 8) + "node0: Test CUDA failure common.cu:303 'out of memory'\n"
    with pytest.raises(SpecError, match=r"run.log: line 11 = .*Test CUDA failure.*the run failed"):
        read_nccl_log(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no table"),
        ("hello\n", "holds no table"),
        (ranks_text(1, 2) + HEADER + "  8 2 float sum -1 2.0 0.0 0.0 0 2.0 0.0 0.0 0\n", "give --collective"),
        ("all_reduce_perf\n" + HEADER + "  8 2 float sum -1 2.0 0.0 0.0 0 2.0 0.0 0.0 0\n", "does not list its ranks"),
    ],
)
def test_logs_without_what_is_needed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_nccl_log(written(tmp_path, text))


def test_the_collective_can_be_given(tmp_path: Path) -> None:
    text = ranks_text(1, 2) + HEADER + "  8 2 float sum -1 2.0 0.0 0.0 0 2.0 0.0 0.0 0\n" + END
    assert read_nccl_log(written(tmp_path, text), collective="all_gather")[0].collective == "all_gather"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere.log.*cannot be read"):
        read_nccl_log(tmp_path / "nowhere.log")


@pytest.mark.parametrize("mark", ["[1,0]<stdout>:", "[prterun-node0-77@1,0]<stdout>: ", "0: ", " 0: ", "[0] "])
def test_marks_of_launchers_are_read_over(mark: str, tmp_path: Path) -> None:
    text = log_text(lambda s: 10 + s / 1e5, hosts=2)
    plain = read_nccl_log(written(tmp_path, text))
    marked = "".join(f"{mark}{line}\n" for line in text.splitlines())
    assert read_nccl_log(written(tmp_path, marked)) == plain


@pytest.mark.parametrize("after", ["", log_text(lambda s: 10 + s / 1e5, per_host=4)], ids=["alone", "before another"])
def test_a_table_that_just_stops_is_refused(after: str, tmp_path: Path) -> None:
    cut = log_text(lambda s: 10 + s / 1e5).partition("# Out of")[0]
    with pytest.raises(SpecError, match=r"line 14 = 'table': stops after 21 rows, without its closing line"):
        read_nccl_log(written(tmp_path, cut + after))


def test_a_log_whose_checks_all_failed_says_so(tmp_path: Path) -> None:
    row = "  1024   256   float  sum  -1  20.5  0.05  0.02  7   19.5  0.05  0.02  7\n"
    text = "./all_reduce_perf\n" + ranks_text(1, 2) + HEADER + row + row + END
    with pytest.raises(SpecError, match=r"all 2 rows failed their check \(#wrong above 0\)"):
        read_nccl_log(written(tmp_path, text))


def test_processes_that_each_run_alone_are_named(tmp_path: Path) -> None:
    text = log_text(lambda s: 10 + s / 1e5, per_host=1)
    rank = next(line for line in text.splitlines() if "Rank" in line)
    with pytest.raises(SpecError, match=r"'Rank 0': is listed twice.*build the tests with MPI=1"):
        read_nccl_log(written(tmp_path, text.replace(rank, "\n".join([rank] * 8))))


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_cause_of_a_failure_is_named(order: int, tmp_path: Path) -> None:
    lines = [
        "node0: Test NCCL failure all_reduce.cu:44 'unhandled cuda error / '",
        " .. node0 pid 1000: Test failure common.cu:377",
    ][::order]
    with pytest.raises(SpecError, match="unhandled cuda error"):
        read_nccl_log(written(tmp_path, ranks_text(1, 8) + "\n".join(lines) + "\n"))


def test_the_gpus_are_read(tmp_path: Path) -> None:
    text = log_text(lambda s: 10 + s / 1e5).replace("] NVIDIA", "] NVIDIA H100 80GB HBM3")
    assert {row.devices for row in read_nccl_log(written(tmp_path, text))} == {("NVIDIA H100 80GB HBM3",)}
