"""Records every kernel, collective and host sync of a program on fake tensors as rows of an execution graph."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, OpRow, Phase, StreamJoin
from echo_explore.tracing import fake_device, functional_collectives
from echo_explore.tracing.collectives import Described, FakeWork, describe, ranks_of
from echo_explore.tracing.grouped_rules import GROUPED_RULES
from echo_explore.tracing.op_rules import DTYPES, NO_KERNEL, Rule, rule_for, shapes_text, tensor_bytes
from echo_explore.tracing.oracles import FINDERS, Oracles
from echo_explore.tracing.quantise import Quantiser
from echo_explore.tracing.regions import Region
from echo_explore.tracing.script_attention import ATTENTION_RULES
from echo_explore.tracing.source_lines import source_line
from echo_explore.tracing.storages import Access, StorageMap
from echo_explore.tracing.vision_rules import VISION_RULES


@dataclass(frozen=True, slots=True)
class Home:
    """Where a row belongs: module path with layer numbers replaced by N, and the layer (-1: none)."""

    path: str
    layer: int


MORE_RULES = VISION_RULES | ATTENTION_RULES | GROUPED_RULES
"""Rules of operators that only scripts call."""
Context = tuple[Home, Phase, int, int]
"""Home, phase, forward row and fused region of what runs now."""


@dataclass(slots=True)
class _Origin:
    """What an autograd node was made by."""

    row: int
    home: Home
    region: int


@dataclass(frozen=True, slots=True)
class _Plan:
    kind: str
    name: str
    rule: Rule | None
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the forward: entering or leaving a layer.

    Attributes:
        kept_bytes: alive of what was made since the last layer was entered, or the forward began.
    """

    what: str
    home: Home
    row: int
    kept_bytes: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records; enter it inside a FakeTensorMode.

    Attributes:
        rows: the rows so far.
        phase: FORWARD, BACKWARD or OPTIMIZER, set by whoever runs the schedule.
        micro_batch: number of the micro-batch that runs, -1 between them.
        chunk: virtual pipeline chunk that runs.
        fuse: whether ops between `open_region` and `close_region` become one row.
        marks: moments at which marked modules began and ended in a forward.
        host_syncs: what the host waited for, and the value that was assumed.
        oracles: what is assumed of values that only a GPU knows.
        since_row: row at which the forward began or the last layer was entered.
        joins: where a stream was told to wait for another.
        groups: global ranks of the group of each collective, by its row; of a transfer the sender and the receiver.
        storages: live bytes, who wrote what.
    """

    def __init__(self, axes: Mapping[str, Axis], *, fuse: bool, quantiser: Quantiser | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[OpRow] = []
        self.phase = Phase.FORWARD
        self.micro_batch = -1
        self.chunk = 0
        self.fuse = fuse
        self.marks: list[Mark] = []
        self.host_syncs: list[dict[str, Any]] = []
        self.oracles = Oracles()
        self.since_row = 0
        self.storages = StorageMap()
        self._axes = axes
        self._quantiser = quantiser
        self._homes: weakref.WeakKeyDictionary[torch.nn.Module, Home] = weakref.WeakKeyDictionary()
        self._marked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._parameter_homes: dict[int, Home] = {}
        self._stack: list[Home] = []
        self._origins: dict[int, _Origin] = {}
        self._plans: dict[Any, _Plan] = {}
        self._region: Region | None = None
        self._explicit_depth = 0
        self._region_names: list[str] = []
        self._hooks: list[Any] = []
        self._outside = Home("", -1)
        self._recent = self._outside
        self._paused = 0
        self._works: list[FakeWork] = []
        self._host_calls = 0
        self._unjoined: list[int] = []
        self.joins: list[StreamJoin] = []
        self.groups: dict[int, tuple[int, ...]] = {}

    # -- set-up -------------------------------------------------------------------------------------------------------

    def name_module(self, module: torch.nn.Module, path: str, layer: int, *, mark: bool = False) -> None:
        """Rows inside `module` (and in no deeper named one) get this path and layer."""
        home = Home(path, layer)
        self._homes[module] = home
        for parameter in module.parameters(recurse=False):
            self._parameter_homes[id(parameter)] = home
        if mark:
            self._marked.add(module)

    def __enter__(self) -> "Recorder":
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        fake_device.on_host_sync(self._program_waits, self._clock)
        fake_device.on_join(self._stream_waits)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.flush()
        for hook in self._hooks:
            hook.remove()
        fake_device.remove_listener(self._program_waits, self._clock)
        fake_device.remove_join_listener(self._stream_waits)
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]

    def _enter_module(self, module: torch.nn.Module, _: Any) -> None:
        home = self._homes.get(module) or (self._stack[-1] if self._stack else self._outside)
        self._stack.append(home)
        if module in self._marked:
            self._mark("enter", home)

    def _leave_module(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        home = self._stack.pop()
        if module in self._marked:
            self._mark("leave", home)

    def _mark(self, what: str, home: Home) -> None:
        if torch._C._current_autograd_node() is None:
            self.flush()
            self.marks.append(Mark(what, home, len(self.rows), self.storages.kept_since(self.since_row)))
            if what == "enter":
                self.since_row = len(self.rows)
                self._host_calls = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run ops that are not part of the program."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def home(self) -> Home:
        """The innermost named module that runs."""
        return self._stack[-1] if self._stack else self._outside

    @contextmanager
    def inside(self, home: Home) -> Iterator[None]:
        """Run what belongs to `home` without being a module: a function that is recomputed."""
        self._stack.append(home)
        try:
            yield
            self.flush()
        finally:
            self._stack.pop()

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Run what keeps nothing but its inputs, because it runs again in the backward."""
        if self._quantiser is not None:
            self._quantiser.checkpoint_depth += 1
        try:
            yield
        finally:
            if self._quantiser is not None:
                self._quantiser.checkpoint_depth -= 1

    def discard(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the program freed the storages of tensors that it still holds."""
        self.flush()
        for tensor in tensors:
            self.storages.discard(tensor)
            if self._quantiser is not None:
                self._quantiser.forget(tensor)

    def restore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the program allocated them again."""
        self.flush()
        for tensor in tensors:
            self.storages.restore(tensor, len(self.rows))

    # -- dispatch -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator on fake tensors and record it."""
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does to the shard of this rank comes back here
        if self._paused:
            return func(*args, **kwargs)
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _plan(func)
        if self._region is None and plan.kind != "query":
            self._host_calls += 1
        if plan.kind == "kernel":
            return self._kernel(plan, func, args, kwargs)
        if plan.kind == "collective":
            return self._collective(plan, func, args, kwargs)
        if plan.kind == "functional":
            return self._functional(plan, func, args, kwargs)
        if plan.kind == "item":
            return self._item(func, args)
        out = func(*args, **kwargs)
        if plan.kind == "allocation":
            for tensor in _tensors(out):
                key = self.storages.produced(tensor, len(self.rows))
                if self._region is not None and key is not None:
                    self._region.created.add(key)
        self._remember_origin(-1)
        return out

    def _kernel(self, plan: _Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = torch._C._current_autograd_node()
        context = self._context(node)
        region_number = context[3]
        if self._explicit_depth == 0 and (self._region is None or region_number != self._region.number):
            self.flush()
            if region_number >= 0:
                self._begin_region(region_number, f"{self._region_names[region_number]}_backward", context)
        inputs = [t for t in _tensors((args, kwargs)) if t.device.type == "cuda"]
        reads = [self.storages.access(t) for t in inputs]
        try:
            out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            out = self._found(plan.name, args)
        outputs = [t for t in _tensors(out) if t.device.type == "cuda"]
        if not inputs and not outputs:  # host arithmetic
            return out
        written = [
            t for position in plan.writes for t in _tensors(args[position : position + 1]) if t.device.type == "cuda"
        ]
        written += [t for t in outputs if not any(t is w for w in written)]
        region = self._region
        deps = self.storages.dependences(reads)
        assert plan.rule is not None
        kernel = plan.rule(inputs, outputs or written, args)
        row = self._new_row(plan.name, context)
        row.op_class, row.dims, row.flop = kernel.op_class, kernel.dims, kernel.flop
        if region is None:
            deps |= self._cast_before(row, inputs, deps)
        row_index = len(self.rows)
        before = self.storages.live_bytes
        writes = [self.storages.written(t, row_index) for t in written]
        self.storages.note(row_index, before)
        self._remember_origin(row_index)
        if region is not None:
            region.add(inputs, reads, written, writes)
            region.deps |= deps - {row_index}
            region.row.flop += kernel.flop
            return out
        row.dtype = DTYPES.get(kernel.dtype, DType.NONE) if kernel.dtype is not None else DType.NONE
        if kernel.tensor_float:
            row.dtype = DType.TF32
        row.shapes = shapes_text(inputs, outputs or written)
        row.bytes_read = _distinct_bytes(inputs, reads) if kernel.bytes_read is None else kernel.bytes_read
        row.bytes_written = _distinct_bytes(written, writes) if kernel.bytes_written is None else kernel.bytes_written
        row.deps = tuple(sorted(deps))
        products = (OpClass.GEMM, OpClass.GROUPED_GEMM)
        if self._quantiser is not None and row.op_class in products and self._quantiser.concerns(row):
            self._quantiser.narrow_product(row)
        self._append(row)
        return out

    def _append(self, row: OpRow) -> None:
        """Add a row that the host's calls since the last one led to."""
        row.host_calls, self._host_calls = max(self._host_calls, 1), 0
        row.allocated_bytes = self.storages.take_allocated()
        row.freed_bytes += self.storages.take_freed()  # inside a fused region
        self.rows.append(row)

    def _new_row(self, name: str, context: Context, kind: OpKind = OpKind.COMPUTE) -> OpRow:
        home, phase, forward_op, _ = context
        stream = fake_device.current_stream().number
        # Autograd runs on the stream of the forward, unless a hook chooses one.
        if stream == 0 and phase is Phase.BACKWARD and 0 <= forward_op < len(self.rows):
            stream = self.rows[forward_op].stream
        if self._region is None:
            self._settle()
        self._part_streams(stream)
        source = self.rows[forward_op].source if 0 <= forward_op < len(self.rows) else source_line()
        return OpRow(
            kind=kind,
            name=name,
            phase=phase,
            module=home.path,
            layer=home.layer,
            micro_batch=self.micro_batch,
            chunk=self.chunk,
            forward_op=forward_op,
            stream=stream,
            source=source,
        )

    def _settle(self) -> None:
        """What was freed since the last row is freed after it."""
        freed = self.storages.take_freed()
        if self.rows:
            self.rows[-1].freed_bytes += freed

    def _part_streams(self, stream: int) -> None:
        """Let what comes on another stream run beside the collectives that the compute stream waits for.

        The wait of a collective holds up its own stream only: where another stream goes on behind it, its row becomes
        asynchronous, and its wait comes before the next row of the compute stream.
        """
        if stream != 0:
            for index in range(len(self.rows) - 1, -1, -1):
                row = self.rows[index]
                if row.kind is not OpKind.COLLECTIVE or row.asynchronous or row.stream != 0:
                    break
                row.asynchronous = True
                self._unjoined.insert(0, index)
            return
        joined, self._unjoined = self._unjoined, []
        for index in joined:
            last = self.rows[index]
            wait = replace(
                last, kind=OpKind.WAIT, name="wait", axis=Axis.NONE, collective=Collective.NONE, message_bytes=0.0,
                bytes_read=0.0, bytes_written=0.0, asynchronous=False, awaits=index, deps=(index,), dims=(),
                dtype=DType.NONE, shapes="", host_calls=0, allocated_bytes=0.0, freed_bytes=0.0,
            )  # fmt: skip
            self.rows.append(wait)

    def _cast_before(self, row: OpRow, operands: Sequence[torch.Tensor], deps: set[int]) -> set[int]:
        """Add the row that quantises the first operand of `row`, if it needs one; the rows that `row` then reads."""
        quantiser = self._quantiser
        if quantiser is None or not quantiser.concerns(row) or not quantiser.may_cast(row):
            return set()
        if not quantiser.must_cast(row, operands[0]):
            return set()
        cast = quantiser.cast_row(replace(row, kind=OpKind.COMPUTE, flop=0.0), operands[0])
        cast.deps = tuple(sorted(deps))
        self._append(cast)
        return {len(self.rows) - 1}

    def _collective(self, plan: _Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.flush()
        described = describe(func, args, kwargs, self._axes)
        index = self._add_collective(plan.name, described) if described.num_ranks > 1 else -1
        on_wait: Callable[[], None] | None = None
        if described.num_ranks > 1 and described.asynchronous:
            on_wait = self._waiter(index)
        handle = FakeWork(on_wait, described.writes)
        self._works.append(handle)  # the boxed handle does not keep its Python half alive
        work = handle.boxed()
        return work if described.result is None else (described.result, work)

    def exchange(
        self, name: str, group: Any, given: torch.Tensor, got: torch.Tensor, *, message_bytes: float,
        dims: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Add an exchange that a library runs by itself and the compute stream waits for; `dims` as its docs say."""
        if self._paused or group.size() == 1:
            return
        self.flush()
        described = Described(
            collective=Collective.ALL_TO_ALL, axis=self._axes.get(group.group_name, Axis.NONE),
            num_ranks=group.size(), message_bytes=message_bytes, asynchronous=False, dtype=given.dtype, reads=[given],
            writes=[got], result=None, ranks=ranks_of(group),
        )  # fmt: skip
        self._host_calls += 1
        self.rows[self._add_collective(name, described)].dims = dims

    def _add_collective(self, name: str, described: Described) -> int:
        """Its row."""
        row = self._new_row(name, self._context(torch._C._current_autograd_node()), OpKind.COLLECTIVE)
        row.axis, row.collective, row.asynchronous = described.axis, described.collective, described.asynchronous
        row.message_bytes = described.message_bytes
        row.dtype = DTYPES.get(described.dtype, DType.NONE)
        row.shapes = shapes_text(described.reads, described.writes)
        row.bytes_read = float(sum(tensor_bytes(t) for t in described.reads))
        row.bytes_written = float(sum(tensor_bytes(t) for t in described.writes))
        deps = self.storages.dependences([self.storages.access(t) for t in described.reads])
        quantiser = self._quantiser
        narrow = quantiser is not None and row.collective is Collective.ALL_GATHER and quantiser.concerns(row)
        if quantiser is not None and narrow:
            deps |= self._cast_before(row, described.reads, deps)
            quantiser.narrow_gather(row)
        row.deps = tuple(sorted(deps))
        index = len(self.rows)
        for tensor in described.writes:
            self.storages.written(tensor, index)
        self._append(row)
        self.groups[index] = described.ranks
        return index

    def _functional(self, plan: _Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective that returns its result, or the wait for one."""
        self.flush()
        out = func(*args, **kwargs)
        if func._opname == functional_collectives.WAIT:
            written = self.storages.dependences([self.storages.access(args[0])])
            found = [i for i in sorted(written) if self.rows[i].kind is OpKind.COLLECTIVE and self.rows[i].asynchronous]
            waited = {row.awaits for row in self.rows[min(found, default=len(self.rows)) :]}
            for index in found:
                if index not in waited:
                    self._waiter(index)()
            return out
        described = functional_collectives.describe_functional(func, args, kwargs, out, self._axes)
        if described.num_ranks > 1:
            self._add_collective(plan.name, described)
        return out

    def _waiter(self, index: int) -> Callable[[], None]:
        waited = False

        def wait() -> None:
            nonlocal waited
            if waited or self._paused:
                return
            waited = True
            self.flush()
            row = self._new_row("wait", self._context(torch._C._current_autograd_node()), OpKind.WAIT)
            row.awaits, row.deps = index, (index,)
            self._append(row)

        return wait

    def _item(self, func: Any, args: tuple[Any, ...]) -> Any:
        tensor = args[0]
        if tensor.device.type != "cuda":
            try:
                return func(*args)
            except DataDependentOutputException:  # it came from the GPU, and the host has waited for it
                return self.oracles.value("item()", tensor.dtype)
        value = self.oracles.value("item()", tensor.dtype)
        self._host_wait("item", value)
        return value

    def _found(self, name: str, args: tuple[Any, ...]) -> Any:
        """The result of an operator whose size the host must wait for."""
        make = FINDERS.get(name)
        if make is None:
            raise self.oracles.unknown(name)
        count = self.oracles.size(name)
        self._host_wait(name, count)
        with self.paused():
            return make(count, *args)

    def _clock(self) -> tuple[int, int]:
        if not self._explicit_depth:
            self.flush()
        return id(self), len(self.rows) - 1

    def _program_waits(self, what: str, moments: fake_device.Moments) -> None:
        self._host_wait(what, after=moments.get(id(self), -1))

    def _stream_waits(self, waiting: int, awaited: int, moments: fake_device.Moments | None) -> None:
        if not self._paused:
            last = self._clock()[1] if moments is None else moments.get(id(self), -1)
            self.joins.append(StreamJoin(at=len(self.rows), waiting=waiting, awaited=awaited, last=last))

    def _host_wait(self, what: str, value: object = None, *, after: int = -1) -> None:
        """The host waits for row `after` and those before it; for all so far if that is negative."""
        if self._paused:
            return
        self.flush()
        row = self._new_row(what, self._context(torch._C._current_autograd_node()), OpKind.HOST_SYNC)
        row.awaits = after
        where = {"module": row.module, "phase": row.phase.name, "source": row.source}
        self.host_syncs.append({"what": what, **where, "assumed": value})
        self._append(row)

    # -- context of a row ---------------------------------------------------------------------------------------------

    def _context(self, node: Any) -> Context:
        """Home, phase, forward row, and fused region of what runs now."""
        if self._stack:
            return self._stack[-1], Phase.FORWARD if node is None else Phase.RECOMPUTE, -1, -1
        if node is None:
            self._recent = self._outside
            return self._outside, self.phase, -1, -1
        variable = getattr(node, "variable", None)
        if variable is not None:
            # A leaf that is no parameter is an input of a recomputed part, which ran just now.
            return self._parameter_homes.get(id(variable), self._recent), Phase.BACKWARD, -1, -1
        origin = self._origins.get(node._sequence_nr())
        if origin is None:
            return self._recent, Phase.BACKWARD, -1, -1
        self._recent = origin.home
        return origin.home, Phase.BACKWARD, origin.row, origin.region

    def _remember_origin(self, row: int) -> None:
        """Tie the autograd node of the op that just ran to its row: its backward then knows where it belongs."""
        if not self._stack and torch._C._current_autograd_node() is not None:
            return
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        origin = self._origins.get(number)
        if origin is None:
            home = self._stack[-1] if self._stack else self._outside
            region = self._region.number if self._region is not None and self._explicit_depth else -1
            self._origins[number] = _Origin(row, home, region)
        elif origin.row < 0:
            origin.row = row

    # -- fused regions ------------------------------------------------------------------------------------------------

    def open_region(self, name: str) -> None:
        """What follows, until `close_region`, is one kernel; nested regions belong to the outermost."""
        if not self.fuse:
            return
        if self._explicit_depth == 0:
            self.flush()
            context = self._context(torch._C._current_autograd_node())
            self._begin_region(len(self._region_names), name, context)
            self._host_calls += 1
            self._region_names.append(name)
        self._explicit_depth += 1

    def close_region(self) -> None:
        """End what `open_region` began; call it while the results are alive and the temporaries are gone."""
        if not self.fuse:
            return
        self._explicit_depth -= 1
        if self._explicit_depth == 0:
            self.flush()

    def abandon_region(self) -> None:
        """Forget what `open_region` began: the program raised."""
        self._explicit_depth = 0
        self._region = None
        self.storages.hold_peak = False

    def _begin_region(self, number: int, name: str, context: Context) -> None:
        self._region = Region(number=number, name=name, row=self._new_row(name, context))
        self.storages.hold_peak = True

    def flush(self) -> None:
        """End a fused region that is open without one asked for (the backward of a region, op by op)."""
        region = self._region
        if region is None:
            return
        if self._explicit_depth:
            raise TraceError(
                f"fused region = {region.name}: holds a communication or a host sync; this is a bug of the tracer"
            )
        self._region = None
        self.storages.hold_peak = False
        self.storages.note(len(self.rows), self.storages.live_bytes)
        if region.num_kernels:
            self._append(region.finish(self.storages))


def _plan(func: Any) -> _Plan:
    name = f"{func.namespace}.{func._opname}"
    writes = tuple(
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if func.namespace == "prim":  # asked of fake tensors only
        return _Plan("query", name, None, writes)
    if func.namespace == "c10d":
        return _Plan("collective", name, None, writes)
    if func.namespace == functional_collectives.NAMESPACE:
        return _Plan("functional", name, None, writes)
    if name == "aten._local_scalar_dense":
        return _Plan("item", name, None, writes)
    if name in NO_KERNEL or func.is_view:
        return _Plan("allocation" if "empty" in name else "view", name, None, writes)
    return _Plan("kernel", name, MORE_RULES.get(name) or rule_for(func, name), writes)


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, list | tuple | dict):
                found += _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            found += _tensors(item)
    return found


def _distinct_bytes(tensors: list[torch.Tensor], accesses: list[Access]) -> float:
    """Bytes of the tensors, each place once."""
    places = {(a.key, a.start, a.stop): tensor_bytes(t) for t, a in zip(tensors, accesses, strict=True)}
    return float(sum(places.values()))
