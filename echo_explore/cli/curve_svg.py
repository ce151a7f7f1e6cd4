"""A picture of bandwidth over size by algorithm, as SVG text."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from echo_explore.core import format_bytes

_WIDTH, _HEIGHT = 900, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 190, 50, 60
_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
    "#999933",
    "#882255",
    "#44aa99",
)
"""Paul Tol's bright and muted schemes, which colour-blind readers can tell apart (SRON technical note, 2021)."""


def bandwidth_svg(
    title: str, sizes_bytes: Sequence[float], curves: Mapping[str, Sequence[float]], chosen: Sequence[float]
) -> str:
    """SVG text of bus bandwidth (GB/s) over message size on a log axis; the chosen curve is drawn thick.

    Args:
        title: above the picture.
        sizes_bytes: (num_sizes,).
        curves: bytes per second by name, NaN where there is none; (num_sizes,) each.
        chosen: bytes per second of what the tuner takes.
    """
    top = max([*chosen, *(v for curve in curves.values() for v in curve if math.isfinite(v))]) / 1e9 or 1.0
    step = _round_step(top / 5)
    highest = step * math.ceil(top / step)
    low, high = math.log2(sizes_bytes[0]), math.log2(sizes_bytes[-1])

    def x(size: float) -> float:
        span = (math.log2(size) - low) / (high - low) if high > low else 0.5
        return _LEFT + span * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / 1e9 / highest * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="28" font-size="15">{escape(title)}</text>',
    ]
    for i in range(round(highest / step) + 1):
        level = y(i * step * 1e9)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{i * step:g}</text>')
    every = max(1, len(sizes_bytes) // 8)
    foot = _HEIGHT - _BOTTOM + 20
    parts += [
        f'<text x="{x(size):.1f}" y="{foot}" text-anchor="middle">{format_bytes(size)}</text>'
        for size in sizes_bytes[::every]
    ]
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 6}">bus bandwidth, GB/s</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}" text-anchor="end">message size</text>')
    lines = [("chosen", chosen, "#000000", 4.0)]
    lines += [(name, curve, _COLOURS[i % len(_COLOURS)], 1.5) for i, (name, curve) in enumerate(curves.items())]
    for i, (name, curve, colour, width) in enumerate(lines):
        points = " ".join(
            f"{x(size):.1f},{y(rate):.1f}" for size, rate in zip(sizes_bytes, curve, strict=True) if math.isfinite(rate)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        level = _TOP + 18 * i
        start = _WIDTH - _RIGHT + 15
        parts.append(
            f'<line x1="{start}" x2="{start + 24}" y1="{level}" y2="{level}" stroke="{colour}" stroke-width="{width}"/>'
        )
        parts.append(f'<text x="{start + 30}" y="{level + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
