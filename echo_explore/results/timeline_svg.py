"""A simulated step as a picture: rank classes from top to bottom, time from left to right; SVG, nothing else needed."""

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from echo_explore.core import SpecError, format_seconds
from echo_explore.specs.schedules import PassKind
from echo_explore.timeline import Span, StepTimeline
from echo_explore.timeline.ops import Charge, Stream

MAX_BARS: Final = 12_000
"""At about 22 bytes a bar the picture stays below 300 KB."""
WIDTH: Final = 1200
"""Of the picture, pixels."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 14, 58, 30
_LANE, _THIN, _GAP = 16, 5, 5  # height of a class's blocks, of its transfers, between classes
_MIN_LABEL = 12.0  # width from which a block carries the number of its micro-batch
_MERGE = 1e-3  # bars of the end of the step nearer to each other than this share of the step are drawn as one

_FILLS: Final = {
    "forward": "#4a86d8",
    "forward, odd chunks": "#8db4ea",
    "backward": "#3f9c5a",
    "backward, odd chunks": "#86c79a",
    "weight gradients": "#b7d8a0",
    "weight gradients, odd chunks": "#d5e8c8",
    "optimizer": "#d9a13b",
    "between stages": "#7a5bb5",
    "data parallel": "#cf5c4a",
}
"""Colour by what a bar is, in the order of the legend."""
_PASSES: Final = {int(PassKind.FORWARD): "forward", int(PassKind.BACKWARD_WEIGHT): "weight gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    rank_class: int
    what: str
    start_s: float
    end_s: float
    label: str = ""


def timeline_svg(timeline: StepTimeline, *, title: str = "") -> str:
    """The text of an SVG file of the spans of `timeline`, below 300 KB.

    A row has the forwards and backwards of a rank class, with the number of their micro-batch where there is room, and
    the optimizer; the thin line below it the transfers to other stages and between replicas.

    Args:
        timeline: simulated with `record_spans`.
        title: what it shows.

    Raises:
        SpecError: no spans, or so many bars that nobody could read them.
    """
    if not timeline.spans:
        raise SpecError("spans", "none", "a picture needs the spans of the timeline", "simulate with record_spans=True")
    bars = _bars(timeline)
    if len(bars) > MAX_BARS:
        raise SpecError("timeline", f"{len(bars)} bars", f"at most {MAX_BARS} can be drawn", "draw fewer micro-batches")
    num_classes = len(timeline.classes)
    height = _TOP + num_classes * (_LANE + _THIN + _GAP) + _BOTTOM
    scale = (WIDTH - _LEFT - _RIGHT) / max(max(bar.end_s for bar in bars), timeline.step_time_s)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="15" fill="#222222">{html.escape(title)}</text>',
        *_legend([what for what in _FILLS if any(bar.what == what for bar in bars)]),
        *_axis(timeline.step_time_s, scale, height),
        *_class_labels([times.label for times in timeline.classes]),
        *_paths(bars, scale),
        *_labels(bars, scale),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bars(timeline: StepTimeline) -> list[_Bar]:
    """What is drawn: blocks, the optimizer phase, transfers between stages and between replicas."""
    blocks: dict[tuple[int, int, int, int], list[Span]] = defaultdict(list)
    bars: list[_Bar] = []
    last: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        is_send = span.stream in (Stream.SEND_FORWARD, Stream.SEND_BACKWARD)
        if span.phase >= 0 and not is_send and span.charge not in (Charge.DATA, Charge.HOST):
            blocks[span.rank_class, span.phase, span.chunk, span.micro_batch].append(span)
        elif span.charge == Charge.OPTIMIZER:
            last[span.rank_class].append(span)
        elif is_send or span.charge in (Charge.DATA, Charge.PIPELINE):
            what = "data parallel" if span.charge == Charge.DATA else "between stages"
            bars.append(_Bar(rank_class=span.rank_class, what=what, start_s=span.start_s, end_s=span.end_s))
    for (rank_class, phase, chunk, micro_batch), spans in blocks.items():
        what = _PASSES.get(phase, "backward") + (", odd chunks" if chunk % 2 else "")
        start, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
        bars.append(_Bar(rank_class=rank_class, what=what, start_s=start, end_s=end, label=str(micro_batch)))
    for rank_class, spans in last.items():
        for start, end in _merged(spans, _MERGE * timeline.step_time_s):
            bars.append(_Bar(rank_class=rank_class, what="optimizer", start_s=start, end_s=end))
    return bars


def _merged(spans: Iterable[Span], gap_s: float) -> list[tuple[float, float]]:
    """Intervals that cover the spans, those nearer than `gap_s` as one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start - merged[-1][1] <= gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _top(bar: _Bar) -> int:
    top = _TOP + bar.rank_class * (_LANE + _THIN + _GAP)
    return top + _LANE if _is_transfer(bar) else top


def _is_transfer(bar: _Bar) -> bool:
    return bar.what in ("between stages", "data parallel")


def _paths(bars: Sequence[_Bar], scale: float) -> list[str]:
    """One path a colour: a bar is `M x y h width v height h -width z`."""
    steps: dict[str, list[str]] = defaultdict(list)
    for bar in bars:
        width = max((bar.end_s - bar.start_s) * scale, 0.3)
        height = _THIN - 1 if _is_transfer(bar) else _LANE
        left = _LEFT + bar.start_s * scale
        steps[bar.what].append(f"M{_short(left)} {_top(bar)}h{_short(width)}v{height}h-{_short(width)}z")
    edge = ' stroke="#ffffff" stroke-width="0.4"'
    return [
        f'<path fill="{fill}"{"" if what in ("between stages", "data parallel") else edge} d="{"".join(steps[what])}"/>'
        for what, fill in _FILLS.items()
        if steps[what]
    ]


def _labels(bars: Sequence[_Bar], scale: float) -> list[str]:
    """The numbers of micro-batches, from 0, where there is room."""
    texts = [
        f'<text x="{_short(_LEFT + (bar.start_s + bar.end_s) / 2 * scale)}" y="{_top(bar) + 12}">{bar.label}</text>'
        for bar in bars
        if bar.label and (bar.end_s - bar.start_s) * scale >= _MIN_LABEL
    ]
    return ['<g font-size="9" fill="#ffffff" text-anchor="middle">', *texts, "</g>"] if texts else []


def _class_labels(names: Sequence[str]) -> list[str]:
    rows = [
        f'<text x="{_LEFT - 8}" y="{_TOP + i * (_LANE + _THIN + _GAP) + 13}">{html.escape(name)}</text>'
        for i, name in enumerate(names)
    ]
    return ['<g text-anchor="end" fill="#444444">', *rows, "</g>"]


def _legend(kinds: Sequence[str]) -> list[str]:
    parts, x = [], _LEFT
    for what in kinds:
        parts.append(f'<rect x="{x}" y="33" width="11" height="11" fill="{_FILLS[what]}"/>')
        parts.append(f'<text x="{x + 16}" y="43" fill="#444444">{what}</text>')
        x += 34 + 7 * len(what)
    return parts


def _axis(step_time_s: float, scale: float, height: int) -> list[str]:
    """Ticks at round times, and the end of the step."""
    step = _round_step(step_time_s / 8)
    bottom = height - _BOTTOM
    parts = ['<g fill="#666666" text-anchor="middle">']
    for number in range(int(step_time_s / step + 1e-9) + 1):
        x = _short(_LEFT + number * step * scale)
        parts.append(f'<path stroke="#dddddd" d="M{x} {_TOP - 4}V{bottom}"/>')
        text = "0" if number == 0 else format_seconds(number * step)
        parts.append(f'<text x="{x}" y="{bottom + 18}">{text}</text>')
    end = _short(_LEFT + step_time_s * scale)
    return [*parts, f'<path stroke="#222222" stroke-dasharray="3 3" d="M{end} {_TOP - 4}V{bottom}"/>', "</g>"]


def _round_step(wanted: float) -> float:
    """The least of 1, 2, 5, 10, .. times a power of ten that is at least `wanted`; above 0."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= wanted * (1 - 1e-9))


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
