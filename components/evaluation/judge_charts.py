"""Charts of a judge as SVG text: the calibration curve and the ROC. The page or file that contains them defines their
look (`components.evaluation.plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from components.evaluation.format import number, percent
from components.evaluation.plots import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, axis_y, nice_ticks, path, scale_y, svg

STYLE = """
svg { font: 15px system-ui, sans-serif; }
text { fill: #5e6a64; } .title { fill: #1b2420; font-weight: 600; font-size: 13px; }
.grid { stroke: #e2dfd4; } .zero { stroke: #8d9691; } .tick { font-size: 10.5px; fill: #8d9691; }
.line { fill: none; stroke: #24785a; stroke-width: 2; } .area { fill: #24785a; opacity: .09; }
.dot { fill: #fffefb; stroke: #24785a; stroke-width: 2; } .whisker { stroke: #24785a; stroke-width: 1.5; opacity: .5; }
.chance { stroke: #8d9691; stroke-dasharray: 4 4; }
"""
"""Style of a chart in a file of its own. Pages have their own style, for light and dark mode."""


def calibration_chart(bins: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart of mean truth over mean score by bin (`components.evaluation.calibration.curve`).

    The 95 % intervals are vertical strokes. Return empty text if there are no bins.
    """
    if not bins:
        return ""
    bounds = [bin_[name] for bin_ in bins for name in ("value", "low", "high") if bin_[name] is not None]
    ticks = nice_ticks(min(bounds), max(bounds))
    ticks_x = nice_ticks(bins[0]["score"], bins[-1]["score"])
    place_x, place_y = _scale_x(ticks_x), scale_y(ticks)
    points = [(place_x(bin_["score"]), place_y(bin_["value"])) for bin_ in bins]
    shapes = [f'<path class="line" d="{path(points)}"/>'] if len(points) > 1 else []
    for bin_, (x, y) in zip(bins, points, strict=True):
        text = f"score {number(bin_['score'])}: truth {number(bin_['value'])}"
        if bin_["low"] is not None:
            shapes.append(
                f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{place_y(bin_["low"]):.1f}" '
                f'y2="{place_y(bin_["high"]):.1f}"/>'
            )
            text += f" ({number(bin_['low'])} to {number(bin_['high'])})"
        title = f"<title>{escape(text)}, {bin_['n']} episodes</title>"
        shapes.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>')
    return svg("Truth by decile of the score", [*axis_y(ticks, place_y, number), *_axis_x(ticks_x), *shapes])


def roc_chart(points: Sequence[tuple[float, float]]) -> str:
    """Return a chart of the true positive rate over the false positive rate; empty text if there are no points."""
    if not points:
        return ""
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    place_x, place_y = _scale_x(ticks), scale_y(ticks)
    placed = [(place_x(x), place_y(y)) for x, y in points]
    area = [*placed, (place_x(1.0), place_y(0.0))]
    chance = f'x1="{place_x(0):.1f}" y1="{place_y(0):.1f}" x2="{place_x(1):.1f}" y2="{place_y(1):.1f}"'
    shapes = [
        f'<line class="chance" {chance}/>',
        f'<path class="area" d="{path(area)} Z"/>',
        f'<path class="line" d="{path(placed)}"/>',
    ]
    return svg("ROC", [*axis_y(ticks, place_y, percent), *_axis_x(ticks, percent), *shapes])


def picture(charts: Mapping[str, str], title: str) -> str:
    """Return the charts, given by title, side by side as one self-contained SVG file."""
    drawn = {name: chart for name, chart in charts.items() if chart}
    width, height = max(1, len(drawn)) * (WIDTH + 20) + 20, HEIGHT + 70
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{2 * width}">'
    parts = [f"<style>{STYLE}</style>", f'<rect width="{width}" height="{height}" fill="#fffefb"/>']
    parts.append(f'<text class="title" x="20" y="26">{escape(title)}</text>')
    for index, (name, chart) in enumerate(drawn.items()):
        x = 20 + index * (WIDTH + 20)
        parts.append(f'<text x="{x}" y="48" font-size="12">{escape(name)}</text>')
        parts.append(chart.replace("<svg ", f'<svg x="{x}" y="56" width="{WIDTH}" height="{HEIGHT}" ', 1))
    return head + "".join(parts) + "</svg>\n"


def _scale_x(ticks: Sequence[float]) -> Any:
    low, high = ticks[0], ticks[-1]
    return lambda x: LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _axis_x(ticks: Sequence[float], text: Any = number) -> list[str]:
    place = _scale_x(ticks)
    return [
        f'<text class="tick" x="{place(tick):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">'
        f"{escape(text(tick))}</text>"
        for tick in ticks
    ]
