"""Free text of measured tables means the same everywhere, whatever the row is called."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.validation.rows import (
    OverlapFlags,
    normal_attention,
    normal_overlap,
    normal_precision,
    normal_recompute,
    normal_schedule,
    normal_sharding,
    normal_tied,
    read_measured,
    read_rows,
)
from tests.validation.tables import CELLS, write_table


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("bf16", "bf16"),
        ("FP16", "fp16"),
        ("fp8", "fp8"),
        ("fp8:hybrid", "fp8"),
        ("fp8-cs", "fp8"),
        ("fp8 linear", "fp8"),
        ("fp8-rowwise", "fp8"),
        ("fp8_mx", "mxfp8"),
        ("fp8-mx", "mxfp8"),
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("int4", None),
        ("", None),
    ],
)
def test_precision(text: str, meaning: str | None) -> None:
    assert normal_precision(text) == meaning


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("", "none"),
        ("null", "none"),
        ("none", "none"),
        ("full", "full"),
        ("selective", "selective"),
        ("selective:core_attn", "selective"),
        ("selective:mlp", "selective:mlp"),
        ("selective(op)", "selective(op)"),
    ],
)
def test_recompute(text: str, meaning: str) -> None:
    assert normal_recompute(text) == meaning


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("True", "flash"),
        ("TE default", "flash"),
        ("flash/fused", "flash"),
        ("False", "unfused"),
        ("unfused", "unfused"),
        ("", None),
    ],
)
def test_attention(text: str, meaning: str | None) -> None:
    assert normal_attention(text) == meaning


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("0", "none"),
        ("1", "zero1"),
        ("1 (per paper; not in xlsx)", "zero1"),
        ("zero1 (dist optimizer)", "zero1"),
        ("3", "zero3"),
        ("fsdp-full(zero3)", "zero3"),
        ("fsdp2-full(zero3)", "zero3"),
        ("fsdp-grad-op(zero2)", "zero2"),
        ("megatron-fsdp:optim_grads_params", "zero3"),
        ("hsdp", "zero3"),
        ("", "unknown"),
    ],
)
def test_sharding(text: str, meaning: str) -> None:
    assert normal_sharding(text) == meaning


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("", OverlapFlags()),
        ("unknown (not stated by the source)", OverlapFlags()),
        ("overlap-grad-reduce", OverlapFlags(grad_reduce=True, param_gather=False)),
        ("overlap-grad-reduce,overlap-param-gather", OverlapFlags(grad_reduce=True, param_gather=True)),
        (
            "TP_COMM_OVERLAP,OVERLAP_GRAD_REDUCE,OVERLAP_PARAM_GATHER",
            OverlapFlags(grad_reduce=True, param_gather=True, tensor=True),
        ),
        ("MC_TP_OVERLAP_AG,MC_TP_OVERLAP_RS", OverlapFlags()),
        ("AsyncTP", OverlapFlags(tensor=True)),
        ("vanilla TP", OverlapFlags(tensor=False)),
        ("no TP overlap", OverlapFlags(tensor=False)),
        ("tp-comm-overlap", OverlapFlags(tensor=True)),
        ("no DP bucketing overlap (use_gradient_bucket=false)", OverlapFlags(grad_reduce=False, param_gather=False)),
        ("DDP=local (no DP overlap); scatter-gather p2p", OverlapFlags(grad_reduce=False, param_gather=False)),
        ("DDP=torch (overlapped allreduce)", OverlapFlags(grad_reduce=True)),
        ("cuda_graph full_iteration/[]; moe_a2a_overlap", OverlapFlags(cuda_graphs=True, expert_exchange=True)),
        (
            "cuda_graph transformer_engine/['attn', 'moe_router']; dispatcher hybridep",
            OverlapFlags(
                cuda_graphs=False,
                graph_scopes=("attn", "moe_router"),
                expert_dispatcher="hybridep",
                expert_exchange=False,
            ),
        ),
        ("EP overlap", OverlapFlags(expert_exchange=True)),
        ("cuda_graph transformer_engine/mlp", OverlapFlags(cuda_graphs=False, graph_scopes=("mlp",))),
        ("HybridEP; full-iteration CUDA graphs; ", OverlapFlags(cuda_graphs=True, expert_dispatcher="hybridep")),
        ("LAYER_CUDA_GRAPH,SHARP vboost", OverlapFlags(cuda_graphs=True, in_network_reduction=True)),
        ("kernel=flash_attention2 + RMS kernel", OverlapFlags(fused_norm=True)),
        ("kernel=torch; unfused RMSNorm", OverlapFlags(fused_norm=False)),
        ("kernel=flash_attentionv1.0.8", OverlapFlags(first_flash=True)),
        ("CUDA_LAUNCH_BLOCKING=1 probably set; DeepSpeed PP engine", OverlapFlags(launch_blocking=True)),
        ("act cpu offload 20 layers", OverlapFlags(offload=True, offload_layers=20)),
    ],
)
def test_overlap(text: str, meaning: OverlapFlags) -> None:
    assert normal_overlap(text) == meaning


def test_tied_embeddings() -> None:
    assert normal_tied("tied embeddings=True; recompute not stated") is True
    assert normal_tied("tied embeddings=False") is False
    assert normal_tied("transformer-impl=local;untie-embeddings-and-output-weights=True") is False
    assert normal_tied("anything else") is None


@given(st.text())
def test_any_text_has_a_meaning(text: str) -> None:
    normal_precision(text)
    normal_recompute(text)
    normal_attention(text)
    normal_sharding(text)
    normal_overlap(text)
    normal_tied(text)


def test_defaults_of_missing_columns(tmp_path: Path) -> None:
    (row,) = read_rows(write_table(tmp_path / "m.csv", [{}]))
    assert (row.dp, row.cp, row.ep, row.vpp, row.gpus_per_node) == (2, 1, 1, 1, 8)
    assert (row.ffn_hidden_size, row.num_kv_heads, row.activation, row.task) == (16384, 32, "gelu", "pretrain")
    assert (row.sharding, row.distributed_optimizer, row.attention) == ("unknown", None, None)


def test_compressed_table(tmp_path: Path) -> None:
    plain = write_table(tmp_path / "m.csv", [{}])
    packed = tmp_path / "m.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_rows(packed) == read_rows(plain)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"tp": "two"}, r"m\.csv: run-0: tp = 'two': must be a whole number; fix: correct the cell"),
        ({"tp": "-2"}, r"m\.csv: run-0: tp = '-2': must be a whole number; fix: "),
        ({"tp": "0"}, r"m\.csv: run-0: tp = '0': must be 1 or more; fix: "),
        ({"num_heads": ""}, r"m\.csv: run-0: num_heads = '\(empty\)': must be 1 or more; fix: "),
        ({"cp": "0"}, r"m\.csv: run-0: cp = '0': must be 1 or more; fix: "),
        ({"gpus_per_node": "0"}, r"m\.csv: run-0: gpus_per_node = '0': must be 1 or more; fix: "),
        ({"step_time_s": "nan"}, r"step_time_s = 'nan': must be a positive number of seconds or empty; fix: "),
        ({"step_time_s": "0"}, r"step_time_s = '0': must be a positive number of seconds or empty; fix: "),
        ({"step_time_s": "1e400"}, r"step_time_s = '1e400': must lie between 1e-06 and 1e\+07 seconds; fix: check its"),
        ({"step_time_s": "1e-300"}, r"step_time_s = '1e-300': must lie between 1e-06 and 1e\+07 seconds; fix: "),
        ({"sequence_parallel": "maybe"}, r"sequence_parallel = 'maybe': must be True, False or empty; fix: "),
    ],
)
def test_wrong_cells(tmp_path: Path, cells: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_rows(write_table(tmp_path / "m.csv", [cells]))


def test_wrong_tables(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist; fix: check the path"):
        read_rows(tmp_path / "absent.csv")
    path = tmp_path / "m.csv"
    path.write_text("")
    with pytest.raises(SpecError, match="has no rows; fix: "):
        read_rows(path)
    path.write_text("id,framework\n1,x\n")
    with pytest.raises(
        SpecError, match=r"m\.csv: num_layers = '\(missing\)': is a column that must be there; fix: add "
    ):
        read_rows(path)
    path.write_text(",".join(CELLS) + "\n" + ",".join([*CELLS.values(), "more"]) + "\n")
    with pytest.raises(
        SpecError, match=r"m\.csv: row 2 \(run-0\): cells = 'more': are more than the header has; fix: "
    ):
        read_rows(path)
    path.write_text(",".join([*CELLS, "tp"]) + "\n" + ",".join([*CELLS.values(), "4"]) + "\n")
    with pytest.raises(SpecError, match=r"m\.csv: tp = '\(header\)': is the name of two columns; fix: "):
        read_rows(path)
    with pytest.raises(SpecError, match=r"m\.csv: row 3: id = 'run-0': appears twice; fix: give each row its own id"):
        read_rows(write_table(path, [{}, {"id": "run-0"}]))
    packed = tmp_path / "m.csv.gz"
    packed.write_bytes(gzip.compress(b"id\n1\n")[:-6])
    with pytest.raises(SpecError, match="cannot be read as CSV"):
        read_rows(packed)


def test_a_broken_line_costs_its_own_row_only(tmp_path: Path) -> None:
    path = write_table(tmp_path / "m.csv", [{}, {"model_name": "x" * 200_000}, {}, {}, {"model_name": "OPEN"}, {}, {}])
    lines = path.read_text().splitlines()
    lines[3] += ",9,text"
    lines[5] = lines[5].replace("OPEN", '"GPT')
    path.write_text("\n".join(lines) + "\n")
    table = read_measured(path)
    assert [row.id for row in table.rows] == ["run-0", "run-1", "run-3"]
    more, quote = (row.reason for row in table.refused)
    assert more.startswith("m.csv: row 4 (run-2): cells = '9, text': are more than the header has; fix: ")
    assert quote.startswith("m.csv: row 6 (run-4): model_name = 'GPT,32,")
    assert "has a quote that is not closed: 2 lines behind it are in this cell; fix: close the quote" in quote


def test_lines_of_commas_are_no_rows(tmp_path: Path) -> None:
    path = write_table(tmp_path / "m.csv", [{}, {}])
    path.write_text(path.read_text() + "," * 14 + "\n" + " ,," + "\n")
    table = read_measured(path)
    assert (len(table.rows), table.refused) == (2, [])


@pytest.mark.parametrize("mark", [";", "\t"])
def test_another_separator_is_named(tmp_path: Path, mark: str) -> None:
    path = write_table(tmp_path / "m.csv", [{}])
    path.write_text(path.read_text().replace(",", mark))
    with pytest.raises(
        SpecError, match=r"m\.csv: separator = .*: separates the cells, where it must be a comma; fix: "
    ):
        read_rows(path)


def test_counts_with_exponents_and_flags_of_0_and_1(tmp_path: Path) -> None:
    cells = {"num_layers": "1e2", "hidden_size": "4.096e3", "sequence_parallel": "1", "distributed_optimizer": "0"}
    found = read_rows(write_table(tmp_path / "m.csv", [cells]))[0]
    assert (found.num_layers, found.hidden_size) == (100, 4096)
    assert (found.sequence_parallel, found.distributed_optimizer) == (True, False)
    for wrong in ("1e-2", "1.5", "1e99", "12 layers"):
        with pytest.raises(SpecError, match="must be a whole number"):
            read_rows(write_table(tmp_path / "m.csv", [{"num_layers": wrong}]))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("schedule=dualpipe; moe_a2a_overlap", "dualpipe"),
        ("bidirectional DualPipe", "dualpipe"),
        ("DualPipe-V", "dualpipev"),
        ("schedule: ZBV", "zbv"),
        ("schedule=mine", "mine"),
        ("overlap-grad-reduce", None),
        ("", None),
    ],
)
def test_schedule(text: str, name: str | None) -> None:
    assert normal_schedule(text) == name


def test_a_cell_may_hold_lines_and_an_index_column_no_name(tmp_path: Path) -> None:
    path = write_table(tmp_path / "m.csv", [{"notes": "one\ntwo", "step_time_s": ""}])
    header, _, cells = path.read_text().partition("\n")
    path.write_text(f",{header}\n0,{cells}")
    assert [row.id for row in read_rows(path)] == ["run-0"]
