"""A process group of any size in one process: collectives are recorded, never run."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_current: list[tuple[int, int]] = []


def _everyone_sends_the_same(objects: list[Any], value: Any, group: Any = None) -> None:
    for position in range(len(objects)):
        objects[position] = value


def _gather_object(value: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        _everyone_sends_the_same(objects, value)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def install() -> None:
    """Replace what of torch.distributed exchanges Python objects; once in a process."""
    module: Any = dist
    make: Callable[..., Any] = dist.new_group

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None,
        use_local_synchronization: bool = False, group_desc: Any = None, device_id: Any = None,
    ) -> Any:  # fmt: skip
        return make(ranks=ranks, backend=None, group_desc=group_desc)

    for owner in (module, module.distributed_c10d):
        owner.new_group = new_group
    module.all_gather_object = _everyone_sends_the_same
    module.gather_object = _gather_object
    module.broadcast_object_list = _nothing


def start(rank: int, world_size: int) -> None:
    """Be rank `rank` of `world_size`; ends the cluster that was before.

    DTensor remembers the shapes of an operator's parts, which another rank may have otherwise. A program selects a GPU.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stop()
    torch.cuda.set_device(0)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _current.append((rank, world_size))


def stop() -> None:
    """End the cluster, if there is one."""
    if _current:
        dist.destroy_process_group()
        _current.clear()
