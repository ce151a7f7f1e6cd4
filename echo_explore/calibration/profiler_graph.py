"""Execution graphs from traces of PyTorch's profiler (Kineto): what a run did, as rows of a graph, with its times.

References:
    pytorch/kineto, libkineto/src/output_json.cpp (events, `correlation`, `External id`, flows `ac2g` and `fwdbwd`,
    `cuda_sync` events); pytorch 2.13, torch/csrc/distributed/c10d/ParamCommsUtils.hpp (arguments of NCCL kernels).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_explore.calibration.kineto import external_id, operator_row_or_none, read_events
from echo_explore.calibration.profiler_collectives import collective_row, is_collective
from echo_explore.core import SpecError
from echo_explore.graph import ExecutionGraph, OpClass, OpKind, OpRow, Phase, build_graph

Event = Mapping[str, Any]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events of what runs on a GPU."""
_HOST_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LARGEST_BYTES = 2**62
_STREAM_WAIT = "Stream Wait Event"
"""Name of the `cuda_sync` events that order one stream behind another (enable_cuda_sync_events=True)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredGraph:
    """What a profiled run did.

    Attributes:
        graph: its rows; streams are numbered so that the one with most kernels is 0.
        start_s: (num_ops,) when each began, from the first event on.
        time_s: (num_ops,) how long each took; waits take none.
    """

    graph: ExecutionGraph
    start_s: npt.NDArray[np.float64]
    time_s: npt.NDArray[np.float64]


def read_profiler_graph(path: Path) -> ExecutionGraph:
    """The graph of a profiler trace; see `measured_graph`."""
    return measured_graph(path).graph


def measured_graph(path: Path) -> MeasuredGraph:
    """Kernels, copies, NCCL kernels and host syncs of a profiler trace in the order of their launches.

    Operators give class, sizes and FLOP (with record_shapes=True); NCCL kernels carry theirs. A row depends on the row
    before it on its stream, and on what its stream waited for. A collective of another stream has a WAIT where the
    compute stream waited for it, which only traces with `cuda_sync` events tell. A trace of a run on the CPU gives its
    operators of a class, and the innermost of others.

    Raises:
        SpecError: no profiler trace, nothing in it, or an NCCL kernel that does not say what it moves.
    """
    events = [e for e in read_events(path).events if e.get("ph") in ("X", "s", "f", None)]
    complete = [e for e in events if e.get("ph") == "X" and _is_number(e.get("ts")) and _is_number(e.get("dur"))]
    operators = [e for e in complete if e.get("cat") == "cpu_op"]
    device = [e for e in complete if str(e.get("cat", "")).lower() in DEVICE and isinstance(e.get("args"), dict)]
    if not device and not operators:
        rule = f"has {len(events)} events, but no kernels and no operators"
        raise SpecError("file", str(path), rule, "export it with export_chrome_trace of torch.profiler")
    launches = {
        e["args"]["correlation"]: e
        for e in complete
        if str(e.get("cat")) in ("cuda_runtime", "cuda_driver") and "correlation" in (e.get("args") or {})
    }
    phases = _Phases.of(events, complete)
    if device:
        build = _Builder(path=path, operators={external_id(e): e for e in operators if external_id(e) is not None})
        build.device_rows(device, launches, complete, phases)
    else:
        build = _Builder(path=path, operators={})
        build.host_rows(_outermost_known(operators), phases)
    return build.graph(min(float(e["ts"]) for e in complete))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _outermost_known(operators: Sequence[Event]) -> list[Event]:
    """Operators of a class, without what they call, and the innermost of the others, in the order of their starts."""
    found: dict[int, Event] = {}
    above: list[tuple[Event, float, bool]] = []
    for event in sorted(operators, key=lambda e: (str(e.get("tid")), float(e["ts"]), -float(e["dur"]))):
        start, end = _extent(event)
        while above and (above[-1][1] <= start or above[-1][0].get("tid") != event.get("tid")):
            above.pop()
        inside_known = bool(above) and above[-1][2]
        known = inside_known or _operator_row(event) is not None
        if not inside_known:
            if above:
                found.pop(id(above[-1][0]), None)
            found[id(event)] = event
        above.append((event, end, known))
    return sorted(found.values(), key=lambda e: float(e["ts"]))


def _operator_row(operator: Event) -> OpRow | None:
    return operator_row_or_none(operator) if isinstance(operator.get("args"), dict) else None


@dataclass(frozen=True, slots=True)
class _Phases:
    """Which part of the step an instant of a host thread is in, and where the forward of a backward was launched.

    Attributes:
        backward: (thread, start, end) of backward operators, and start and end of their forward and its thread.
        optimizer: (start, end) of optimizer steps.
    """

    backward: tuple[tuple[Any, float, float, Any, float, float], ...]
    optimizer: tuple[tuple[float, float], ...]

    @staticmethod
    def of(events: Sequence[Event], complete: Sequence[Event]) -> "_Phases":
        at = {(e.get("tid"), float(e["ts"])): e for e in complete if e.get("cat") == "cpu_op"}
        ends: dict[Any, dict[str, Event]] = {}
        for event in events:
            if event.get("cat") == "fwdbwd" and event.get("ph") in ("s", "f") and _is_number(event.get("ts")):
                ends.setdefault(event.get("id"), {})[str(event["ph"])] = event
        backward = []
        for pair in ends.values():
            if len(pair) == 2:
                found = [at.get((pair[ph].get("tid"), float(pair[ph]["ts"]))) for ph in "sf"]
                if found[0] is not None and found[1] is not None:
                    (first, last) = found[0], found[1]
                    backward.append((last.get("tid"), *_extent(last), first.get("tid"), *_extent(first)))
        steps = tuple(_extent(e) for e in complete if str(e.get("name")).startswith("Optimizer.step#"))
        return _Phases(tuple(sorted(backward, key=lambda b: (str(b[0]), b[1]))), steps)

    def phase(self, thread: object, at: float) -> Phase:
        """Of what is launched at an instant."""
        if any(start <= at <= end for start, end in self.optimizer):
            return Phase.OPTIMIZER
        return Phase.FORWARD if self.forward_of(thread, at) is None else Phase.BACKWARD

    def forward_of(self, thread: object, at: float) -> tuple[Any, float, float] | None:
        """Thread, start and end of the forward operator whose backward launches something at an instant."""
        index = bisect_right(self.backward, (str(thread), at), key=lambda b: (str(b[0]), b[1])) - 1
        if index >= 0:
            tid, start, end, *forward = self.backward[index]
            if tid == thread and start <= at <= end:
                return forward[0], forward[1], forward[2]
        return None


def _extent(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _stream_numbers(device: Sequence[Event]) -> dict[Any, int]:
    """Numbers of streams: 0 for the one with most kernels that are no collectives."""
    kernels = Counter(e["args"].get("stream") for e in device if not is_collective(e))
    order = [stream for stream, _ in kernels.most_common()] + [e["args"].get("stream") for e in device]
    return {stream: i for i, stream in enumerate(dict.fromkeys(order))}


def with_streams(graph: ExecutionGraph, kernel_of_row: Mapping[int, Event], device: Sequence[Event]) -> ExecutionGraph:
    """A graph whose rows lie on the streams of their kernels; those without one stay where they were.

    Args:
        graph: of the run.
        kernel_of_row: an event of a row that launched something.
        device: all events of the GPU; none: the graph is as it was.
    """
    if not device:
        return graph
    numbers = _stream_numbers([e for e in device if isinstance(e.get("args"), dict)])
    stream = graph.stream.copy()
    for row, event in kernel_of_row.items():
        stream[row] = numbers.get(event["args"].get("stream"), 0)
    return replace(graph, stream=stream)


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Rows as they come, with when and how long.

    Attributes:
        launched: (thread, instant, row) of every row, for the forward of a backward.
    """

    path: Path
    operators: Mapping[Any, Event]
    rows: list[OpRow] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    launched: list[tuple[str, float, int]] = field(default_factory=list)
    last_of: dict[int, int] = field(default_factory=dict)
    used: set[Any] = field(default_factory=set)

    def device_rows(
        self, device: Sequence[Event], launches: Mapping[Any, Event], complete: Sequence[Event], phases: _Phases
    ) -> None:
        """Rows of a run on a GPU."""
        numbers = _stream_numbers(device)
        syncs = [e for e in complete if e.get("cat") == "cuda_runtime" and e.get("name") in _HOST_SYNCS]
        waits = [e for e in complete if e.get("cat") == "cuda_sync" and e.get("name") == _STREAM_WAIT]

        def launch(event: Event) -> Event:
            return launches.get((event.get("args") or {}).get("correlation"), event)

        def instant(event: Event) -> float:
            return float(launch(event)["ts"])

        pending: dict[int, set[int]] = {}
        recorded: dict[Any, dict[int, int]] = {}
        records = [e for e in launches.values() if str(e.get("name")).startswith("cudaEventRecord")]
        for event in sorted([*device, *syncs, *waits, *records], key=lambda e: (instant(e), float(e["ts"]))):
            arguments = event.get("args") or {}
            at, thread = instant(event), launch(event).get("tid")
            stream = numbers.get(arguments.get("stream"), 0)
            if event.get("name") == _STREAM_WAIT:
                source = numbers.get(arguments.get("wait_on_stream"), -1)
                known = recorded.get(arguments.get("wait_on_cuda_event_record_corr_id"), self.last_of)
                if source in known:
                    pending.setdefault(stream, set()).add(known[source])
            elif event.get("cat") == "cuda_sync" or str(event.get("name")).startswith("cudaEventRecord"):
                recorded[arguments.get("correlation")] = dict(self.last_of)
            elif event.get("name") in _HOST_SYNCS:
                row = OpRow(kind=OpKind.HOST_SYNC, name=str(event["name"]), phase=phases.phase(thread, at))
                self._add(row, event, 0, thread, at)
            else:
                before = pending.pop(stream, set())
                for awaited in sorted(before) if stream == 0 else ():
                    if self.rows[awaited].kind is OpKind.COLLECTIVE:
                        wait = OpRow(kind=OpKind.WAIT, name="wait", awaits=awaited, phase=phases.phase(thread, at))
                        wait.deps = (awaited,)
                        self._add(wait, {"ts": event["ts"], "dur": 0}, 0, thread, at, ordered=False)
                row = self._device_row(event)
                row.phase, row.stream = phases.phase(thread, at), stream
                row.asynchronous = row.kind is OpKind.COLLECTIVE and stream != 0
                row.deps = tuple(before)
                self._tie_to_forward(row, phases, thread, at)
                self._add(row, event, stream, thread, at)

    def host_rows(self, operators: Sequence[Event], phases: _Phases) -> None:
        """Rows of a run on the CPU."""
        for event in operators:
            at, thread = float(event["ts"]), event.get("tid")
            row = _operator_row(event) or OpRow(op_class=OpClass.OTHER)
            row = replace(row, name=str(event.get("name")), phase=phases.phase(thread, at))
            self._tie_to_forward(row, phases, thread, at)
            self._add(row, event, 0, thread, at)

    def _add(self, row: OpRow, event: Event, stream: int, thread: object, at: float, *, ordered: bool = True) -> None:
        if ordered and stream in self.last_of:
            row.deps = tuple(sorted({*row.deps, self.last_of[stream]}))
        number = len(self.rows)
        self.rows.append(row)
        self.times.append((float(event["ts"]), float(event["dur"])))
        self.launched.append((str(thread), at, number))
        self.last_of[stream] = number

    def _tie_to_forward(self, row: OpRow, phases: _Phases, thread: object, at: float) -> None:
        forward = phases.forward_of(thread, at)
        if forward is not None:
            tid, start, end = forward
            inside = [number for t, when, number in self.launched if t == str(tid) and start <= when <= end]
            row.forward_op = inside[0] if inside else -1

    def _device_row(self, event: Event) -> OpRow:
        if is_collective(event):
            return collective_row(self.path, event)
        name, category = str(event.get("name")), str(event.get("cat")).lower()
        if category != "kernel":
            size = event["args"].get("bytes", 0)
            moved = float(size) if _is_number(size) and 0 <= size < _LARGEST_BYTES else 0.0
            read = moved if category == "gpu_memcpy" else 0.0
            return OpRow(name=name, op_class=OpClass.COPY, bytes_read=read, bytes_written=moved)
        key = external_id(event)
        operator = self.operators.get(key)
        if operator is None or key in self.used:  # an operator's work counts once, at its first kernel
            return OpRow(name=name, op_class=OpClass.OTHER, module=str((operator or {}).get("name", "")))
        self.used.add(key)
        row = _operator_row(operator) or OpRow(op_class=OpClass.OTHER)
        return replace(row, name=name, module=str(operator.get("name")))

    def graph(self, origin: float) -> MeasuredGraph:
        """What was added; `origin` in microseconds becomes 0."""
        times = np.array(self.times, dtype=np.float64).reshape(-1, 2) * 1e-6
        return MeasuredGraph(graph=build_graph(self.rows), start_s=times[:, 0] - origin * 1e-6, time_s=times[:, 1])
