"""A run seen by PyTorch's profiler and its ExecutionTraceObserver together: rows of one, times of the other.

Both name a call of an operator by one number: `rf_id` of the observer's nodes, `Record function id` of the profiler's
events (pytorch 2.13, torch/csrc/profiler/standalone/execution_trace_observer.cpp and torch/csrc/autograd/
profiler_kineto.cpp). Kernels name the innermost operator that launched them by `External id`; they count for the row of
the outermost operator that calls it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_explore.calibration.kineto import external_id, read_events
from echo_explore.calibration.observer_graph import observed
from echo_explore.calibration.observer_nodes import Call
from echo_explore.calibration.profiler_graph import DEVICE, MeasuredGraph, with_streams
from echo_explore.core import SpecError

Event = Mapping[str, Any]
_RECORD = "Record function id"


def joined_graph(observer: Path, profiler: Path) -> MeasuredGraph:
    """Rows and exact dependences of the observer's file with start, duration and stream of the profiler's.

    A row starts with the first kernel that it or what it calls launched, and takes as long as all of them together; of
    a run without a GPU the operator's own time. A row that launched nothing, and a WAIT, takes none and starts with the
    next one.

    Args:
        observer: file of ExecutionTraceObserver.
        profiler: `export_chrome_trace` of the same run.

    Raises:
        SpecError: a file is not what it should be, or the two are not of one run.
    """
    run = observed(observer)
    events = read_events(profiler).events
    timed = [e for e in events if e.get("ph") == "X" and _number(e.get("ts")) and _number(e.get("dur"))]
    operators = {
        int(e["args"][_RECORD]): e
        for e in timed
        if e.get("cat") == "cpu_op" and isinstance(e.get("args"), dict) and _number(e["args"].get(_RECORD))
    }
    kernels = [e for e in timed if str(e.get("cat", "")).lower() in DEVICE]
    _same_run(run.calls.values(), operators, observer, profiler)
    row_of = _rows_of_calls(run.calls, run.call_of_row)
    row_of_external = {
        external_id(event): row_of[call.number]
        for call in run.calls.values()
        if call.number in row_of and (event := operators.get(call.order)) is not None
    }
    parts: dict[int, list[Event]] = {}
    for event in kernels:
        if (row := row_of_external.get(external_id(event))) is not None:
            parts.setdefault(row, []).append(event)
    if not kernels:
        orders = {number: run.calls[number].order for number in run.call_of_row if number >= 0}
        parts = {
            row: [operators[orders[number]]]
            for row, number in enumerate(run.call_of_row)
            if number >= 0 and orders[number] in operators
        }
    if not parts:
        rule = f"none of its {len(kernels)} kernels belongs to an operator of {observer.name}"
        raise SpecError("profiler", str(profiler), rule, "record both in one torch.profiler.profile")
    time_s = np.zeros(run.graph.num_ops)
    start_s = np.full(run.graph.num_ops, np.nan)
    for row, events_of_row in parts.items():
        time_s[row] = sum(float(e["dur"]) for e in events_of_row) * 1e-6
        start_s[row] = min(float(e["ts"]) for e in events_of_row)
    start_s = (start_s - min(float(e["ts"]) for e in timed)) * 1e-6
    graph = with_streams(run.graph, {row: events_of_row[0] for row, events_of_row in parts.items()}, kernels)
    return MeasuredGraph(graph=graph, start_s=_filled_from_behind(start_s), time_s=time_s)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same_run(calls: Iterable[Call], operators: Mapping[int, Event], observer: Path, profiler: Path) -> None:
    """Refuse files whose numbers do not name the same operators."""
    if not operators:
        rule = f"has no operators with a {_RECORD!r}"
        raise SpecError("profiler", str(profiler), rule, "export it with export_chrome_trace of torch.profiler")
    known = [call for call in calls if call.is_operator]
    both = [call for call in known if call.order in operators]
    for call in both:
        name = str(operators[call.order].get("name"))
        if name != call.name:
            rule = f"operator {call.order} is {name}, and {call.name} in {observer.name}"
            raise SpecError("profiler", str(profiler), rule, "give two files of the same run")
    if not both:
        rule = f"shares no operator with {observer.name}, which has {len(known)}"
        raise SpecError("profiler", str(profiler), rule, "give two files of the same run")


def _rows_of_calls(calls: Mapping[int, Call], call_of_row: Sequence[int]) -> dict[int, int]:
    """The row of each call, its own or that of the operator that called it; `calls` in the order of starts."""
    found = {number: row for row, number in enumerate(call_of_row) if number >= 0}
    for call in calls.values():
        if call.number not in found and call.parent in found:
            found[call.number] = found[call.parent]
    return found


def _filled_from_behind(start_s: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Starts with those that are not known taken from the next row that has one, else from the last."""
    known = np.flatnonzero(~np.isnan(start_s))
    behind = np.minimum(np.searchsorted(known, np.arange(len(start_s))), len(known) - 1)
    return start_s[known[behind]]
