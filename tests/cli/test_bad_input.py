"""Bad input: exit 2, one line on stderr with field, value, rule and fix, nothing on stdout, nothing written."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from echo_explore.core.home import find_data_file
from tests.cli.support import Cli, predict

NOBODY = 65534


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "tp=8,,pp=12"}, "layout = 'tp=8,,pp=12': has an empty part between commas"),
        ({"layout": "tp=0,pp=12"}, "layout.tp = '0': must be 1 or more"),
        ({"layout": "tp=-8,pp=12"}, "layout.tp = '-8': must be 1 or more"),
        ({"layout": "tp=8,pp=12,tp=8"}, "layout = 'tp=8,pp=12,tp=8': tp is given twice"),
        ({"layout": "tp=8,pq=12"}, "layout = 'tp=8,pq=12': unknown key 'pq'"),
        ({"layout": "tp=eight"}, "layout.tp = 'eight': must be a whole number"),
        ({"layout": ""}, "layout = '': has an empty part"),
        ({"layout": "tp=8,pp=12,vpp=3"}, "num_layers = 96: is not divisible by pp*vpp = 36"),
        ({"layout": "tp=8,pp=10"}, "num_layers = 96: is not divisible by pp*vpp = 10"),
        ({"layout": "tp=5,pp=12"}, "layout.tp = 5: must divide num_attention_heads = 96"),
        ({"layout": "tp=8,pp=1,vpp=4"}, "layout.virtual_pipeline = 4: needs pipeline_parallel above 1"),
        ({"layout": "tp=8,pp=12,vpp=2", "global_batch_size": "30"}, "layout.vpp = 2: 30 micro-batches"),
        ({"global_batch_size": "25", "micro_batch_size": "2"}, "global_batch_size = 25: must be divisible by"),
        ({"layout": "tp=8,pp=12,dp=5"}, "global_batch_size = 24: must be divisible by micro_batch_size * dp"),
        ({"layout": "tp=8,pp=12,dp=10000"}, "num_gpus = 960000: h800-ndr has max_nodes * gpus = 16384"),
        ({"num_gpus": "100"}, "num_gpus = 100: must be a multiple of tp*pp*cp = 96"),
        ({"num_gpus": "0"}, "num_gpus = 0: must be 1 or more"),
        ({"layout": "tp=8,pp=12,dp=2", "num_gpus": "96"}, "layout.dp = 2: tp*pp*cp*dp = 192 but num_gpus = 96"),
        ({"layout": "tp=8,pp=12,ep=2"}, "layout.ep = 2: gpt3-175b has no experts"),
        ({"sequence_length": "4096"}, "sequence_length = 4096: gpt3-175b has 2048 learned positions"),
        ({"precision": "nvfp4"}, "precision = 'nvfp4': H800-SXM5-80GB has no such rate"),
        ({"precision": "bf61"}, "precision = 'bf61': must be 'fp32', 'bf16'"),
        (
            {"recompute": "some"},
            "recompute = 'some': is not one of none, selective, full, full:block:N, full:uniform:N",
        ),
        ({"attention": "flush"}, "attention = 'flush': must be 'flash' or 'unfused'"),
        ({"schedule": "interleaved"}, "schedule = 'interleaved': does not fit 12 stages of 1 chunks; fix: use 1f1b"),
        ({"schedule": "zvb"}, "schedule = 'zvb': is not known; fix: use auto, no-pipelining, 1f1b"),
        ({"schedule": "custom"}, "schedule = 'custom': takes its orders from a file"),
        ({"schedule": "none.csv"}, "schedule = 'none.csv': is not a text file that can be read"),
        ({"framework": "jax"}, "framework = 'jax': is not traced in this version"),
        ({"framework": "jax"}, "transformers-fsdp2 or transformers-ddp"),
        ({"layer_split": "8,8"}, "layer_split = '[8, 8]': needs pp * vpp = 12 entries"),
        ({"layer_split": "8;8"}, "layer-split = '8;8': must be whole numbers with commas"),
        ({"layer_split": ",".join(["9"] * 12)}, "sums to 108, not num_layers = 96"),
        ({"placement": "tp-dp-pp"}, "placement.order = 'tp-dp-pp': must name tp, cp, ep, dp, pp once each"),
        ({"placement": "0-94,5"}, "placement.device_of_rank = 5: ranks 5 and 95 are both mapped to it"),
        ({"placement": "0-7"}, "placement.device_of_rank = '(8 ranks)': the layout has 96; fix: map every rank once"),
        ({"placement": "1-95,99999"}, "placement.device_of_rank = 99999: the cluster has GPUs 0..16383"),
        ({"placement": "0;1"}, "placement = '0;1': '0;1' is no GPU and no range of GPUs"),
        ({"placement": "none.toml"}, "file = 'none.toml': does not exist"),
        ({"fidelity": "fine"}, "fidelity = 'fine': must be kernel or block"),
        ({"what_if": "tensr=0"}, "what-if = 'tensr=0': unknown name 'tensr'; fix: did you mean tensor, "),
        ({"what_if": "bandwith=2x"}, "unknown name 'bandwith'; fix: did you mean bandwidth, nic_bandwidth, link_bandw"),
        ({"what_if": "gpu=h10"}, "what-if = 'gpu=h10': 'h10' is not a known cluster; fix: did you mean h100-ndr"),
        (
            {"what_if": "overlap=much"},
            "what-if = 'overlap=much': the value must be perfect; fix: write overlap=perfect",
        ),
        ({"what_if": "slow_rank=99:1.2"}, "slow_rank"),
        ({"interference": "some"}, "interference = 'some': must be one of none, constant, physical, learned"),
        ({"set": "stack.nccl_algo=Star"}, "algorithm = 'Star': must be one of ring, tree, "),
        ({"set": "stack.nccl_version=new"}, "stack.nccl_version = 'new': must be numbers and points"),
        ({"what_if": "tensor=much"}, "what-if = 'tensor=much': the value must be a number from 0.001 to 1000, or 0"),
        ({"set": "cluster.node.nics"}, "set = 'cluster.node.nics': must be path=value"),
        ({"set": "clutser.node.nics=4"}, "set = 'clutser.node.nics=4': unknown start 'clutser'"),
        ({"set": "cluster.node.nicks=4"}, "node.nicks = 4: is not a known key; fix: did you mean nics, "),
        ({"set": "cluster.node.nic_bandwidth=400"}, "nic_bandwidth = 400: a bare number has no unit"),
        ({"set": "cluster.node.nic_bandwidth=NaN"}, "nic_bandwidth = nan: a bare number has no unit"),
        ({"set": "cluster.node.nic_bandwidth=4 furlongs"}, "unknown unit 'furlongs'"),
        ({"set": "cluster.fabric.oversubscription=0"}, "fabric.oversubscription = 0"),
        ({"set": "cluster.fabric.oversubscription=0.0"}, "fabric.oversubscription = 0.0: must be 1.0 or more"),
        ({"set": "cluster.fabric.latency=-2 us"}, "fabric.latency = '-2 us': must be finite and not negative"),
        ({"set": "cluster.node.link_latency=-1 us"}, "node.link_latency = '-1 us': must be finite and not negative"),
        ({"set": "cluster.node.link_bandwidth=0 GB/s"}, "link_bandwidth_bytes_per_s = 0.0: must be positive"),
        ({"set": "cluster.node.nic_bandwidth=0 Gbit/s"}, "nic_bandwidth_bytes_per_s = 0.0: must be positive"),
        ({"set": "cluster.fabric.topology=none"}, "has no fabric between hosts"),
        ({"set": "recipe.dropout=2"}, "dropout = 2: "),
        ({"set": "recipe.dropout=NaN"}, "dropout = nan: "),
        ({"set": "recipe.lora_targets=[]"}, "lora_targets = '[]': must name a layer"),
        ({"set": 'recipe.lora_targets=["linear_qkv"]'}, "lora_targets = '(given)': needs recipe.lora_rank"),
        (
            {"set": 'recipe.lora_targets=["linear_fc1", "linear_fc1"]'},
            "lora_targets = 'linear_fc1': is given twice; fix: name each layer once",
        ),
        ({"set": "recipe.pad_expert_input=true"}, "recipe.pad_expert_input = '(given)': gpt3-175b has no experts"),
        ({"set": "cluster.node.nic_bandwidth=1e-300 GB/s"}, "must be 0, or from 1e-15 to 1e+30 in SI units"),
        ({"set": "cluster.fabric.latency=1e300 s"}, "fabric.latency = '1e300 s': must be 0, or from 1e-15 to 1e+30"),
        ({"set": "model.num_layers.x=3"}, "num_layers has no keys"),
        ({"global_batch_size": "many"}, "global-batch-size = 'many': must be a whole number"),
        ({"global_batch_size": "0"}, "global_batch_size = 0: must be 1 or more"),
        ({"global_batch_size": "2.5"}, "global-batch-size = '2.5': must be a whole number"),
        ({"model": None}, "model = '(missing)': must be given"),
        ({"calibration": "none.toml"}, "calibration = 'none.toml': does not exist"),
        ({"timeline": "none/step.json"}, "timeline = 'none/step.json': its folder does not exist"),
        ({"timeline": "step.txt"}, "must end in .json, .json.gz, .pftrace or .perfetto-trace"),
        ({"model": "gpt3-176b"}, "model = 'gpt3-176b': is not a known model; fix: did you mean gpt3-175b, "),
        (
            {"cluster": "h800"},
            "cluster = 'h800': is not a known cluster; fix: did you mean h800-ndr, h100-ndr, h200-ndr?",
        ),
        ({"stack": "megatron"}, "stack = 'megatron': is not a known stack; fix: did you mean megatron-"),
        ({"cluster": "./mine.toml"}, "cluster = './mine.toml': does not exist or is not a file"),
        ({"model": "../etc/passwd"}, "model = '../etc/passwd': does not exist or is not a file"),
        ({"model": "a b"}, "model = 'a b': must match [A-Za-z0-9._-]{1,80}"),
    ],
)
def test_predict(cli: Cli, changes: dict[str, str | None], message: str) -> None:
    assert message in cli.refuses(*predict(**changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command = '(missing)': must be given; fix: use predict, "),
        (["predcit"], "command = 'predcit': is not a command of echo-explore; fix: did you mean predict, "),
        (["validate", "step"], "command = 'step': is not a command of echo-explore validate; fix: did you mean steps"),
        (
            predict("--timline", "x"),
            "option = '--timline': is not an option of echo-explore predict; fix: did you mean",
        ),
        (["predict", "--model"], "model = '(missing)': needs a value"),
        (predict("--no-fold=3"), "no-fold = '3': takes no value"),
        (["search"], "space = '(missing)': must be given"),
        (
            ["search", "gpt3_175b_h80"],
            "space = 'gpt3_175b_h80': is not a known space; fix: did you mean gpt3_175b_h800?",
        ),
        (["search", "a", "b"], "arguments = 'search a b': got unexpected extra argument"),
        (["search", "none.toml"], "space = 'none.toml': does not exist"),
        (["search", "gpt3_175b_h800", "--sampler", "gird"], "sampler = 'gird': is not known; fix: use one of auto, "),
        (["search", "gpt3_175b_h800", "--trials", "0"], "trials = 0: must be 1 or more"),
        (["search", "gpt3_175b_h800", "--study", "../x", "--address", "none"], "study = '../x': must match"),
        (
            ["search", "gpt3_175b_h800", "--study", "x", "--resume", "--address", "none"],
            "does not exist, so it cannot be",
        ),
        (["search", "gpt3_175b_h800", "--objective", "speed"], "speed"),
        (["clusters", "--show", "h80"], "cluster = 'h80': is not a known cluster; fix: did you mean h800-ndr, "),
        (["spaces", "--show", "x", "--new", "y"], "new = 'y': cannot be given with --show"),
        (["models", "--new", "none/my.toml"], "new = 'none/my.toml': its folder does not exist"),
        (["validate", "steps", "none.csv", "--out", "p.csv"], "file = 'none.csv': does not exist"),
        (["dashboard"], "study = '(latest)': there is none in "),
        (["dashboard", "--study", "x"], "study = 'x': there is none in "),
        (["dashboard", "--port", "0"], "port = '0': must be greater than or equal to 1"),
        (["trace", *predict()[1:], "--rank", "96", "--out", "g.npz"], "rank = 96: must be 0 to 95"),
        (["trace", *predict()[1:], "--rank", "0", "--out", "g.npz", "--format", "x"], "format = 'x': "),
    ],
)
def test_commands(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in cli.refuses(*arguments)


TWO_STAGES = {"layout": "tp=8,pp=2", "global_batch_size": "2", "schedule": "mine.csv"}


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (
            ("0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"),
            {},
            "schedule = 'mine.csv': deadlocks with 7 passes left: stage 0 at 0B0 for the backward of micro-batch "
            "0 in chunk 1; stage 1 at 1F1 "
            "for the forward of micro-batch 1 in chunk 0; fix: put each of these behind what it waits for",
        ),
        (
            ("0F0,0B0,0F1", "1F0,1B0,1F1,1B1"),
            {},
            "schedule = 'mine.csv, stage 0': micro-batch 1: chunk 0 needs F",
        ),
        (("0F0,0B0,0F1,0B1", "1F0,1B0,1F1"), {}, "fix: write each pass that is missing, and none twice"),
        (
            ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"),
            {"layout": "tp=8,pp=4"},
            "schedule = 'mine.csv': 2 lines: was made for 2 stages, and the layout has pp = 4; fix: use pp=2",
        ),
        (("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"), {"layout": "tp=8,pp=2,vpp=2"}, "the layout has 2 chunks a stage"),
        (("0F0,0B0", "1F0,1B0"), {}, "schedule = 'mine.csv, stage 0': micro-batch 1: chunk 0 needs F"),
    ],
)
def test_schedule_files(cli: Cli, lines: tuple[str, ...], changes: dict[str, str | None], message: str) -> None:
    (cli.folder / "mine.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert message in cli.refuses(*predict(**(TWO_STAGES | changes)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[fabric]", "[fabric", "mine.toml = '(TOML)': is not valid TOML: "),
        ("max_nodes", "max_nodse", "mine.toml: max_nodse = 2048: is not a known key; fix: did you mean max_nodes, "),
        ('"80 GB', '"80 GBB', "unknown unit"),
        ("schema = 1", "schema = 2", "mine.toml: schema = 2: must be 1"),
    ],
)
def test_cluster_file(cli: Cli, old: str, new: str, message: str) -> None:
    shipped = find_data_file("clusters", "h800-ndr")
    assert shipped is not None
    text = shipped.read_text(encoding="utf-8")
    text = text.replace(old, new, 1) if old in text else text.replace("memory =", 'memory = "80 GBB" #', 1)
    (cli.folder / "mine.toml").write_text(text, encoding="utf-8")
    assert message in cli.refuses(*predict(cluster="./mine.toml"))


@pytest.mark.parametrize(
    "arguments",
    [
        predict("--timeline", "taken.json"),
        ["clusters", "--new", "taken.json"],
        ["trace", *predict()[1:], "--rank", "0", "--out", "taken.json"],
        ["validate", "steps", "measured.csv", "--out", "taken.json"],
    ],
    ids=["timeline", "new", "trace", "validate"],
)
def test_nothing_is_overwritten(cli: Cli, arguments: list[str]) -> None:
    (cli.folder / "taken.json").write_text("mine")
    (cli.folder / "measured.csv").write_text("id\n")
    assert "exists, and nothing is overwritten" in cli.refuses(*arguments)


@pytest.mark.parametrize("arguments", [["search", "gpt3_175b_h800", "--address", "none"]], ids=["search"])
def test_a_file_in_place_of_the_state_folder(cli: Cli, arguments: list[str]) -> None:
    cli.home.write_text("")
    assert "must be writable" in cli.refuses(*arguments)


def test_read_only_state_folder() -> None:
    """The real tracer; as another user where the tests run as root, who may write anywhere.

    Not below pytest's own folder, from which any other session of pytest bars that user while this one runs.
    """
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "home"
        (home / "traces").mkdir(parents=True)
        for folder, mode in ((home / "traces", 0o555), (home, 0o555), (Path(name), 0o755)):
            folder.chmod(mode)
        become = f"os.setuid({NOBODY})" if os.getuid() == 0 else "pass"
        arguments = [str(part) for part in predict()]
        code = (
            "import os, sys, echo_explore.cli.main as command, echo_explore.simulate, "
            "echo_explore.tracing.versions as v; "
            f"v.framework_versions(); {become}; sys.argv = ['echo-explore', *{arguments!r}]; command.main()"
        )
        state = os.environ | {"ECHO_EXPLORE_HOME": str(home)}
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=state, cwd=name)
        for folder in (home, home / "traces"):
            folder.chmod(0o755)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ECHO_EXPLORE_HOME = ")
    assert "must be writable (Permission denied); fix: set it to a folder of yours" in line


def test_no_line_break_gets_through(cli: Cli) -> None:
    assert "\\n" in cli.refuses(*predict(layout="tp=8\npp=12"))


def test_a_relative_path_is_not_taken_for_a_name(cli: Cli) -> None:
    (cli.folder / "h800-ndr").write_text("")
    done = cli("clusters", "--show", "h800-ndr")
    assert done.code == 0
    assert Path(done.out.splitlines()[0].removeprefix("# ")).is_absolute()
