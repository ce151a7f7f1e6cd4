"""`torch.cuda` for a process without a GPU: streams, events, properties and generators that do nothing.

Only for the tracing child: the replacement holds for the rest of the process.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

Moments = dict[int, int]
"""Row of each recorder, by its id, that was the last when an event was recorded."""
HostSync = Callable[[str, Moments], None]
Clock = Callable[[], tuple[int, int]]
Join = Callable[[int, int, Moments | None], None]
"""Called with the stream that waits, the stream that it waits for, and up to which moment; None: all so far."""
_listeners: list[HostSync] = []
_joins: list[Join] = []
_clocks: list[Clock] = []
_H100_MEMORY_BYTES = 80 * 2**30  # only for code that asks; nothing of a trace depends on it


def on_host_sync(listener: HostSync, clock: Clock) -> None:
    """Call `listener(what, moments)` whenever the program waits for the GPU; `clock` gives a recorder's id and row."""
    _listeners.append(listener)
    _clocks.append(clock)


def remove_listener(listener: HostSync, clock: Clock) -> None:
    """Undo `on_host_sync`."""
    _listeners.remove(listener)
    _clocks.remove(clock)


def on_join(listener: Join) -> None:
    """Call `listener` whenever a stream is told to wait for another."""
    _joins.append(listener)


def remove_join_listener(listener: Join) -> None:
    """Undo `on_join`."""
    _joins.remove(listener)


def _join(waiting: "FakeStream", awaited: int, moments: Moments | None) -> None:
    if waiting.number != awaited:
        for listener in _joins:
            listener(waiting.number, awaited, moments)


def host_sync(what: str, after: "FakeEvent | None" = None) -> None:
    """The host waits for the GPU: for what was launched before `after` was recorded, or for everything."""
    for listener in _listeners:
        listener(what, {} if after is None else after.moments)


class FakeStream:
    """A CUDA stream; `number` 0 is the default stream."""

    _count = 0

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.number = FakeStream._count
        FakeStream._count += 1
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.stream_id = self.cuda_stream = self.number
        self.device_index, self.device_type = 0, 1

    def wait_stream(self, other: "FakeStream") -> None:
        """Order after what the other stream has been given."""
        _join(self, other.number, None)

    def wait_event(self, event: "FakeEvent") -> None:
        """Order after the event."""
        _join(self, event.stream, event.moments)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        """An event on this stream."""
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        host_sync("stream.synchronize")

    def query(self) -> bool:
        """Always done."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


class FakeEvent:
    """A CUDA event."""

    def __init__(self, *_: object, **__: object) -> None:
        self.moments: Moments = {}
        self.stream = 0

    def record(self, stream: FakeStream | None = None) -> None:
        """Remember what has been launched."""
        self.moments = dict(clock() for clock in _clocks)
        self.stream = (stream or current_stream()).number

    def wait(self, stream: FakeStream | None = None) -> None:
        """The stream waits for what was launched before."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits."""
        host_sync("event.synchronize", self)

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_time(self, other: "FakeEvent") -> float:
        """One millisecond."""
        return 1.0


_default = FakeStream()
_stack = [_default]


def current_stream(device: object = None) -> FakeStream:
    """The stream on which ops are launched now."""
    return _stack[-1]


_selected = [0]


def set_device(device: Any) -> None:
    """Let `"cuda"` mean this GPU from now on: an index, a `torch.device` or its name."""
    index: Any = device if isinstance(device, int) else torch.device(device).index  # None: whichever is selected
    if index is not None and index >= 0:
        _selected[-1] = index
        torch._C._accelerator_setDeviceIndex(index)


class _StreamContext(contextlib.ContextDecorator):
    def __init__(self, stream: FakeStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        _stack.append(self._stream or _stack[-1])

    def __exit__(self, *_: object) -> None:
        _stack.pop()


class _Generator:
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self._state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self) -> torch.Tensor:
        return self._state

    def graphsafe_get_state(self) -> "_Generator":
        return self

    def clone_state(self) -> "_Generator":
        return self

    def set_state(self, state: object) -> None:
        pass

    graphsafe_set_state = set_state

    def manual_seed(self, seed: int) -> "_Generator":
        return self

    def initial_seed(self) -> int:
        return 0

    seed = initial_seed


class _NullContext(contextlib.nullcontext[None]):
    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


def _tensor_type(name: str, dtype: torch.dtype) -> type:
    """`torch.cuda.FloatTensor` and its like: constructors that also work in isinstance()."""

    class Meta(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torch.Tensor) and value.dtype == dtype and value.device.type == "cuda"

        def __call__(cls, data: Any = (), *sizes: int) -> torch.Tensor:
            if isinstance(data, list | tuple):
                return torch.tensor(data, dtype=dtype, device="cuda")
            return torch.empty(data, *sizes, dtype=dtype, device="cuda")

    return Meta(name, (), {"__module__": "torch.cuda"})


_moving: list[dict[int, tuple[Any, Any]]] = []
"""Parameters and what they became in the call of `_apply` that runs: a shared one stays shared."""


def _apply(self: Any, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """`Module._apply` without tensor swapping, which fake tensors refuse; parameters stay shared."""
    outermost = not _moving
    if outermost:
        _moving.append({})
    try:
        return _apply_within(self, function, recurse)
    finally:
        if outermost:
            _moving.pop()


def _apply_within(self: Any, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> Any:
    if recurse:
        for module in self.children():
            module._apply(function)
    known = _moving[0]
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        if id(parameter) in known:
            self._parameters[name] = known[id(parameter)][1]
            continue
        with torch.no_grad():
            moved = function(parameter)
        if moved is not parameter and (moved.dtype != parameter.dtype or moved.device != parameter.device):
            replacement = torch.nn.Parameter(moved, parameter.requires_grad)
            replacement.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in replacement.__dict__})
            known[id(parameter)] = (parameter, replacement)
            self._parameters[name] = replacement
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


def _nothing(*_: object, **__: object) -> None:
    return None


def _cuda_functions(num_devices: int) -> dict[str, Any]:
    state = torch.zeros(16, dtype=torch.uint8)
    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=_H100_MEMORY_BYTES, multi_processor_count=132,
        warp_size=32, L2_cache_size=50 * 2**20, gcnArchName="", shared_memory_per_block_optin=232448,
    )  # fmt: skip
    replaced: dict[str, Any] = dict.fromkeys(
        ("_lazy_init", "init", "set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all",
         "reset_peak_memory_stats", "empty_cache", "ipc_collect"), _nothing,
    )  # fmt: skip
    zeros = ("initial_seed", "memory_allocated", "max_memory_allocated", "memory_reserved")
    replaced |= dict.fromkeys(zeros, lambda *_, **__: 0)
    return replaced | {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: num_devices,
        "set_device": set_device,
        "current_device": lambda: _selected[-1],
        "synchronize": lambda *_: host_sync("cuda.synchronize"),
        "current_stream": current_stream,
        "default_stream": lambda device=None: _default,
        "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "set_stream": lambda stream: _stack.__setitem__(-1, stream),
        "Stream": FakeStream,
        "Event": FakeEvent,
        "device": _NullContext,
        "get_rng_state": lambda *_, **__: state,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (_H100_MEMORY_BYTES, _H100_MEMORY_BYTES),
        "default_generators": (_Generator(),) * num_devices,
        "get_allocator_backend": lambda: "native",
    }


def _unpinned(make: Any) -> Any:
    """`torch.tensor` on the GPU that is selected, whose host memory is never pinned, which needs a GPU."""

    @functools.wraps(make)
    def tensor(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and not isinstance(device, int) and torch.device(device) == torch.device("cuda"):
            device = torch.device("cuda", _selected[-1])
        return make(*args, device=device, **kwargs)

    return tensor


def install(num_devices: int = 8) -> None:
    """Replace `torch.cuda` in this process, for good; call it after `guard.install`."""
    # torch._dynamo checks at import that torch.cuda's functions are distinct, so it must come before they are replaced.
    import torch._dynamo
    from torch._subclasses import fake_tensor

    cuda: Any = torch.cuda
    replaced = _cuda_functions(num_devices)
    for name, value in replaced.items():
        setattr(cuda, name, value)
    seeds = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed")
    for name in seeds:
        setattr(cuda.random, name, replaced[name])
    cuda.memory.memory_stats = replaced["memory_stats"]
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _nothing)
    cuda.nvtx.range = _NullContext
    dtypes = {
        "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Long": torch.int64,
        "Int": torch.int32, "Byte": torch.uint8, "Double": torch.float64, "Bool": torch.bool,
    }  # fmt: skip
    for name, dtype in dtypes.items():
        setattr(cuda, f"{name}Tensor", _tensor_type(f"{name}Tensor", dtype))
    tensor: Any = torch.Tensor
    tensor.record_stream = _nothing
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.is_pinned = lambda self, *_, **__: False
    torch.tensor = _unpinned(torch.tensor)
    mode: Any = fake_tensor.FakeTensorMode
    mode.avoid_device_init = property(lambda self: True)  # torch.tensor(..., device="cuda") must not touch a device
    dispatch = mode.__torch_dispatch__  # nothing is compiled here, so that nothing is to be kept from compiling it
    mode.__torch_dispatch__ = getattr(dispatch, "__wrapped__", dispatch)
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: False
    accelerator.synchronize = _nothing
    module: Any = torch.nn.Module
    module._apply = _apply
