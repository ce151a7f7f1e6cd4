"""Makes a process the tracing one: no-op CUDA device, fake torch.cuda, fake cluster, Megatron with its stand-ins."""

import importlib.metadata
import os
import time
import warnings

from echo_explore.tracing import guard

_ready: list[float] = []


def versions() -> dict[str, str]:
    """Versions of torch and megatron-core without importing them; local parts such as `+cpu` are left out.

    Raises:
        importlib.metadata.PackageNotFoundError: one is not installed.
    """
    return {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "megatron-core")}


def prepare() -> float:
    """Turn this process into a tracing process, once; the seconds that took."""
    if _ready:
        return _ready[0]
    started = time.perf_counter()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.simplefilter("ignore")
    import torch

    guard.install(torch)
    from echo_explore.tracing import fake_cluster, fake_device, megatron_shims

    fake_device.install()
    fake_cluster.install()
    megatron_shims.before_import()

    megatron_shims.after_import()
    torch.set_num_threads(1)
    _ready.append(time.perf_counter() - started)
    return _ready[0]
