"""Data loaders of a user's program: batches are made by real code on the host, of which a trace holds nothing.

Workers, pinned memory and their threads have no part in a step of the GPU; here the loader runs in the tracing process
itself, outside of the fake mode, so that samplers shuffle and datasets read as they always do.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

_ONLY_WITH_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "worker_init_fn")


@contextlib.contextmanager
def loaders_on_the_host() -> Iterator[None]:
    """Run `torch.utils.data.DataLoader` without workers and without fake tensors of its own."""
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils.data import DataLoader

    loader: Any = DataLoader
    make, iterate = loader.__init__, loader.__iter__
    parameters = inspect.signature(make)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(parameters.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        for name in ("num_workers", "pin_memory", *_ONLY_WITH_WORKERS):
            given.pop(name, None)
        make(self, **given)

    def batches(self: Any) -> Iterator[Any]:
        with _disable_current_modes():
            iterator = iterate(self)
        while True:
            with _disable_current_modes():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    loader.__init__, loader.__iter__ = init, batches
    try:
        yield
    finally:
        loader.__init__, loader.__iter__ = make, iterate
