"""Records every kernel, collective and host sync of a program on fake tensors as rows of an execution graph."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, OpRow, Phase, StreamJoin
from echo_explore.tracing import fake_device, functional_collectives
from echo_explore.tracing.collectives import Described, FakeWork, describe, ranks_of
from echo_explore.tracing.op_plans import Plan, distinct_bytes, on_gpu, plan_of, tensors_of, written_by
from echo_explore.tracing.op_rules import DTYPES, shapes_text
from echo_explore.tracing.oracles import FINDERS, Oracles
from echo_explore.tracing.provenance import Context, Home, Mark, Provenance
from echo_explore.tracing.quantise import Casts
from echo_explore.tracing.regions import FusedRegions
from echo_explore.tracing.row_log import RowLog
from echo_explore.tracing.source_lines import source_line
from echo_explore.tracing.storages import watching_sizes

_DEVICE = torch.ops.prim.device.default


def _same_wait(before: OpRow, now: OpRow) -> bool:
    """Whether the host reads on where it has read, and nothing was launched since."""
    fields = ("kind", "name", "source", "phase", "awaits")
    return all(getattr(before, field) == getattr(now, field) for field in fields)


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
        since_row: row at which the forward began.
        joins: where a stream was told to wait for another.
        groups: global ranks of the group of each collective, by its row; of a transfer the sender and the receiver.
        storages: live bytes, who wrote what.
    """

    def __init__(self, axes: Mapping[str, Axis], *, fuse: bool, quantiser: Casts | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = Phase.FORWARD
        self.micro_batch = -1
        self.chunk = 0
        self.fuse = fuse
        self.marks: list[Mark] = []
        self.host_syncs: list[dict[str, Any]] = []
        self.oracles = Oracles()
        self.since_row = 0
        self.joins: list[StreamJoin] = []
        self.groups: dict[int, tuple[int, ...]] = {}
        self._log = RowLog()
        self.rows = self._log.rows
        self.storages = self._log.storages
        self._regions = FusedRegions(self._log)
        self._provenance = Provenance()
        self._axes = axes
        self._quantiser = quantiser
        self._plans: dict[Any, Plan] = {}
        self._hooks: list[Any] = []
        self._paused = 0
        self._works: list[FakeWork] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled in a tracing process, and to skip it costs a call of two functions an op."""
        return False

    # -- set-up -------------------------------------------------------------------------------------------------------

    def name_module(self, module: torch.nn.Module, path: str, layer: int, *, mark: bool = False) -> None:
        """Rows inside `module` (and in no deeper named one) get this path and layer."""
        self._provenance.name_module(module, path, layer, mark=mark)

    def __enter__(self) -> "Recorder":
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        fake_device.on_host_sync(self._program_waits, self._clock)
        fake_device.on_join(self._stream_waits)
        self._sizes = watching_sizes(self._resized)
        self._sizes.__enter__()
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
        self._sizes.__exit__(None, None, None)
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]

    def _enter_module(self, module: torch.nn.Module, _: Any) -> None:
        home = self._provenance.enter(module)
        if self._provenance.is_marked(module):
            self._mark("enter", home)

    def _leave_module(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        home = self._provenance.leave()
        if self._provenance.is_marked(module):
            self._mark("leave", home)

    def _mark(self, what: str, home: Home) -> None:
        if torch._C._current_autograd_node() is None:
            self.flush()
            self.marks.append(Mark(what, home, len(self.rows), self.storages.kept_since(self.since_row)))
            if what == "enter":
                self._log.host_calls = 0

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
        return self._provenance.home

    @contextmanager
    def inside(self, home: Home) -> Iterator[None]:
        """Run what belongs to `home` without being a module: a function that is recomputed."""
        with self._provenance.inside(home):
            yield
            self.flush()

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

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the program freed the storages of tensors, whose values it will make anew."""
        if self._quantiser is not None:
            for tensor in tensors:
                self._quantiser.forget(tensor)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if not self._paused:
            self.flush()
            self.storages.resized(storage, len(self.rows))

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
            plan = self._plans[func] = plan_of(func)
        region = self._regions.current
        if region is None and plan.kind != "query":
            self._log.host_calls += 1
        if plan.kind == "kernel":
            try:
                return self._kernel(plan, func, args, kwargs)
            except NotImplementedError as error:
                raise self._refused(plan.name, error) from error
        if plan.kind == "collective":
            return self._collective(plan, func, args, kwargs)
        if plan.kind == "functional":
            return self._functional(plan, func, args, kwargs)
        if plan.kind == "item":
            return self._item(func, args)
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            out: Any = args[0].fake_device  # two thirds of all calls: what the mode below answers, without its overhead
        else:
            out = func(*args, **kwargs)
        if plan.kind == "allocation":
            for tensor in tensors_of(out):
                key = self.storages.produced(tensor, len(self.rows))
                if region is not None and key is not None:
                    region.created.add(key)
        self._provenance.remember(-1, self._regions.explicit)
        return out

    def _kernel(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = self._provenance.context(self.phase)
        if not self._regions.holds(context.region):
            self.flush()
            if context.region >= 0:
                row = self._new_row(f"{self._regions.names[context.region]}_backward", context)
                self._regions.begin(context.region, row)
        inputs = on_gpu((args, kwargs))
        reads = [self.storages.access(t) for t in inputs]
        try:
            out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            out = self._found(plan.name, args)
        outputs = on_gpu(out)
        if not inputs and not outputs:  # host arithmetic
            return out
        written = written_by(plan, args, outputs)
        region = self._regions.current
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
        self._provenance.remember(row_index, self._regions.explicit)
        if region is not None:
            region.add(inputs, reads, written, writes)
            region.deps |= deps - {row_index}
            region.row.flop += kernel.flop
            return out
        row.dtype = DTYPES.get(kernel.dtype, DType.NONE) if kernel.dtype is not None else DType.NONE
        if kernel.tensor_float:
            row.dtype = DType.TF32
        row.shapes = shapes_text(inputs, outputs or written)
        row.bytes_read = distinct_bytes(inputs, reads) if kernel.bytes_read is None else kernel.bytes_read
        row.bytes_written = distinct_bytes(written, writes) if kernel.bytes_written is None else kernel.bytes_written
        row.deps = tuple(sorted(deps))
        products = (OpClass.GEMM, OpClass.GROUPED_GEMM)
        if self._quantiser is not None and row.op_class in products and self._quantiser.concerns(row):
            self._quantiser.narrow_product(row)
        self._log.append(row)
        return out

    def _refused(self, name: str, error: NotImplementedError) -> Exception:
        """What to say of an operator that no fake tensor runs; the error itself if it is another."""
        made_by = self._provenance.context(self.phase).forward_op
        where = f"{name} at {self.rows[made_by].source if 0 <= made_by < len(self.rows) else source_line()}"
        if "storage" in str(error):
            rule, fix = "sparse arrays and gradients are not traced", "make the embedding with sparse=False"
            return TraceError(f"{where} = (sparse): {rule}; fix: {fix}, or the array dense")
        if "no fake impl" in f"{error}{error.__context__}":  # PyTorch then tries it on a GPU
            rule = "PyTorch has no fake kernel of this operator, so its result has no shape"
            fix = "use another operator, or torch.library.register_fake for one of your own"
            return TraceError(f"{where} = (unknown): {rule}; fix: {fix}")
        return error

    def _new_row(self, name: str, context: Context, kind: OpKind = OpKind.COMPUTE) -> OpRow:
        if self._regions.current is None:
            self._log.settle()
        return self._log.new_row(name, context, kind, micro_batch=self.micro_batch, chunk=self.chunk)

    def _row_here(self, name: str, kind: OpKind) -> OpRow:
        """A row of what runs now."""
        return self._new_row(name, self._provenance.context(self.phase), kind)

    def _cast_before(self, row: OpRow, operands: Sequence[torch.Tensor], deps: set[int]) -> set[int]:
        """Add the row that quantises the first operand of `row`, if it needs one; the rows that `row` then reads."""
        quantiser = self._quantiser
        if quantiser is None or not quantiser.concerns(row) or not quantiser.may_cast(row):
            return set()
        if not quantiser.must_cast(row, operands[0]):
            return set()
        cast = quantiser.cast_row(replace(row, kind=OpKind.COMPUTE, flop=0.0), operands[0])
        cast.deps = tuple(sorted(deps))
        return {self._log.append(cast)}

    # -- communication ------------------------------------------------------------------------------------------------

    def _collective(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        self._log.host_calls += 1
        self.rows[self._add_collective(name, described)].dims = dims

    def _add_collective(self, name: str, described: Described) -> int:
        """Its row."""
        row = self._row_here(name, OpKind.COLLECTIVE)
        described.fill(row)
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
        self._log.append(row)
        self.groups[index] = described.ranks
        return index

    def _functional(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective that returns its result, or the wait for one."""
        self.flush()
        if func._opname == functional_collectives.WAIT:
            out = args[0].detach()  # the array itself, as on a GPU; on fake tensors the operator makes another
            written = self.storages.dependences([self.storages.access(args[0])])
            found = [i for i in sorted(written) if self.rows[i].kind is OpKind.COLLECTIVE and self.rows[i].asynchronous]
            waited = {row.awaits for row in self.rows[min(found, default=len(self.rows)) :]}
            for index in found:
                if index not in waited:
                    self._waiter(index)()
            return out
        out = func(*args, **kwargs)
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
            row = self._row_here("wait", OpKind.WAIT)
            row.awaits, row.deps = index, (index,)
            self._log.append(row)

        return wait

    # -- waits of the host and of streams ---------------------------------------------------------------------------

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
            raise self.oracles.without_size(name)
        count = self.oracles.size(name)
        self._host_wait(name, count)
        with self.paused():
            return make(count, *args)

    def _clock(self) -> tuple[int, int]:
        if self._regions.depth == 0:
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
        row = self._row_here(what, OpKind.HOST_SYNC)
        row.awaits = after
        if after < 0 and self.rows and _same_wait(self.rows[-1], row):  # an element of a list that has come
            return
        where = {"module": row.module, "phase": row.phase.name, "source": row.source}
        self.host_syncs.append({"what": what, **where, "assumed": value})
        self._log.append(row)

    # -- fused regions ------------------------------------------------------------------------------------------------

    def open_region(self, name: str) -> None:
        """What follows, until `close_region`, is one kernel; nested regions belong to the outermost."""
        if not self.fuse:
            return
        if self._regions.depth == 0:
            self.flush()
            self._regions.open(self._new_row(name, self._provenance.context(self.phase)))
            self._log.host_calls += 1
        self._regions.depth += 1

    def close_region(self) -> None:
        """End what `open_region` began; call it while the results are alive and the temporaries are gone."""
        if not self.fuse:
            return
        self._regions.depth -= 1
        if self._regions.depth == 0:
            self.flush()

    def abandon_region(self) -> None:
        """Forget what `open_region` began: the program raised."""
        self._regions.abandon()

    def flush(self) -> None:
        """End a fused region that is open without one asked for (the backward of a region, op by op)."""
        self._regions.flush()
