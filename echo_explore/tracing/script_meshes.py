"""Device meshes of a traced program: made outside of the fake mode, and what their dimensions mean by name."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from echo_explore.graph import Axis

AXIS_NAMES = {
    Axis.TENSOR: ("tp", "tensor", "sp"),
    Axis.CONTEXT: ("cp", "context"),
    Axis.EXPERT: ("ep", "expert"),
    Axis.PIPELINE: ("pp", "pipeline", "stage"),
    Axis.DATA: ("dp", "ddp", "fsdp", "data", "dp_shard", "dp_replicate", "replicate", "shard", "efsdp"),
}
"""Names of mesh dimensions, and the axis that each means; others, and groups without a mesh, have none."""
_MAKE = "init_device_mesh"


@contextlib.contextmanager
def meshes_with_axes(axes: dict[str, Axis]) -> Iterator[None]:
    """Device meshes hold real tensors, so they are made outside of the fake mode; their groups get an axis by name."""
    from torch.distributed import device_mesh
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    make: Any = device_mesh.init_device_mesh
    # Modules of torch, such as FSDP2, that have imported the function by its name.
    holders = [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(_MAKE) is make]

    def init_device_mesh(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return make(*args, **kwargs)

    mesh_type: Any = DeviceMesh
    names = ("__init__", "__getitem__", "_flatten")
    real = {name: getattr(mesh_type, name) for name in names}

    def outside(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                result = method(self, *args, **kwargs)
                mesh = self if result is None else result
                for dimension, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
                    axis = next((a for a, known in AXIS_NAMES.items() if name.lower() in known), None)
                    with contextlib.suppress(RuntimeError):  # a mesh without groups
                        if axis is not None:
                            axes[mesh.get_group(dimension).group_name] = axis
                return result

        return call

    for name, method in real.items():
        setattr(mesh_type, name, outside(method))
    for holder in holders:
        setattr(holder, _MAKE, init_device_mesh)
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, _MAKE, make)
        for name, method in real.items():
            setattr(mesh_type, name, method)
