"""Makes a process the tracing one: no-op CUDA device, fake torch.cuda, fake cluster, Megatron with its stand-ins."""

import os
import time
import warnings

from echo_explore.tracing import guard, upstream

_ready: list[float] = []


def prepare() -> float:
    """Turn this process into a tracing process, once; the seconds that took."""
    if _ready:
        return _ready[0]
    started = time.perf_counter()
    upstream.check_versions()
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
