"""Charts as SVG text, for pages in docs/."""

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

_COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#e09f3e", "#6a4c93", "#444444")
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 260, 56, 40


def line_chart(title: str, x: Sequence[int], lines: Mapping[str, Sequence[float]]) -> str:
    """A chart with x in equal steps, y from 0, and a legend below."""
    top = max(max(values) for values in lines.values()) * 1.05
    place = [_LEFT + _WIDTH * i / (len(x) - 1) for i in range(len(x))]
    height = _TOP + _HEIGHT + 50 + 18 * len(lines)
    width = _LEFT + _WIDTH + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for i in range(5):
        y = _TOP + _HEIGHT * (1 - i / 4)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * i / 4:.0f}</text>')
    for at, value in zip(place, x, strict=True):
        parts.append(f'<text x="{at:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{value}</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 36}" text-anchor="middle">GPUs</text>')
    for number, (name, values) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        points = " ".join(
            f"{at:.1f},{_TOP + _HEIGHT * (1 - value / top):.1f}" for at, value in zip(place, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = _TOP + _HEIGHT + 58 + 18 * number
        parts.append(f'<path d="M{_LEFT} {y - 4}h24" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{_LEFT + 32}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def ratio_chart(title: str, groups: Mapping[str, Sequence[float]]) -> str:
    """One line of dots a group, on a logarithmic axis of ratios from 1/2 to 2; a bar marks the median, ends pile up."""
    left, line = 170, 18
    width, height = left + _WIDTH + 30, _TOP + line * len(groups) + 40

    def place(ratio: float) -> float:
        return left + _WIDTH * (0.5 + 0.5 * max(-1.0, min(1.0, math.log2(max(ratio, 1e-9)))))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>',
    ]
    bottom = _TOP + line * len(groups)
    for tick in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0):
        color = "#888" if tick == 1.0 else "#ddd"
        parts.append(f'<path d="M{place(tick):.1f} {_TOP}V{bottom}" stroke="{color}"/>')
        parts.append(f'<text x="{place(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for number, (name, ratios) in enumerate(groups.items()):
        y = _TOP + line * (number + 0.5)
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)} ({len(ratios)})</text>')
        parts += [
            f'<circle cx="{place(r):.1f}" cy="{y:.1f}" r="3" fill="{_COLORS[0]}" fill-opacity="0.35"/>' for r in ratios
        ]
        middle = place(statistics.median(ratios))
        parts.append(f'<path d="M{middle:.1f} {y - 7:.1f}v14" stroke="{_COLORS[1]}" stroke-width="3"/>')
    return "\n".join([*parts, "</svg>\n"])
