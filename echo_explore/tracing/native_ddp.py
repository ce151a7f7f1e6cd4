"""What DistributedDataParallel of torch 2.13 and 2.14 needs before its real C++ reducer runs on fake tensors.

Its checks and its broadcast of parameters read data; its buckets are rebuilt in the order in which gradients became
ready, after a first iteration that fills them with data. Here the final buckets are built at once. It counts iterations
in order to time some of them, which in a CUDA build takes a GPU; only a static graph needs that number.

# Approximation: gradients become ready from the last parameter to the first.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from echo_explore.core import TraceError

_NEEDED = ("_verify_param_shape_across_processes", "_sync_module_states", "DistributedDataParallel")


class _Reducer:
    """The real reducer, whose buckets stay as they are and which times nothing."""

    def __init__(self, reducer: Any, *, counts: bool) -> None:
        self._reducer = reducer
        self._replaced = {"_rebuild_buckets": lambda: False}
        if not counts:
            self._replaced["prepare_for_forward"] = lambda: False

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._reducer, name)


class _Silent:
    """A logger that says nothing; what DDP refuses it raises as well."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _refuse_hook(_: Any, __: Any, hook: Any) -> None:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    raise TraceError(
        f"register_comm_hook = {name}: hooks of DistributedDataParallel's buckets are not traced, which reduce "
        "gradients as they are; fix: leave it out (a bf16 or fp16 hook halves the bytes of every all-reduce)"
    )


def final_buckets(tensors: Sequence[Any], limits: Sequence[int], sparse: Sequence[bool], assign: Any) -> Any:
    """The buckets after the first iteration, from torch's own assignment of parameters in reverse order.

    Args:
        tensors: parameters in module order.
        limits: bytes at which buckets are closed; DDP asks with one huge limit at first.
        sparse: whether each has a sparse gradient.
        assign: torch's `_compute_bucket_assignment_by_size`.

    Returns:
        Indices of each bucket in launch order reversed, as the reducer wants them, and their limits.
    """
    last = len(tensors) - 1
    found, sizes = assign(list(reversed(tensors)), list(limits), list(reversed(sparse)))
    return [[last - index for index in bucket] for bucket in reversed(found)], list(reversed(sizes))


@contextlib.contextmanager
def replicas() -> Iterator[None]:
    """Let DistributedDataParallel run under the fake cluster.

    Raises:
        TraceError: this torch has other internals, or a static graph is asked of a CUDA build.
    """
    from torch.nn.parallel import distributed

    module: Any = distributed
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing or not hasattr(dist, "_compute_bucket_assignment_by_size"):
        raise TraceError(f"torch = {torch.__version__}: {', '.join(missing)} is gone; fix: use torch 2.13")
    ddp = module.DistributedDataParallel
    package: Any = dist
    real = (module._verify_param_shape_across_processes, module._sync_module_states, ddp.__init__)
    hook = ddp.register_comm_hook
    assign = package._compute_bucket_assignment_by_size

    def make(self: Any, wrapped: Any, *args: Any, **kwargs: Any) -> None:
        static = bool(kwargs.get("static_graph", False))
        if static and torch.version.cuda is not None:
            raise TraceError(
                f"torch = {torch.__version__}: a CUDA build times the iterations of DistributedDataParallel with "
                "static_graph=True on a GPU; fix: leave static_graph out, or install a CPU build of torch"
            )
        cap_mib = kwargs.get("bucket_cap_mb")
        limits = [package._DEFAULT_FIRST_BUCKET_BYTES if cap_mib is None else int(cap_mib * 2**20)]
        limits.append(int((25 if cap_mib is None else cap_mib) * 2**20))

        def buckets(tensors: Any, _: Any, sparse: Any, *__: Any) -> Any:
            return final_buckets(tensors, limits, sparse, assign)

        package._compute_bucket_assignment_by_size = buckets
        try:
            real[2](self, wrapped, *args, **kwargs)
        finally:
            package._compute_bucket_assignment_by_size = assign
        object.__setattr__(self, "reducer", _Reducer(self.reducer, counts=static))
        object.__setattr__(self, "logger", _Silent())

    module._verify_param_shape_across_processes = module._sync_module_states = lambda *_, **__: None
    ddp.__init__, ddp.register_comm_hook = make, _refuse_hook
    try:
        yield
    finally:
        module._verify_param_shape_across_processes, module._sync_module_states, ddp.__init__ = real
        ddp.register_comm_hook = hook
