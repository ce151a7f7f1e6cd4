"""The sweep over cluster sizes, with the fake evaluator."""

import io
import json

import pytest

from echo_explore.core import SpecError
from echo_explore.planning import CapacityOptions, CapacityPlan, capacity_study, default_space
from echo_explore.specs import SearchSpace
from echo_explore.testing.fakes import FakeFactory
from scripts.capacity_plan import main, parse_sizes

WIDE = default_space(model="gpt3-175b", cluster="h800-ndr", global_batch_size=192, sequence_length=2048)
SPACE = WIDE.model_copy(
    update={"search": WIDE.search.model_copy(update={"virtual_pipeline": (1, 2), "tensor_parallel": (4, 8)})}
)


def _study(space: SearchSpace = SPACE, sizes: tuple[int, ...] = (192, 96, 7, 8)) -> CapacityPlan:
    return capacity_study(
        CapacityOptions(space=space, sizes=sizes, num_tokens=300e9, address="none"),
        factory_of=lambda resolved: FakeFactory(space=resolved),
        stream=io.StringIO(),
    )


def test_rows_add_up() -> None:
    plan = _study()
    assert [row.num_gpus for row in plan.rows] == [7, 8, 96, 192]
    none, small, large, larger = plan.rows
    assert none.best is None
    assert none.reason
    assert small.best is None
    assert small.reason == "no layout fits into memory"
    for row in (large, larger):
        assert row.certified
        assert row.best is not None
        assert row.best.point.num_gpus == row.num_gpus
        assert row.num_steps == -(-300_000_000_000 // (192 * 2048))
        assert row.time_to_train_s == pytest.approx(row.num_steps * row.best.values[0])
        assert row.gpu_hours == pytest.approx(row.num_gpus * row.num_steps * row.best.values[0] / 3600)
    assert larger.best is not None
    assert large.best is not None
    assert larger.best.values < large.best.values
    assert (large.gpu_hours or 0.0) < (larger.gpu_hours or 0.0)


def test_table_and_json() -> None:
    plan = _study(sizes=(96,))
    assert "time to train" in plan.to_text()
    assert "days" in plan.to_text()
    row = json.loads(json.dumps(plan.to_json(), allow_nan=False))["rows"][0]
    assert row["num_gpus"] == 96
    assert row["time_to_train_s"] > 0
    assert row["params"]["num_gpus"] == 96


def test_default_space_of_experts() -> None:
    space = default_space(model="mixtral-8x7b", cluster="h100-ndr", global_batch_size=64, sequence_length=4096)
    assert space.search.expert_parallel == (1, 2, 4, 8)


@pytest.mark.parametrize(("text", "sizes"), [("96", (96,)), ("8, 16", (8, 16)), ("8:64:2", (8, 16, 32, 64))])
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "-8", "8,,16", "8:16", "8:64:1", "64:8:2", "x"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(SpecError, match="sizes"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "300"], "model = '(missing)'"),
        (["gpt3_175b_h800", "--tokens", "300"], "a bare number has no unit"),
        (["gpt3_175b_h800", "--tokens", "1 B tokens", "--model", "gpt-22b"], "stands in the space already"),
        (["gpt3_175b_h800", "--tokens", "1 B tokens", "--sizes", "96:97"], "from:to:factor"),
        (["gpt3_175b_h80", "--tokens", "1 B tokens"], "did you mean gpt3_175b_h800"),
    ],
)
def test_bad_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
