"""What is wrong with a file or an argument is told in one line: field, value, rule, fix."""

from pathlib import Path
from typing import Any, get_args

import pytest

from echo_explore.core import PlacementError, SpecError, UnitError
from echo_explore.core.home import find_data_file
from echo_explore.graph.kinds import OpClass
from echo_explore.specs import (
    JobOptions,
    ParallelConfig,
    candidate_of,
    job_options,
    load_cluster,
    load_model,
    load_space,
    load_stack,
    parse_layout,
)
from echo_explore.specs.recipe import OpClassName

CLUSTER = "h100-ndr"
JOB: dict[str, Any] = {
    "model": "gpt3-175b",
    "cluster": "h800-ndr",
    "global_batch_size": 192,
    "micro_batch_size": 1,
}


def changed(tmp_path: Path, kind: str, name: str, old: str, new: str) -> str:
    """A copy of a shipped file with one line changed."""
    path = find_data_file(kind, name)  # type: ignore[arg-type]
    assert path is not None
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(old)]
    assert lines, f"{name} has no line that starts with {old!r}"
    copy = tmp_path / f"{name}.toml"
    copy.write_text(text.replace(lines[0], new, 1), encoding="utf-8")
    return str(copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "num_sms",
            "num_smss = 132",
            "h100-ndr.toml: device.num_smss = 132: is not a known key; fix: did you mean num_sms, name, memory?",
        ),
        (
            "power",
            'power = "700 W"\npwoer = "1 W"',
            "h100-ndr.toml: device.pwoer = '1 W': is not a known key; fix: did you mean power, peak, memory?",
        ),
        (
            "nic_bandwidth",
            'nic_bandwidth = "400"',
            "h100-ndr.toml: node.nic_bandwidth = '400': a bare number has no unit, and a unit is due here; "
            'fix: write for example nic_bandwidth = "50 GB/s"',
        ),
        (
            "nic_bandwidth",
            "nic_bandwidth = 400",
            "h100-ndr.toml: node.nic_bandwidth = 400: a bare number has no unit, and a unit is due here; "
            'fix: write for example nic_bandwidth = "50 GB/s"',
        ),
        (
            "nic_bandwidth",
            'nic_bandwidth = "400 furlongs"',
            "h100-ndr.toml: node.nic_bandwidth = '400 furlongs': unknown unit 'furlongs'; "
            "fix: use one of B/s, kB/s, KB/s, MB/s, GB/s, TB/s, PB/s, KiB/s, MiB/s, GiB/s, TiB/s, bit/s",
        ),
        (
            "nic_bandwidth",
            'nic_bandwidth = "400 GB"',
            "h100-ndr.toml: node.nic_bandwidth = '400 GB': 'GB' measures bytes, not bytes_per_s; "
            "fix: use one of B/s, kB/s, KB/s, MB/s, GB/s, TB/s, PB/s, KiB/s, MiB/s, GiB/s, TiB/s, bit/s",
        ),
        (
            "nic_bandwidth",
            "nic_bandwidth = nan",
            "h100-ndr.toml: node.nic_bandwidth = nan: a bare number has no unit, and a unit is due here; "
            'fix: write for example nic_bandwidth = "50 GB/s"',
        ),
        (
            "nic_bandwidth",
            'nic_bandwidth = "NaN GB/s"',
            "h100-ndr.toml: node.nic_bandwidth = 'NaN GB/s': is not a number with a unit; "
            'fix: write for example nic_bandwidth = "50 GB/s"',
        ),
        (
            "nic_bandwidth",
            'nic_bandwidth = "1e999 GB/s"',
            "h100-ndr.toml: node.nic_bandwidth = '1e999 GB/s': must be finite and not negative; "
            'fix: write for example nic_bandwidth = "50 GB/s"',
        ),
        (
            "nic_bandwidth",
            'nic_bandwidth = "-400 Gbit/s"',
            "h100-ndr.toml: node.nic_bandwidth = '-400 Gbit/s': must be finite and not negative; "
            'fix: write for example nic_bandwidth = "50 GB/s"',
        ),
        (
            "nic_bandwidth",
            'nic_bandwidth = "0 Gbit/s"',
            "h100-ndr.toml: node.nic_bandwidth_bytes_per_s = 0.0: must be positive; fix: correct the value",
        ),
        (
            "bf16",
            "bf16 = 989",
            "h100-ndr.toml: device.peak.bf16 = 989: a bare number has no unit, and a unit is due here; "
            'fix: write for example bf16 = "989 TFLOP/s"',
        ),
        (
            "bf16",
            'bf61 = "989 TFLOP/s"',
            "h100-ndr.toml: device.peak.bf61 = 989000000000000.0: is not a precision; "
            "fix: use one of fp32, tf32, bf16, fp16, fp8, mxfp8, nvfp4",
        ),
        ("gpus", "gpus = 0", "h100-ndr.toml: node.gpus = 0: must be 1 or more; fix: give a larger number"),
        ("max_nodes", "max_nodes = -3", "h100-ndr.toml: max_nodes = -3: must be 1 or more; fix: give a larger number"),
        (
            "max_nodes",
            'max_nodes = "8"',
            "h100-ndr.toml: max_nodes = '8': must be a whole number; fix: write it as a whole number",
        ),
        (
            "max_nodes",
            "max_nodes = 8.5",
            "h100-ndr.toml: max_nodes = 8.5: must be a whole number; fix: write it as a whole number",
        ),
        (
            "oversubscription",
            "oversubscription = nan",
            "h100-ndr.toml: fabric.oversubscription = nan: must be a finite number; fix: write it as a finite number",
        ),
        (
            "oversubscription",
            "oversubscription = 0.5",
            "h100-ndr.toml: fabric.oversubscription = 0.5: must be 1.0 or more; fix: give a larger number",
        ),
        (
            "kind",
            'kind = "infinband"',
            "h100-ndr.toml: fabric.kind = 'infinband': must be 'infiniband', 'roce', 'ethernet', 'efa' or 'none'; "
            "fix: use one of them",
        ),
        (
            "gpus",
            "gpus = 8\nscale_up_gpus = 12",
            "h100-ndr.toml: node.scale_up_gpus = 12: must be a multiple of node.gpus = 8; fix: correct one of them",
        ),
        (
            "schema",
            "schema = 2",
            "h100-ndr.toml: schema = 2: must be 1, the only version so far; fix: write schema = 1 at the top",
        ),
        (
            "schema",
            "",
            "h100-ndr.toml: schema = None: must be 1, the only version so far; fix: write schema = 1 at the top",
        ),
    ],
)
def test_cluster_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load_cluster(changed(tmp_path, "clusters", CLUSTER, old, new))
    assert str(error.value) == message


def test_toml_typo_names_line_and_column(tmp_path: Path) -> None:
    path = changed(tmp_path, "clusters", CLUSTER, "max_nodes", "max_nodes = = 3")
    with pytest.raises(
        SpecError, match=r"is not valid TOML: Invalid value \(at line 5, column 13\); fix: correct"
    ) as error:
        load_cluster(path)
    assert "\n" not in str(error.value)


def test_repeated_key(tmp_path: Path) -> None:
    path = changed(tmp_path, "clusters", CLUSTER, "max_nodes", "max_nodes = 3\nmax_nodes = 4")
    with pytest.raises(SpecError, match=r"is not valid TOML: Cannot overwrite a value \(at line 6"):
        load_cluster(path)


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="is not UTF-8: invalid start byte; fix: save it as UTF-8"):
        load_cluster(str(path))


@pytest.mark.parametrize("name", ["./absent.toml", "absent/config.json", "~nobody-here/x.toml"])
def test_missing_file(name: str) -> None:
    with pytest.raises(SpecError, match="does not exist or is not a file; fix: give a path or a name of `models`"):
        load_model(name)


def test_wrong_name_gives_the_three_nearest() -> None:
    with pytest.raises(SpecError) as error:
        load_cluster("h100-ndrr")
    expected = "cluster = 'h100-ndrr': is not a known cluster; fix: did you mean h100-ndr, h200-ndr, b200-ndr?"
    assert str(error.value) == expected.replace("b200-ndr?", str(error.value).rsplit(", ", 1)[1])
    assert str(error.value).count(", ") == 2


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "x" * 81])
def test_names_that_are_no_names(name: str) -> None:
    with pytest.raises(SpecError, match=r"must match \[A-Za-z0-9._-\]\{1,80\}; fix: "):
        load_stack(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=8,,pp=12", "layout = 'tp=8,,pp=12': has an empty part between commas; fix: write tp=8,pp=12"),
        ("", "layout = '': has an empty part between commas; fix: write tp=8,pp=12"),
        ("tp=8,tp=4", "layout = 'tp=8,tp=4': tp is given twice; fix: give each key once"),
        ("tp=8,qp=4", "layout = 'tp=8,qp=4': unknown key 'qp'; fix: use tp, pp, vpp, dp, cp, ep, etp, sp"),
        ("tp=0", "layout.tp = '0': must be 1 or more; fix: write tp=1 or leave it out"),
        ("tp=-8", "layout.tp = '-8': must be 1 or more; fix: write tp=1 or leave it out"),
        ("tp=8.0", "layout.tp = '8.0': must be a whole number of at most 9 digits; fix: write tp=8"),
        ("tp=nan", "layout.tp = 'nan': must be a whole number of at most 9 digits; fix: write tp=8"),
        ("tp", "layout.tp = '': must be a whole number of at most 9 digits; fix: write tp=8"),
        ("tp=\uff18", "layout.tp = '\uff18': must be a whole number of at most 9 digits; fix: write tp=8"),
        ("sp=2", "layout.sp = '2': must be 0 or 1; fix: write sp=1"),
        ("vpp=2", "layout.virtual_pipeline = 2: needs pipeline_parallel above 1; fix: leave vpp out"),
    ],
)
def test_layout(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_layout(text)
    assert str(error.value) == message


def test_layout_with_a_number_of_5000_digits() -> None:
    with pytest.raises(SpecError, match="at most 9 digits"):
        parse_layout("tp=" + "9" * 5000)


def test_layer_split_of_another_length() -> None:
    with pytest.raises(
        SpecError, match=r"layer_split = '\[1, 2\]': needs pp \* vpp = 3 entries; fix: give one a chunk"
    ):
        parse_layout("pp=3", layer_split=(1, 2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "num_layers",
            "num_layers = 0",
            "llama3-8b.toml: num_layers = 0: must be 1 or more; fix: give a larger number",
        ),
        (
            "num_key_value_heads",
            "num_key_value_heads = 0",
            "llama3-8b.toml: num_key_value_heads = 0: must be 1 or more; fix: give a larger number",
        ),
        (
            "num_key_value_heads",
            "num_key_value_heads = 5",
            "llama3-8b.toml: num_key_value_heads = 5: must divide num_attention_heads = 32; fix: correct one of them",
        ),
        (
            "hidden_size",
            "hidden_size = 4097",
            "llama3-8b.toml: hidden_size = 4097: is not divisible by num_attention_heads = 32; fix: give head_dim",
        ),
        (
            "activation",
            'activation = "swigloo"',
            "llama3-8b.toml: activation = 'swigloo': must be 'gelu', 'swiglu', 'quick-geglu', 'relu' or "
            "'squared-relu'; fix: use one of them",
        ),
        (
            "tied_embeddings",
            "tied_embeddings = 0",
            "llama3-8b.toml: tied_embeddings = 0: must be true or false; fix: write it as true or false",
        ),
    ],
)
def test_model_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load_model(changed(tmp_path, "models", "llama3-8b", old, new))
    assert str(error.value) == message


SPACE = """\
schema = 1
model = "gpt3-175b"
cluster = "h800-ndr"
cluster_size = { num_gpus = 96 }
recipe = { sequence_length = 2048, global_batch_size = 192 }
[search]
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tensor_parallel = []", "search.tensor_parallel = '[]': offers no choice"),
        ("tensor_parallel = [8, 0]", "search.tensor_parallel = 0: must be 1 or more"),
        ("tensor_parallel = [8, 8]", "search.tensor_parallel = '[8, 8]': names a value twice"),
        ('recompute = ["nonne"]', "search.recompute = 'nonne': is not one of none, selective, full"),
        (
            "tensor_paralel = [8]",
            "search.tensor_paralel = [8]: is not a known key; fix: did you mean tensor_parallel, ",
        ),
    ],
)
def test_search_space(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(SPACE + line + "\n", encoding="utf-8")
    with pytest.raises(SpecError) as error:
        load_space(str(path))
    assert str(error.value).startswith(f"space.toml: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", ["{from = 1, to = 8}", "{from = 1, to = 8, factor = 1}", '"96"', "[0]", "[]"])
def test_cluster_size(tmp_path: Path, size: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(SPACE.replace("{ num_gpus = 96 }", f"{{ num_gpus = {size} }}"), encoding="utf-8")
    with pytest.raises(SpecError, match=r"cluster_size\.num_gpus"):
        load_space(str(path))


def test_a_unit_error_is_a_spec_error_with_its_parts(tmp_path: Path) -> None:
    with pytest.raises(UnitError) as error:
        load_cluster(changed(tmp_path, "clusters", CLUSTER, "power", "power = 700"))
    assert (error.value.field, error.value.value) == ("h100-ndr.toml: device.power", 700)
    assert error.value.rule
    assert error.value.fix == 'write for example power = "700 W"'


def test_sequence_parallel_without_tensor_parallel_is_the_same_point() -> None:
    assert ParallelConfig(sequence_parallel=True) == ParallelConfig()
    assert parse_layout("tp=1,sp=1") == parse_layout("tp=1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compute_scale = { atention = 2.0 }", "megatron-core.toml: compute_scale.atention"),
        ("compute_scale = { attention = 0.0 }", "megatron-core.toml: compute_scale.attention = 0.0: must be above 0.0"),
        ('compute_scale = { attention = "2" }', "megatron-core.toml: compute_scale.attention = '2': must be a number"),
    ],
)
def test_stack_file(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load_stack(changed(tmp_path, "stacks", "megatron-core", "dropout", f"dropout = 0.0\n{line}"))
    assert str(error.value).startswith(message)


def test_op_classes_are_those_of_the_graph() -> None:
    assert set(get_args(OpClassName)) == {op.name.lower() for op in OpClass} - {"none"}


def test_no_chunk_between_the_ends_is_empty() -> None:
    with pytest.raises(SpecError, match=r"layer_split = .*: chunk 1 would hold nothing.*; fix: "):
        candidate_of(JobOptions(**JOB, layout="tp=8,pp=12", layer_split="16,0,8,8,8,8,8,8,8,8,8,8"))


def test_the_ends_may_hold_no_layer() -> None:
    job = JobOptions(**JOB, layout="tp=8,pp=3", layer_split="0,96,0")
    assert candidate_of(job).chunk_layers == (0, 96, 0)


def test_no_sequence_is_not_the_models_own() -> None:
    with pytest.raises(SpecError, match=r"sequence_length = 0"):
        candidate_of(JobOptions(**JOB, layout="tp=8,pp=12", sequence_length=0))


def test_hosts_without_a_fabric_run_alone() -> None:
    job = JobOptions(**JOB, layout="tp=8,pp=12", overrides=('cluster.fabric.topology="none"',))
    with pytest.raises(PlacementError, match="no fabric between hosts"):
        candidate_of(job)


@pytest.mark.parametrize(
    ("text", "what"),
    [("num = " + "9" * 5000, "number too long"), ("deep = " + "[" * 5000, "number too long")],
)
def test_toml_that_the_parser_chokes_on(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=what):
        load_cluster(str(path))


def test_json_that_the_parser_chokes_on(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        load_model(str(path))


@pytest.mark.parametrize("field", ["model.vocab_size", "model.ffn_hidden_size", "recipe.global_batch_size"])
def test_counts_have_a_largest_value(field: str) -> None:
    with pytest.raises(SpecError, match=r"at most|1000000000"):
        candidate_of(JobOptions(**JOB, layout="tp=8,pp=12", overrides=(f"{field}=999999999999",)))


def test_keyword_arguments_are_checked() -> None:
    with pytest.raises(SpecError, match=r"global_batch = 192: is not an option; fix: did you mean global_batch_size"):
        job_options({**JOB, "layout": "tp=8", "global_batch": 192})
    with pytest.raises(SpecError, match=r"layout = '\(missing\)': must be given"):
        job_options(dict(JOB))
    with pytest.raises(SpecError, match=r"layout = .*: must be text"):
        job_options({**JOB, "layout": {"tp": 8}})
