"""Line charts as SVG text, for pages in docs/."""

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
