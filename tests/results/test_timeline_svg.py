"""The picture of a step: valid XML, small, one row a rank class, bars where the spans are."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from echo_explore.core import SpecError
from echo_explore.results import timeline_svg
from echo_explore.results.timeline_svg import _FILLS, _LEFT, _RIGHT, MAX_BARS, WIDTH, _round_step
from echo_explore.timeline import StepTimeline
from tests.simulate.support import candidate, simulator

SVG = "{http://www.w3.org/2000/svg}"


def _step(layout: str = "tp=8,pp=4,dp=2", batch: int = 16) -> StepTimeline:
    return simulator().timeline(candidate(layout=layout, global_batch_size=batch))


def _bars(picture: str, what: str) -> list[tuple[float, float]]:
    """Left and width of every bar of a colour."""
    path = re.search(rf'<path fill="{_FILLS[what]}"[^>]* d="([^"]*)"', picture)
    return [(float(x), float(w)) for x, w in re.findall(r"M([\d.]+) \d+h([\d.]+)v", path[1])] if path else []


def test_it_is_an_svg_that_needs_nothing_else() -> None:
    picture = timeline_svg(_step(), title="<a> & b")
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert "<a> & b" in [text.text for text in root.iter(f"{SVG}text")]
    assert not re.search(r"href|url\(|<script|<image|<style", picture)
    assert len(picture) < 300_000


def test_blocks_of_every_micro_batch_are_there() -> None:
    step = _step()
    picture = timeline_svg(step)
    assert len(_bars(picture, "forward")) == len(_bars(picture, "backward")) == 4 * 8
    assert len(_bars(picture, "between stages")) >= 2 * 3 * 8
    assert _bars(picture, "data parallel")
    assert _bars(picture, "optimizer")
    for what in _FILLS:
        for left, width in _bars(picture, what):
            assert left >= _LEFT - 0.2
            assert left + width <= WIDTH - _RIGHT + 0.5
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert {f"stage {stage}" for stage in range(4)} <= set(texts)


def test_blocks_of_a_class_do_not_overlap() -> None:
    picture = timeline_svg(_step(layout="tp=8,pp=4,vpp=2", batch=8))
    rows: dict[str, list[tuple[float, float]]] = {}
    for what in ("forward", "forward, odd chunks", "backward", "backward, odd chunks"):
        path = re.search(rf'<path fill="{_FILLS[what]}"[^>]* d="([^"]*)"', picture)
        assert path is not None
        for x, y, w in re.findall(r"M([\d.]+) (\d+)h([\d.]+)v", path[1]):
            rows.setdefault(y, []).append((float(x), float(w)))
    assert len(rows) == 4
    for bars in rows.values():
        assert len(bars) == 2 * 2 * 8
        bars.sort()
        assert all(x + w <= after + 0.21 for (x, w), (after, _) in itertools.pairwise(bars))


def test_legend_names_what_is_drawn() -> None:
    texts = [t.text for t in ElementTree.fromstring(timeline_svg(_step("tp=8,pp=1", 2))).iter(f"{SVG}text")]
    assert "forward" in texts
    assert "between stages" not in texts
    assert "data parallel" not in texts


def test_refused() -> None:
    step = _step(batch=4)
    with pytest.raises(SpecError, match="record_spans=True"):
        timeline_svg(replace(step, spans=()))
    blocks = [span for span in step.spans if span.micro_batch >= 0][:1]
    many = tuple(replace(span, micro_batch=number) for span in blocks for number in range(MAX_BARS + 1))
    with pytest.raises(SpecError, match="draw fewer micro-batches"):
        timeline_svg(replace(step, spans=many))


@pytest.mark.parametrize(("wanted", "step"), [(1.0, 1.0), (1.1, 2.0), (0.03, 0.05), (70.0, 100.0), (2e-4, 2e-4)])
def test_ticks_are_round(wanted: float, step: float) -> None:
    assert _round_step(wanted) == pytest.approx(step)
