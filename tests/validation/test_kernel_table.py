"""The script that prints the errors of kernels: what it reads of a report of fits, and its rows."""

import pandas as pd
import pytest

from scripts.kernel_table import line, reported

REPORT = """\
| attention GB200 bfloat16 - | 100 | 1.6 % | 2.0 % | 5.4 % | +0.0 % | 2.4 % |
| attention GB200 bfloat16 bfloat16 | 300 | 2.7 % | 4.0 % | 8.3 % | +0.1 % | 4.2 % |
| attention backward GB200 | 36 | 3.0 % | 3.9 % | 9.9 % | +0.2 % | 2.6 % |
| attention, mean over groups | 436 | | 3.3 % | | | |
| attention, this GPU left out: GB200 bfloat16 - | 400 | 9.7 % | 14.7 % | 38.2 % | -0.5 % | 14.4 % |
| attention, this GPU left out:, mean over groups | 400 | | 14.7 % | | | |
| stream A40 float16 | 20 | 2.7 % | 11.0 % | 33.4 % | -0.1 % | 4.0 % |
| stream B200-SXM bf16->fp8 | 10 | 3.1 % | 4.0 % | 7.9 % | -0.3 % | 3.9 % |
"""
SHIPPED = pd.DataFrame({"gpu": ["A40"], "dtype": ["float16"], "rows": [20], "mean": [0.1]})


def test_a_report_is_read_by_gpu_and_data_type() -> None:
    groups = reported(REPORT).set_index(["family", "left", "group"])["mean"]
    assert len(groups) == 5
    assert groups["attention", False, "GB200 bfloat16"] == pytest.approx((100 * 0.02 + 300 * 0.04) / 400)
    assert groups["attention backward", False, "GB200"] == pytest.approx(0.039)
    assert groups["attention", True, "GB200 bfloat16"] == pytest.approx(0.147)


def test_rows_say_what_was_not_run() -> None:
    groups = reported(REPORT)
    stream = line("stream", groups, SHIPPED)
    assert stream == "| norm, elementwise, quantise | 10 % | 7.5% | 11.0% (A40 float16) | 10.0% |  | not run |"
    assert line("fp8", groups, SHIPPED).endswith("| not run |  | 10.0% |  | not run |")
    assert line("forward", groups, SHIPPED).endswith("| 18 % | GB200 bfloat16 14.7% |")
