"""Words of tables of kernels: data types, sources, kernels, head widths, in the terms of the model.

Each function looks at the words of one column only, never at a row.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from echo_explore.compute.attention_features import attention_columns
from echo_explore.core import MissingCalibration, SpecError

Floats = npt.NDArray[np.float64]

PRECISIONS: Mapping[str, tuple[str, float]] = {
    "bfloat16": ("bf16", 2.0), "bf16": ("bf16", 2.0), "float16": ("fp16", 2.0), "fp16": ("fp16", 2.0),
    "half": ("fp16", 2.0), "float32": ("fp32", 4.0), "fp32": ("fp32", 4.0), "tf32": ("tf32", 4.0), "fp8": ("fp8", 1.0),
    "mxfp8": ("mxfp8", 1.0), "nvfp4": ("nvfp4", 0.5),
}  # fmt: skip
"""Data types of tables: precision, and bytes an element."""


ELEMENTWISE = frozenset(
    ("add", "addu", "sub", "mul", "mulu", "div", "divu", "pow", "powu", "neg", "abs", "exp", "log", "sqrt", "rsqrt",
     "sin", "cos", "tanh", "sigmoid", "relu", "relu2", "gelu", "silu", "swish", "swiglu", "geglu", "mlp_act", "clamp",
     "dropout", "where", "masked_fill", "fill", "zero", "copy", "cast", "bias_add", "bias_gelu", "bias_swiglu",
     "silu_and_mul", "gelu_and_mul", "residual_add", "elementwise")
)  # fmt: skip
"""Operations that read each element once and write one: those of the tables, and PyTorch's names of their like."""


def precision_of(text: str) -> str:
    """The precision that a table's data type names; a trailing `?` (doubtful) is not heeded.

    Raises:
        MissingCalibration: the word is unknown.
    """
    found = PRECISIONS.get(text.strip().lower().rstrip("?"))
    if found is None:
        raise MissingCalibration(f"dtype = {text!r}: is not a data type of the model; fix: use {', '.join(PRECISIONS)}")
    return found[0]


def op_class_of(op: str) -> str | None:
    """Op class, in lower case, of an operation as tables name it; None where no class describes it."""
    word = op.strip().lower()
    if "norm" in word or word == "ln":
        return "norm"
    if "quant" in word:
        return "quantise"
    named = {"softmax": "softmax", "emb": "embedding", "attn_rope": "rope"}
    return named.get(word) or ("elementwise" if word.removesuffix("_") in ELEMENTWISE else None)


def element_bytes_of(precision: str) -> float:
    """Bytes of one element of a precision."""
    return PRECISIONS[precision][1]


def normal_source(text: str) -> str:
    """A source without the model or file that it measured: `vidur/mlp` is `vidur`.

    NeuSight's campaigns stay apart: its long fp32 products on P4 reach 0.16 of the peak in one and 0.55 in another.
    """
    head, _, tail = text.strip().partition("/")
    return head if head in ("vidur", "cudnn-frontend") or not tail else f"{head}/{tail}"


def normal_kernel(text: str) -> str:
    """A kernel's name without what is an input of its own: `-det` and `-swa128`."""
    return re.sub(r"-(det|swa\d+)", "", text.strip())


_FAMILIES = (
    ("fa4", r"fa4|_v4"), ("fa3", r"fa3|_v3"), ("trtllm", "trtllm"), ("flashinfer", "flashinfer|fiprefill"),
    ("triton", "triton"), ("cudnn", "cudnn"), ("flow", "flow"), ("fa2", r"fa2|flash"),
)  # fmt: skip


def kernel_family(kernel: str) -> str:
    """The algorithm that a kernel's name stands for: one of `_FAMILIES`, or empty."""
    word = kernel.lower()
    return next((family for family, pattern in _FAMILIES if re.search(pattern, word)), "")


def normal_kv(dtype: str, kv_dtype: str) -> str:
    """The data type of keys and values: that of the queries where the table leaves it out."""
    return kv_dtype.strip() or dtype.strip()


def attention_table_columns(cells: Mapping[str, Sequence[object]]) -> dict[str, Floats]:
    """The columns of `attention_columns` from the cells of a table.

    Args:
        cells: batch, heads, kv_heads, seq_q, seq_k, head_dim (`128`, or `192/128` where values are narrower), causal,
            pass (fwd or bwd), kernel (`-swa128` is a window of 128, `-det` a deterministic backward).

    Raises:
        SpecError: a head width is no number.
    """
    widths, values = [], []
    for text in cells["head_dim"]:
        first, _, second = str(text).partition("/")
        try:
            widths.append(float(first))
            values.append(float(second or first))
        except ValueError:
            raise SpecError("head_dim", str(text), "must be a number or two with a /", "correct the table") from None
    windows = [re.search(r"-swa(\d+)", str(k)) for k in cells["kernel"]]

    def numbers(name: str) -> Floats:
        return np.array(cells[name], dtype=np.float64)

    return attention_columns(
        numbers("batch"),
        numbers("heads"),
        numbers("kv_heads"),
        numbers("seq_q"),
        numbers("seq_k"),
        np.array(widths),
        value_dim=np.array(values),
        causal=numbers("causal"),
        window=np.array([float(w[1]) if w else 0.0 for w in windows]),
        backward=np.array([p == "bwd" for p in cells["pass"]], dtype=np.float64),
        deterministic=np.array(["-det" in str(k) for k in cells["kernel"]], dtype=np.float64),
    )
