"""Measured training steps as a table holds them: one row a run, free text normalised here and nowhere else.

Columns are described in docs/validation.md. Free-text columns are as their sources wrote them; what their words mean is
decided by the small functions below, which look at the words of one column only, never at a row's name.
"""

import contextlib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

from echo_explore.core import SpecError
from echo_explore.specs.recipe import Attention, ExpertDispatcher, GraphScope, TrainPrecision
from echo_explore.specs.recompute import MODULES
from echo_explore.specs.recompute import normal_recompute as spec_form
from echo_explore.specs.routing_file import read_load
from echo_explore.validation.table import read_table

REQUIRED = (
    "id", "framework", "num_layers", "hidden_size", "num_heads", "vocab_size", "seq_len", "gpu", "num_gpus", "tp", "pp",
    "micro_batch", "global_batch", "precision", "step_time_s",
)  # fmt: skip
"""Columns that every table must have; the others default as docs/validation.md says."""

LARGEST_COUNT = 1e12
"""No column of counts comes near it."""
_YES, _NO = ("true", "1", "1.0", "yes"), ("false", "0", "0.0", "no")
SHORTEST_STEP_S, LONGEST_STEP_S = 1e-6, 1e7
"""A step is longer than one kernel's launch and shorter than four months."""
UNIT_FACTOR = 10.0
"""Two columns that say the same differ by more than this only if one has another unit (60, 1,000 or 3,600 apart)."""

Sharding = Literal["none", "zero1", "zero2", "zero3", "unknown"]
"""What is sharded over data-parallel ranks: nothing, optimizer states, gradients too, parameters too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFlags:
    """What the flags of a run say; None where they say nothing.

    Attributes:
        grad_reduce: gradients are reduced beside the backward.
        param_gather: parameters are gathered beside the forward.
        cuda_graphs: whole iterations or whole layers run from CUDA graphs, or only parts of layers, or nothing.
        graph_scopes: parts of layers that run from CUDA graphs.
        launch_blocking: every launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1).
        collective_checks: ranks compare every collective before it runs (TORCH_DISTRIBUTED_DEBUG=DETAIL).
        in_network_reduction: the switches between hosts reduce (SHARP).
        fused_norm: the norm is one kernel.
        first_flash: the fused attention kernel is FlashAttention 1, not 2.
        expert_dispatcher: how tokens travel to experts.
        tensor: gathers and scatters of activations run beside products.
        expert_exchange: exchanges of experts run beside another micro-batch.
        offload: something is moved to host memory.
        offload_layers: layers whose activations are, where the words say how many.
        narrow_reduction: gradients are reduced in 16 bits (Composer's mixed precision mode PURE).
        schedule: order of passes of the pipeline, as a recipe names it.
    """

    grad_reduce: bool | None = None
    param_gather: bool | None = None
    cuda_graphs: bool | None = None
    graph_scopes: tuple[GraphScope, ...] = ()
    launch_blocking: bool = False
    collective_checks: bool = False
    in_network_reduction: bool = False
    fused_norm: bool | None = None
    first_flash: bool = False
    expert_dispatcher: ExpertDispatcher | None = None
    tensor: bool | None = None
    expert_exchange: bool | None = None
    offload: bool = False
    offload_layers: int = 0
    narrow_reduction: bool = False
    schedule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured run; counts are of the whole job, as in ParallelConfig and TrainingRecipe.

    Attributes:
        recompute: in the normal form of `specs.recompute`, or the source's own words for anything else.
        overlap: what overlap_flags says.
        extra: attn_extra, the source's further words on model and attention.
        lora_rank: width of the adapters where the model's name says it (LoRA r16).
        expert_load: relative load of each expert; empty: balanced.
        step_time_s: measured; None where the run did not finish.
        values: every column as text, for grouping and for the output.
    """

    id: str
    framework: str
    version: str
    model_name: str
    task: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int
    activation: str
    moe_experts: int
    moe_topk: int
    moe_ffn_hidden: int
    gpu: str
    gpus_per_node: int
    num_gpus: int
    fabric: str
    tp: int
    pp: int
    vpp: int
    dp: int
    cp: int
    ep: int
    sequence_parallel: bool
    sharding: Sharding
    distributed_optimizer: bool | None
    recompute: str
    micro_batch: int
    global_batch: int
    precision: TrainPrecision | None
    attention: Attention | None
    overlap: OverlapFlags
    extra: str
    tied_embeddings: bool | None
    lora_rank: int | None
    expert_load: tuple[float, ...] = ()
    step_time_s: float | None
    values: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A row that is no run: a cell is not what it must be, or its id is missing or another row's.

    Attributes:
        id: its own, with the number of the row where it has none or another row's.
        is_run: its id is its own, so that it counts as a run that is declined.
        error: names column, value, rule and fix.
        values: the cells.
    """

    id: str
    error: SpecError
    is_run: bool
    values: dict[str, str]

    @property
    def reason(self) -> str:
        """Column, value, rule and fix on one line."""
        return str(self.error)

    @property
    def step_time_s(self) -> float | None:
        """The measured time where it can be read."""
        with contextlib.suppress(SpecError):
            return _seconds(self.values["step_time_s"], where="")
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """The runs of a table, and the rows that are none."""

    rows: list[MeasuredRow]
    refused: list[RefusedRow]


def read_rows(path: Path) -> list[MeasuredRow]:
    """The measured runs of a table, all of whose rows must be runs.

    Raises:
        SpecError: see `read_measured`; an id is missing or comes twice, or a cell is not what it must be.
    """
    table = read_measured(path)
    for row in table.refused:
        raise row.error
    return table.rows


def read_measured(path: Path) -> MeasuredTable:
    """The measured runs of a table, and the rows that are none.

    Raises:
        SpecError: see `read_table`; a column of `REQUIRED` is missing, or no row is a run.
    """
    table = read_table(path)
    missing = [name for name in REQUIRED if name not in table[0].cells]
    if missing:
        raise SpecError(
            f"{path.name}: {missing[0]}", "(missing)", "is a column that must be there", f"add {', '.join(missing)}"
        )
    rows: list[MeasuredRow] = []
    refused: list[RefusedRow] = []
    seen: set[str] = set()
    for number, row in enumerate(table, start=2):
        cells = row.cells
        where, name, is_run = f"{path.name}: row {number}", cells["id"], True
        try:
            if not name.strip() or name in seen:
                rule = "appears twice" if name in seen else "must be there"
                name, is_run = f"{name.strip()} (row {number})".strip(), False
                raise SpecError(f"{where}: id", cells["id"] or "(empty)", rule, "give each row its own id")
            seen.add(name)
            row.check(where=f"{where} ({name})")
            rows.append(parse_row(cells, where=f"{path.name}: {name}", folder=path.parent))
        except SpecError as error:
            if not rows and len(refused) + 1 == len(table):
                raise
            refused.append(RefusedRow(id=name, error=error, is_run=is_run, values=cells))
    return MeasuredTable(rows=rows, refused=refused)


def parse_row(cells: dict[str, str], *, where: str, folder: Path = Path()) -> MeasuredRow:
    """One run from the text of its cells; `where` names it in messages, `folder` is that of the table.

    Raises:
        SpecError: a cell is not what it must be.
    """

    def count(name: str, default: int) -> int:
        text = cells.get(name, "").strip()
        if not text:
            return default
        value = float(text) if re.fullmatch(r"\d{1,12}(\.\d{0,6})?([eE]\+?\d{1,2})?", text, re.ASCII) else math.nan
        if not (value < LARGEST_COUNT and value.is_integer()):
            raise SpecError(f"{where}: {name}", text, "must be a whole number", "correct the cell")
        return int(value)

    def flag(name: str) -> bool | None:
        text = cells.get(name, "").strip().lower()
        if text not in ("", *_YES, *_NO):
            raise SpecError(f"{where}: {name}", cells[name], "must be True, False or empty", "correct the cell")
        return None if text == "" else text in _YES

    extra, notes = cells.get("attn_extra", ""), cells.get("notes", "")

    def positive(name: str, default: int) -> int:
        value = count(name, default)
        if value < 1:
            raise SpecError(f"{where}: {name}", cells[name] or "(empty)", "must be 1 or more", "correct the cell")
        return value

    heads, layers, num_gpus, tp, pp = (
        positive(name, 0) for name in ("num_heads", "num_layers", "num_gpus", "tp", "pp")
    )
    cp, gpus_per_node = positive("cp", 1), positive("gpus_per_node", 8)
    hidden, seq_len, global_batch = (count(name, 0) for name in ("hidden_size", "seq_len", "global_batch"))
    step_time_s = _seconds(cells["step_time_s"], where=where)
    if step_time_s is not None:
        _check_rate(cells, global_batch * seq_len / num_gpus / step_time_s, where=where)
    return MeasuredRow(
        id=cells["id"],
        framework=cells["framework"].strip().lower(),
        version=cells.get("framework_version_or_date", "").strip(),
        model_name=cells.get("model_name", "").strip(),
        task=cells.get("task", "").strip().lower() or "pretrain",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=count("ffn_hidden_size", 4 * hidden),
        num_heads=heads,
        num_kv_heads=count("num_kv_heads", heads),
        vocab_size=count("vocab_size", 0),
        seq_len=seq_len,
        activation=normal_activation(cells.get("activation", "")),
        moe_experts=count("moe_experts", 0),
        moe_topk=count("moe_topk", 0),
        moe_ffn_hidden=count("moe_ffn_hidden", 0),
        gpu=normal_gpu(cells["gpu"]),
        gpus_per_node=gpus_per_node,
        num_gpus=num_gpus,
        fabric=cells.get("inter_node_fabric", "").strip(),
        tp=tp,
        pp=pp,
        vpp=count("vpp", 1) or 1,
        dp=count("dp", num_gpus // (tp * pp * cp)),
        cp=cp,
        ep=count("ep", 1) or 1,
        sequence_parallel=bool(flag("sequence_parallel")),
        sharding=normal_sharding(cells.get("zero_stage_or_fsdp", "")),
        distributed_optimizer=flag("distributed_optimizer"),
        recompute=normal_recompute(cells.get("recompute", "")),
        micro_batch=count("micro_batch", 0),
        global_batch=global_batch,
        precision=normal_precision(cells["precision"]),
        attention=normal_attention(cells.get("flash_attention", "")),
        overlap=replace(
            normal_overlap(cells.get("overlap_flags", "")),
            schedule=normal_schedule(f"{cells.get('overlap_flags', '')}; {notes}"),
        ),
        extra=extra,
        lora_rank=int(found[1])
        if (found := re.search(r"\blora r(\d+)", cells.get("model_name", "").lower()))
        else None,
        tied_embeddings=normal_tied(f"{extra}; {notes}"),
        expert_load=_load(cells.get("routing", "").strip(), where=where, folder=folder),
        step_time_s=step_time_s,
        values=cells,
    )


def _seconds(text: str, *, where: str) -> float | None:
    if not text.strip():
        return None
    if not re.fullmatch(r"\s*\d+(\.\d*)?([eE][+-]?\d+)?\s*", text, re.ASCII) or float(text) <= 0:
        raise SpecError(
            f"{where}: step_time_s", text, "must be a positive number of seconds or empty", "correct the cell"
        )
    if not SHORTEST_STEP_S <= float(text) <= LONGEST_STEP_S:
        rule = f"must lie between {SHORTEST_STEP_S:g} and {LONGEST_STEP_S:g} seconds"
        raise SpecError(f"{where}: step_time_s", text, rule, "check its unit")
    return float(text)


def _check_rate(cells: dict[str, str], tokens_per_s_per_gpu: float, *, where: str) -> None:
    """Refuses a step time whose rate, `tokens_per_s_per_gpu`, is not that of the column of this name.

    Raises:
        SpecError: they are of different units.
    """
    try:
        stated = float(cells.get("tokens_per_s_per_gpu", ""))
    except ValueError:
        return
    if 0 < stated < math.inf and not 1 / UNIT_FACTOR <= tokens_per_s_per_gpu / stated <= UNIT_FACTOR:
        rule = f"gives {tokens_per_s_per_gpu:.4g} tokens/s a GPU, where tokens_per_s_per_gpu says {stated:.4g}"
        raise SpecError(f"{where}: step_time_s", cells["step_time_s"], rule, "check the units of both")


def _load(text: str, *, where: str, folder: Path) -> tuple[float, ...]:
    """Numbers with blanks, commas or semicolons between them, or the name of a file of them beside the table.

    Raises:
        SpecError: neither, or the file is wrong.
    """
    if not text:
        return ()
    with contextlib.suppress(ValueError):
        load = tuple(float(word) for word in re.split(r"[\s,;]+", text))
        if all(math.isfinite(share) for share in load):
            return load
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}", text):
        rule = "must be numbers, or the name of a file beside the table"
        raise SpecError(f"{where}: routing", text, rule, "write a number an expert with blanks, or load.txt")
    return read_load(folder / text)


def normal_gpu(text: str) -> str:
    """The name of a GPU as `validation.clusters` writes it; other spellings of some are known."""
    name = text.strip()
    return next((ours for pattern, ours in _GPU_NAMES if re.fullmatch(pattern, name, re.I)), name)


_GPU_NAMES = (
    (r"A100-SXM4?-80GB|A100-80GB(-SXM4)?", "A100-80GB-SXM"),
    (r"A100-SXM4?-40GB|A100-40GB(-SXM4)?", "A100-40GB-SXM"),
    (r"A800-SXM4?-80GB|A800(-80GB)?(-SXM4)?", "A800-80GB-SXM"),
    (r"H100-SXM5?(-80GB)?|H100(-80GB)?(-SXM5)?", "H100-80GB-SXM"),
)
"""Spellings of names, as in the list of the kernel tables' GPUs (`_shipped/kernels/gpus.toml`)."""


def normal_activation(text: str) -> str:
    """The activation; `geglu` is as wide as `swiglu` and one pass like it."""
    words = text.strip().lower()
    return "swiglu" if words == "geglu" else words or "gelu"


def normal_precision(text: str) -> TrainPrecision | None:
    """The format of matrix products; None where the words name none that is known.

    Block-scaled formats (`mx`, microscaling) have one scale a block of 32 (OCP Microscaling Formats v1.0, 2023); `fp8`
    stands for one scale a tensor or a row.
    """
    words = text.strip().lower().replace("_", "-")
    if words in ("bf16", "fp16", "fp32", "nvfp4"):
        return cast("TrainPrecision", words)
    if "mx" in words:
        return "mxfp8"
    return "fp8" if words.startswith("fp8") else None


def normal_recompute(text: str) -> str:
    """The normal form of `specs.recompute`, or the source's words for anything else.

    `selective` alone is core attention, as Megatron means it; modules are listed behind `selective:`; `full:block:4`
    and `full:uniform:4` are Megatron's methods with their number of layers.
    """
    words = text.strip().lower()
    if words in ("", "null", "none", "false"):
        return "none"
    kind, _, listed = words.partition(":")
    names = re.findall(r"\w+", listed)
    if kind == "selective" and names and set(names) <= set(MODULES):
        return spec_form(f"selective:{','.join(names)}")
    return spec_form(words) if re.fullmatch(r"full:(block|uniform):[1-9]\d{0,4}", words) else words


def normal_attention(text: str) -> Attention | None:
    """`flash` for one fused kernel, `unfused` for matrix products and softmax; None where nothing is said."""
    words = text.strip().lower()
    if words in ("true", "te default", "flash/fused", "flash"):
        return "flash"
    return "unfused" if words in ("false", "unfused") else None


def normal_sharding(text: str) -> Sharding:
    """What is sharded over data-parallel ranks."""
    words = text.strip().lower()
    if words == "":
        return "unknown"
    if "zero3" in words or "fsdp" in words or words in ("3", "hsdp"):
        return "zero2" if "zero2" in words else "zero3"
    if words.startswith(("1", "zero1")):
        return "zero1"
    return "zero2" if words.startswith(("2", "zero2")) else "none" if words == "0" else "unknown"


def normal_overlap(text: str) -> OverlapFlags:
    """What overlap_flags says. An empty cell says nothing; a list of Megatron's own flags is complete."""
    words = text.strip().lower().replace("-", "_")
    grad: bool | None = None
    gather: bool | None = None
    if "overlap_grad_reduce" in words:
        grad, gather = True, "overlap_param_gather" in words
    elif "ddp=torch" in words:
        grad = True
    elif "no dp" in words:
        grad, gather = False, False
    norm = True if "rms kernel" in words else False if "unfused rmsnorm" in words else None
    return OverlapFlags(
        grad_reduce=grad,
        param_gather=gather,
        cuda_graphs=_graphs(words),
        graph_scopes=_graph_scopes(words),
        launch_blocking="cuda_launch_blocking=1" in words,
        collective_checks="torch_distributed_debug=detail" in words,
        expert_dispatcher=_dispatcher(words),
        # A list of flags that names others and not this one says that it is off.
        expert_exchange=True if _EXCHANGE.search(words) else False if "dispatcher" in words else None,
        tensor=_tensor(words),
        in_network_reduction="sharp" in words,
        fused_norm=norm,
        first_flash="flash_attentionv1" in words,
        offload="offload" in words,
        offload_layers=int(found[1]) if (found := re.search(r"act cpu offload (\d+) layers", words)) else 0,
        narrow_reduction="mode pure" in words,
    )


def normal_schedule(text: str) -> str | None:
    """The schedule that flags or notes name, as `schedule=NAME` or as a word of its own; None where none is named."""
    words = text.lower()
    if found := re.search(r"\bschedule\s*[=:]\s*([a-z0-9-]+)", words):
        return _SCHEDULE_WORDS.get(found[1], found[1])
    return next((ours for word, ours in _SCHEDULE_WORDS.items() if re.search(rf"\b{word}\b", words)), None)


_SCHEDULE_WORDS = {
    "dualpipe-v": "dualpipev", "dualpipev": "dualpipev", "dualpipe": "dualpipe", "zbv": "zbv", "zb-v": "zbv",
    "zb-h1": "zb-h1", "zbh1": "zb-h1", "gpipe": "gpipe",
}  # fmt: skip
"""Names of schedules that Megatron does not run by itself, as papers spell them."""


def _graphs(words: str) -> bool | None:
    """A list that names a dispatcher or the scope of graphs is complete: what it leaves out is off."""
    if "full_iteration" in words or "layer_cuda_graph" in words:
        return True
    return False if "dispatcher" in words or "cuda_graph" in words else None


def _graph_scopes(words: str) -> tuple[GraphScope, ...]:
    """Parts of layers behind `cuda_graph transformer_engine/`."""
    found = re.search(r"cuda_graph transformer_engine/([^;]*)", words)
    listed = re.findall(r"\w+", found[1]) if found else []
    return tuple(scope for scope in get_args(GraphScope) if scope in listed)


def _tensor(words: str) -> bool | None:
    if re.search(r"\btp_comm_overlap|asynctp", words):
        return True
    return False if re.search(r"no tp overlap|vanilla tp", words) else None


_EXCHANGE = re.compile(r"moe_a2a_overlap|\bep overlap")


def _dispatcher(words: str) -> ExpertDispatcher | None:
    return "hybridep" if "hybridep" in words else "deepep" if "deepep" in words else None


def normal_tied(text: str) -> bool | None:
    """Whether input and output embedding are one matrix; None where nothing is said."""
    words = text.lower()
    if found := re.search(r"tied embeddings=(true|false)", words):
        return found[1] == "true"
    return False if "untie-embeddings-and-output-weights=true" in words else None
