"""`echo-explore trace --script`: what it prints, and how it refuses."""

import json
import re
from pathlib import Path

import pytest

from echo_explore.graph import OpClass, load_graph
from tests.cli.support import Cli
from tests.shared_service import SharedService, lend

pytestmark = pytest.mark.torch
EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_step.py"
ROOT = ["trace", "--script"]


@pytest.fixture(autouse=True)
def _one_tracing_process(service: SharedService, monkeypatch: pytest.MonkeyPatch) -> None:
    lend(service, monkeypatch)


def test_the_graph_of_a_script_is_written(cli: Cli) -> None:
    result = cli(*ROOT, f"{EXAMPLE}:build", "--world", "16", "--rank", "3", "--out", "step.npz")
    assert result.code == 0
    assert "2 collectives" in result.out
    assert load_graph(Path("step.npz")).is_collective.sum() == 2


def test_a_raising_script_shows_its_traceback(cli: Cli) -> None:
    Path("mine.py").write_text("def build():\n    raise ValueError('boom')\n", encoding="utf-8")
    result = cli(*ROOT, "mine.py:build", "--world", "16", "--rank", "3", "--out", "step.npz")
    assert result.code == 2
    assert "ValueError: boom" in result.err
    assert result.err.splitlines()[-1].startswith("error: script = mine.py:build: raised ValueError as rank 3 of 16")


STEP = """
import helper

def build():
    return step

def step():
    helper.work({})
"""


def test_a_step_that_raises_in_another_file_shows_both(cli: Cli) -> None:
    Path("mine.py").write_text(STEP, encoding="utf-8")
    Path("helper.py").write_text("def work(given):\n    return given['loss']\n", encoding="utf-8")
    result = cli(*ROOT, "mine.py:build", "--world", "1024", "--rank", "517", "--out", "step.npz")
    assert result.code == 2
    assert "KeyError: 'loss'" in result.err
    for line in ('mine.py", line 8, in step', "helper.work({})", 'helper.py", line 2, in work', "given['loss']"):
        assert line in result.err
    assert result.err.splitlines()[-1].startswith("error: script = mine.py:build: raised KeyError as rank 517 of 1024")
    assert not Path("step.npz").exists()


def test_an_unknown_wait_of_the_host_names_its_line_and_the_oracle_to_add(cli: Cli) -> None:
    text = STEP.replace("helper.work({})", "assert torch.ones(4, device='cuda').sum().item() == 4")
    Path("mine.py").write_text(text.replace("helper", "torch"), encoding="utf-8")
    arguments = [*ROOT, "mine.py:build", "--world", "8", "--rank", "3", "--out", "step.npz"]
    told = cli.refuses(*arguments)
    assert "item() at mine.py:8 = (unknown): its result is known to a GPU only" in told
    assert 'fix: add ECHO_ORACLES = {"mine.py:step": VALUE} to the script' in told
    Path("mine.py").write_text(
        text.replace("helper", "torch") + 'ECHO_ORACLES = {"mine.py:step": 4}\n', encoding="utf-8"
    )
    assert cli(*arguments).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py", "--world", "8"], "script = 'mine.py': must be FILE.py:function"),
        (["no.py:build", "--world", "8"], "script = 'no.py': does not exist"),
        ([f"{EXAMPLE}:build"], "world = '(missing)': must be 1 or more"),
        ([f"{EXAMPLE}:build", "--world", "1000000000"], "world = 1000000000: must be at most 1,048,576"),
        ([f"{EXAMPLE}:build", "--world", "8", "--model", "gpt3-175b"], "model = 'gpt3-175b': says nothing beside"),
        ([f"{EXAMPLE}:build", "--world", "8", "--recompute", "full"], "recompute = 'full': says nothing beside"),
        ([f"{EXAMPLE}:build", "--world", "8", "--framework", "ddp"], "framework = 'ddp': says nothing beside"),
        ([f"{EXAMPLE}:build", "--world", "8", "--set", "recipe.dropout=true"], "set = "),
    ],
)
def test_bad_input(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli(*ROOT, *arguments, "--rank", "0", "--out", "step.npz")
    assert result.code == 2
    assert message in result.err


def test_a_job_needs_a_model(cli: Cli) -> None:
    result = cli("trace", "--rank", "0", "--out", "step.npz")
    assert (result.code, "model = '(missing)': must be given" in result.err) == (2, True)


@pytest.mark.parametrize("framework", ["torchtitan", "fsdp2", "ddp"])
def test_a_whole_rank_of_plain_pytorch_is_written(cli: Cli, framework: str) -> None:
    small = [f"--set=model.{name}" for name in ("num_layers=2", "hidden_size=256", "vocab_size=1000")]
    small += [
        "--set=model.num_attention_heads=4",
        "--set=model.num_key_value_heads=4",
        "--set=model.ffn_hidden_size=512",
    ]
    job = ["--layout", "tp=1", "--num-gpus", "8", "--global-batch-size", "16", "--sequence-length", "128"]
    result = cli(
        "trace", "--model", "llama2-7b", *small, *job, f"--framework={framework}", "--rank=5", "--out=rank.npz"
    )
    assert result.code == 0, result.err
    graph = load_graph(Path("rank.npz"))
    assert set(graph.micro_batch.tolist()) == {-1, 0, 1}
    assert (graph.op_class == OpClass.OPTIMIZER).any()


CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
JOB = ["--model", "config.json", "--framework", "transformers-fsdp2", "--layout", "tp=1", "--global-batch-size", "16"]


def test_a_script_and_its_graph_have_one_step_time(cli: Cli) -> None:
    traced = cli(*ROOT, f"{EXAMPLE}:build", "--world", "16", "--rank", "0", "--out", "step.npz")
    assert traced.code == 0
    common = ["--cluster", "a100-80gb-hdr", "--json"]
    script = json.loads(cli("predict", "--script", f"{EXAMPLE}:build", "--world", "16", *common).out)
    graph = json.loads(cli("predict", "--graph", "step.npz", *common).out)
    assert script["step_time_s"] == graph["step_time_s"] > 0
    assert script["num_ranks"] == 16
    assert script["breakdown"]["data_s"] > 0


def test_a_rank_of_a_job_has_a_step_time_in_both_formats(cli: Cli) -> None:
    job = ["--model", "llama2-7b", "--layout", "tp=8,dp=2,sp=1", "--cluster", "a100-80gb-hdr"]
    job += ["--global-batch-size", "8", "--micro-batch-size", "4"]
    assert cli("trace", *job, "--rank", "3", "--out", "step.et", "--format", "chakra").code == 0
    assert cli("convert", "step.et", "--out", "step.npz").code == 0
    given = ["--cluster", "a100-80gb-hdr", "--stack", "megatron-core", "--json"]
    one, two = (json.loads(cli("predict", "--graph", name, *given).out) for name in ("step.et", "step.npz"))
    assert one["step_time_s"] == two["step_time_s"] > 0
    assert (one["num_ranks"], one["breakdown"]["tensor_s"] > 0) == (16, True)


def test_a_stage_of_a_pipeline_is_not_priced_alone(cli: Cli) -> None:
    job = ["--model", "llama2-7b", "--layout", "tp=8,pp=4,dp=1,sp=1", "--cluster", "a100-80gb-hdr"]
    job += ["--global-batch-size", "4", "--micro-batch-size", "1"]
    assert cli("trace", *job, "--rank", "9", "--out", "step.npz").code == 0
    assert "'receive c10d.recv_ (and 15 more)': ranks 1 and 9 do it together" in cli.refuses(
        "predict", "--graph", "step.npz", "--cluster", "a100-80gb-hdr"
    )


def test_a_config_of_transformers_has_a_step_time(cli: Cli) -> None:
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = cli("predict", *JOB, "--num-gpus", "8", "--micro-batch-size", "2", "--cluster", "h100-ndr")
    assert done.code == 0, done.err
    assert "llama of transformers under fsdp2 on 8 x" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", f"{EXAMPLE}:build", "--world", "8", "--model", "x"], "model = 'x': says nothing beside --script"),
        (["--script", f"{EXAMPLE}:build", "--graph", "a.npz"], "says the same as --script"),
        (["--script", f"{EXAMPLE}:build", "--world", "8", "--precision", "fp8"], "precision = 'fp8': says nothing"),
        (["--graph", "a.npz", "--no-fold"], "no-fold = True: says nothing beside --script"),
        (["--graph", "a.npz", "--world", "8"], "is written in the graph file"),
        (["--graph", "a.npz"], "a.npz"),
        (["--world", "8"], "is the size of a script's job"),
        (["--layout", "tp=1"], "must be given; fix: add --model"),
        ([*JOB, "--micro-batch-size", "3"], "must be a multiple of dp \\* micro-batch"),
        ([*JOB, "--micro-batch-size", "1", "--layout", "pp=2"], "layout.pp = 2: is not traced for transformers"),
        (
            [*JOB, "--micro-batch-size", "1", "--layout", "tp=2,sp=1"],
            "layout.sp = 1: is not in the plans of transformers",
        ),
        ([*JOB, "--micro-batch-size", "1", "--layout", "tp=2,etp=2"], "layout.etp = 2: is not traced for transformers"),
        (
            [*JOB, "--micro-batch-size", "1", "--layout", "tp=2,ep=3", "--num-gpus", "6", "--global-batch-size=18"],
            "layout.ep = 3: must be a multiple",
        ),
    ],
)
def test_bad_input_of_predictions(cli: Cli, arguments: list[str], message: str) -> None:
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = cli("predict", *arguments, "--cluster", "h100-ndr")
    assert done.code == 2
    assert re.search(message, done.err), done.err
