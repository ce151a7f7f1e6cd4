"""Time what Transformer Engine's Python costs the host: its real modules on the CPU, with kernels that do nothing.

By hand: pip download --no-deps transformer_engine==2.8.0; unzip the wheel into DIR; then
python -m scripts.bench_transformer_engine DIR. The wheel is pure Python; the compiled part (transformer_engine_torch)
is replaced here by functions that only make results of the right shape, where it also converts arguments, asks cuBLAS
for an algorithm and launches. What it takes is left out, so these are lower bounds. Weights are cached in 8 bits
(every micro-batch but the first of a step) and weight gradients go into main gradients.

A line a module: microseconds of a forward and a backward, medians of the thread's time; of GroupedLinear the first
expert and each further one. They are `[host_modules]` of the stack profiles. Figures: docs/stacks.md.
"""

import argparse
import contextlib
import importlib.machinery
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo
import torch._inductor

TOKENS, WIDTH, EXPERTS = 64, 64, 16
ABSENT = (
    "onnx", "onnxscript", "triton", "triton.language", "triton.language.core", "triton.language.standard",
    "transformer_engine.pytorch.onnx_extensions",
)  # fmt: skip
ENUMS = (
    "DType", "CommOverlapType", "NVTE_Fused_Attn_Backend", "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_QKV_Layout",
    "NVTE_Softmax_Type", "NVTE_QKV_Format", "Float8BlockScaleTensorFormat", "CommOverlapAlgo",
)  # fmt: skip
FORWARD_TENSORS = ("INPUT", "WEIGHT", "OUTPUT")


class _AnyNames(type):
    """A class any of whose attributes exists: an instance that knows its name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = cast(Any, cls)()
        setattr(cls, name, value)
        return value


class _Anything:
    """Stands for members of packages that are not installed and not run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take anything."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: Any) -> Any:
        return self


def _absent(name: str) -> None:
    module = types.ModuleType(name)

    def member(key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return _Anything()

    module.__getattr__ = member  # type: ignore[method-assign]
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module


def quantised(quantizer: Any, shape: torch.Size) -> Any:
    """What the compiled cast gives back: the arrays of the orientations in use, in TE's own tensor class."""
    from transformer_engine.pytorch.tensor import float8_tensor, mxfp8_tensor
    from transformer_engine.pytorch.tensor._internal import float8_tensor_base, mxfp8_tensor_base

    def narrow(wanted: bool, *sizes: int) -> Any:
        return torch.empty(sizes, dtype=torch.uint8) if wanted else None

    if isinstance(quantizer, mxfp8_tensor.MXFP8Quantizer):
        row, column = quantizer.rowwise_usage, quantizer.columnwise_usage
        fields = {
            "rowwise_data": narrow(row, *shape), "rowwise_scale_inv": narrow(row, 1),
            "columnwise_data": narrow(column, *shape), "columnwise_scale_inv": narrow(column, 1),
        }  # fmt: skip
        inner, outer = mxfp8_tensor_base.MXFP8TensorBase, mxfp8_tensor.MXFP8Tensor
    else:
        turned = narrow(quantizer.columnwise_usage, shape[-1], shape.numel() // shape[-1])
        fields = {"data": narrow(True, *shape), "fp8_scale_inv": torch.empty(1), "data_transpose": turned}
        inner, outer = float8_tensor_base.Float8TensorBase, float8_tensor.Float8Tensor
    fields |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    return inner(**fields) if quantizer.internal else outer(shape=shape, dtype=torch.bfloat16, **fields)


def _wide(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16)


def _product(a: Any, a_turned: bool, b: Any, b_turned: bool, out: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    if out is None:
        first, second = a.size(), b.size()
        out = _wide(second[-1], first[-1]) if b_turned else _wide(*second[:-1], first[0] if a_turned else first[-1])
    return out, None, None, None


def _attention(*args: Any) -> list[Any]:
    query = next(x for x in args if isinstance(x, torch.Tensor) and x.dim() == 4)
    return [_wide(*query.shape), torch.empty(query.shape[:3]), torch.empty(2, dtype=torch.int64)]


KERNELS: dict[str, Callable[..., Any]] = {
    "quantize": lambda x, quantizer, out=None, noop=None: quantised(quantizer, x.shape) if out is None else out,
    "split_quantize": lambda x, splits, quantizers: [
        quantised(q, torch.Size((m, x.shape[1]))) for m, q in zip(splits, quantizers, strict=True)
    ],
    "bgrad_quantize": lambda x, quantizer: (_wide(x.shape[-1]), quantised(quantizer, x.shape)),
    "generic_gemm": _product,
    "te_general_grouped_gemm": lambda a, *_: [None] * len(a),
    "rmsnorm_fwd": lambda x, weight, eps, out, quantizer, *_: (
        quantised(quantizer, x.shape) if quantizer is not None else _wide(*x.shape), None, torch.empty(x.shape[0]),
    ),
    "rmsnorm_bwd": lambda grad, x, sigma, weight, *_: (_wide(*x.shape), _wide(*weight.shape)),
    "layernorm_fwd": lambda *_: None,
    "layernorm_bwd": lambda *_: None,
    "fused_attn_fwd": _attention,
    "fused_attn_bwd": lambda *args: _attention(*args)[:1] * 3 + [None] * 2,
    "get_fused_attn_backend": lambda *_: sys.modules[
        "transformer_engine_torch"
    ].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
    "fused_amax_and_scale_update_after_reduction": lambda *_: None,
    "get_num_cublas_streams": lambda: 4,
    "get_cublasLt_version": lambda: 130000,
    "get_cudnn_version": lambda: 91500,
    "get_stream_priority_range": lambda *_: (0, -1),
    "device_supports_multicast": lambda *_: False,
    "ubuf_built_with_mpi": lambda: False,
}  # fmt: skip


def _compiled_part() -> types.ModuleType:
    module: Any = types.ModuleType("transformer_engine_torch")
    for name in ENUMS:
        setattr(module, name, _AnyNames(name, (), {"__int__": lambda self: 1}))
    for name in ("CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "FP8TensorMeta"):
        setattr(module, name, type(name, (), {}))
    forward = [f"GEMM{n}_{part}" for n in (1, 2, 3) for part in FORWARD_TENSORS]
    backward = [f"GRAD_{part}{n}" for n in (1, 2, 3) for part in ("OUTPUT", "INPUT")]
    module.FP8FwdTensors = type("FP8FwdTensors", (), {name: i for i, name in enumerate(forward)})
    module.FP8BwdTensors = type("FP8BwdTensors", (), {name: i for i, name in enumerate(backward)})
    for name, kernel in KERNELS.items():
        setattr(module, name, kernel)

    def member(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{name}: this benchmark has no stand-in for it")

        return missing

    module.__getattr__ = member
    return module  # type: ignore[no-any-return]


def _be_a_gpu() -> None:
    """What asks for CUDA gets the CPU."""
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor

    class Device:
        prev, idx = -1, 0

        def __init__(self, *_: Any) -> None:
            """Take anything."""

        def __enter__(self) -> None:
            """Nothing to do."""

        def __exit__(self, *_: Any) -> None:
            """Nothing to do."""

    cuda.device = Device
    cuda.is_available = lambda: True
    cuda.current_device = cuda.device_count = lambda: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *_: (10, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=148, major=10, minor=0)
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.nvtx = types.SimpleNamespace(
        range=lambda *_: contextlib.nullcontext(), range_push=lambda *_: None, range_pop=lambda *_: None
    )
    tensor.is_cuda = True
    tensor.cuda = lambda self, *_, **__: self
    subclass = tensor._make_wrapper_subclass
    tensor._make_wrapper_subclass = staticmethod(
        lambda cls, size, **fields: subclass(cls, size, **fields | {"device": "cpu"})
    )

    def on_the_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **fields: Any) -> Any:
            fields.pop("device", None)
            return make(*args, **fields)

        return made

    for name in ("empty", "zeros", "ones", "tensor", "full", "empty_like", "zeros_like", "arange", "rand", "randn"):
        setattr(torch, name, on_the_cpu(getattr(torch, name)))


def load(source: Path) -> Any:
    """`transformer_engine.pytorch` from its Python sources alone, and the recipes; in this process for good."""
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0", "NVTE_TORCH_COMPILE": "0"}
    sys.modules["transformer_engine_torch"] = _compiled_part()
    package: Any = types.ModuleType("transformer_engine")
    package.__path__ = [str(source / "transformer_engine")]
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    package.__version__ = "2.8.0"
    sys.modules["transformer_engine"] = package
    for name in ABSENT:
        _absent(name)
    _be_a_gpu()
    import transformer_engine.common as common

    common.load_framework_extension = lambda _: None
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import fp8

    state: Any = fp8.FP8GlobalStateManager
    state.is_fp8_available = state.is_mxfp8_available = classmethod(lambda _: (True, ""))
    fp8.check_recipe_support = lambda _: None
    return te


def seconds(te: Any, module: Any, call: Callable[[Any], Any], recipe: Any, *, repeats: int) -> tuple[float, float]:
    """Median thread seconds of a forward and a backward of a module."""
    for parameter in module.parameters():
        parameter.main_grad = torch.empty(parameter.shape)
        parameter.grad_added_to_main_grad = parameter.overwrite_main_grad = False
    forwards, backwards = [], []
    for _ in range(repeats + 5):
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            started = time.thread_time()
            out = call(module)
            forwards.append(time.thread_time() - started)
        gradient = torch.ones_like(out)
        started = time.thread_time()
        out.backward(gradient)
        backwards.append(time.thread_time() - started)
        for parameter in module.parameters():
            parameter.grad = None
    return statistics.median(forwards[5:]), statistics.median(backwards[5:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder that holds transformer_engine/")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    te = load(arguments.source)
    from transformer_engine.common import recipe as recipes

    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    fields = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu", "fuse_wgrad_accumulation": True}

    def given(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, requires_grad=True)

    tokens, routed = given(TOKENS, 1, WIDTH), given(TOKENS * EXPERTS, WIDTH)
    heads = [given(TOKENS, 1, 8, 8) for _ in range(3)]
    attention = {"num_gqa_groups": 8, "qkv_format": "sbhd", "attn_mask_type": "causal", "attention_dropout": 0.0}
    for name, recipe in (
        ("bf16", None),
        ("fp8 current scaling", recipes.Float8CurrentScaling()),
        ("mxfp8", recipes.MXFP8BlockScaling()),
    ):

        def show(label: str, module: Any, call: Callable[[Any], Any], recipe: Any = recipe, name: str = name) -> Any:
            took = seconds(te, module, call, recipe, repeats=arguments.repeats)
            print(f"{name:20s} {label:24s} {took[0] * 1e6:6.0f} {took[1] * 1e6:6.0f}", flush=True)
            return took

        print("recipe               module                   forward backward, us")
        show("Linear", te.Linear(WIDTH, WIDTH, **fields), lambda m: m(tokens, is_first_microbatch=False))
        show(
            "LayerNormLinear",
            te.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", **fields),
            lambda m: m(tokens, is_first_microbatch=False),
        )
        one = show(
            "GroupedLinear, 1 expert",
            te.GroupedLinear(1, WIDTH, WIDTH, **fields),
            lambda m: m(routed[:TOKENS], [TOKENS], is_first_microbatch=False),
        )
        all_ = show(
            f"GroupedLinear, {EXPERTS}",
            te.GroupedLinear(EXPERTS, WIDTH, WIDTH, **fields),
            lambda m: m(routed, [TOKENS] * EXPERTS, is_first_microbatch=False),
        )
        each = [(a - o) / (EXPERTS - 1) * 1e6 for a, o in zip(all_, one, strict=True)]
        print(f"{name:20s} each further expert      {each[0]:6.0f} {each[1]:6.0f}")
        show("DotProductAttention", te.DotProductAttention(8, 8, **attention), lambda m: m(*heads))


if __name__ == "__main__":
    main()
