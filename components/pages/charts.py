"""Small charts as SVG text: lines over rounds, stacked bars, and the calibration curve and the ROC of a judge.

The charts contain no colours. They use CSS classes, so the page defines their look in light and dark mode. Non-finite
numbers leave a gap. Every mark has a `<title>`, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from components.pages.page import COLOURS, number, percent

WIDTH, HEIGHT = 340, 180
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 24
"""Margins for the labels, in units of the view box."""

STYLE = """
svg { font: 15px system-ui, sans-serif; }
text { fill: #5e6a64; } .title { fill: #1b2420; font-weight: 600; font-size: 13px; }
.grid { stroke: #e2dfd4; } .zero { stroke: #8d9691; } .tick { font-size: 10.5px; fill: #8d9691; }
.line { fill: none; stroke: #24785a; stroke-width: 2; } .area { fill: #24785a; opacity: .09; }
.dot { fill: #fffefb; stroke: #24785a; stroke-width: 2; } .whisker { stroke: #24785a; stroke-width: 1.5; opacity: .5; }
.chance { stroke: #8d9691; stroke-dasharray: 4 4; }
"""
"""Style of the charts in a file of their own (`picture`). Pages have their own style, for light and dark mode."""

Format = Callable[[float], str]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return ticks at round numbers (steps of 1, 2, 2.5 or 5 times a power of ten) that cover [low, high] in about
    `count` steps."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def line_chart(
    xs: Sequence[int], ys: Sequence[float | None], *, name: str, text: Format, low: float | None, high: float | None
) -> str:
    """Return a chart of one line with its points; empty text if no value is finite.

    low, high: bounds that the axis must reach; None: from the data.
    """
    scales = _scales(xs, ys, low, high)
    if scales is None:
        return ""
    ticks, place_x, place_y = scales
    runs, dots = _points(dict(zip(xs, ys, strict=True)), "dot", "Round", lambda _, y: text(y), place_x, place_y)
    filled = ticks[0] <= 0.0 <= ticks[-1]  # an area that does not begin at 0 would overstate changes
    base = place_y(0.0)
    shapes = []
    for run in runs:
        if len(run) > 1:
            area = _path([(run[0][0], base), *run, (run[-1][0], base)])
            shapes += [f'<path class="area" d="{area} Z"/>'] if filled else []
            shapes.append(f'<path class="line" d="{_path(run)}"/>')
    return _svg(name, [*_axes(xs, place_x, ticks, place_y, text), *shapes, *dots])


def lines_chart(
    series: Mapping[str, Mapping[int, float | None]],
    *,
    name: str,
    text: Format,
    low: float | None,
    high: float | None,
    intervals: Mapping[str, Mapping[int, tuple[float, float]]] = MappingProxyType({}),
    rings: Mapping[str, tuple[int, str]] = MappingProxyType({}),
) -> str:
    """Return a chart of several lines on the same axes; see `line_chart`.

    series: values by round, by label. Lines may have different rounds; None is a gap. The classes `r0`, `r1`, … colour
    the lines in the order of `series`. intervals: bounds by round, by label, plotted as a band. rings: by label, the
    round marked with a ring, and the ring's title.
    """
    xs = sorted({x for values in series.values() for x in values})
    ys = [y for values in series.values() for y in values.values()]
    ys += [bound for bounds in intervals.values() for pair in bounds.values() for bound in pair]
    scales = _scales(xs, ys, low, high)
    if scales is None:
        return ""
    ticks, place_x, place_y = scales
    bands, lines, marks = [], [], []
    for index, (label, values) in enumerate(series.items()):
        colour, subject, bounds = f"r{index % COLOURS}", f"{escape(label)}, round", intervals.get(label, {})
        describe = _with_bounds(text, bounds)
        runs, dots = _points(values, f"dot {colour}", subject, describe, place_x, place_y)
        bands += _bands(values, bounds, colour, place_x, place_y)
        lines += [f'<path class="line {colour}" d="{_path(run)}"/>' for run in runs if len(run) > 1]
        marks += dots
        ringed, why = rings.get(label, (None, ""))
        if ringed is not None and (y := values.get(ringed)) is not None:
            title = f"<title>{subject} {ringed}: {escape(why)}</title>"
            centre = f'cx="{place_x(ringed):.1f}" cy="{place_y(y):.1f}"'
            marks.append(f'<circle class="ring {colour}" {centre} r="6.5">{title}</circle>')
    return _svg(name, [*_axes(xs, place_x, ticks, place_y, text), *bands, *lines, *marks])


def stacked_bars(
    xs: Sequence[int], series: Mapping[str, Sequence[float]], *, name: str, text: Format, width: int = WIDTH
) -> str:
    """Return a chart with one stacked bar per x, with parts in the order of `series` and classes `s0`, `s1`, ….

    Negative and non-finite values count as zero. Return empty text if all values are zero.
    """
    values = {label: [v if math.isfinite(v) and v > 0 else 0.0 for v in numbers] for label, numbers in series.items()}
    totals = [sum(column) for column in zip(*values.values(), strict=True)]
    if not totals or max(totals) <= 0:
        return ""
    ticks = nice_ticks(0.0, max(totals))
    place_x, place_y = _scale_x(xs, width, inset=0.5), _scale_y(ticks)
    bar = min(34.0, (width - LEFT - RIGHT) / len(xs) * 0.68)
    shapes = []
    for column, x in enumerate(xs):
        below = 0.0
        for index, (label, numbers) in enumerate(values.items()):
            top, bottom = place_y(below + numbers[column]), place_y(below)
            below += numbers[column]
            if bottom - top > 0.05:
                title = f"<title>Round {x}, {escape(label)}: {escape(text(numbers[column]))}</title>"
                shapes.append(
                    f'<rect class="bar s{index}" x="{place_x(x) - bar / 2:.1f}" y="{top:.1f}" width="{bar:.1f}" '
                    f'height="{bottom - top:.1f}">{title}</rect>'
                )
    return _svg(name, [*_axes(xs, place_x, ticks, place_y, text, width=width), *shapes], width)


def calibration_chart(bins: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart of mean truth over mean score by bin (`components.evaluation.calibration.curve`).

    The 95 % intervals are vertical strokes. Return empty text if there are no bins.
    """
    if not bins:
        return ""
    bounds = [bin_[name] for bin_ in bins for name in ("value", "low", "high") if bin_[name] is not None]
    ticks = nice_ticks(min(bounds), max(bounds))
    ticks_x = nice_ticks(bins[0]["score"], bins[-1]["score"])
    place_x, place_y = _scale_x(ticks_x), _scale_y(ticks)
    points = [(place_x(bin_["score"]), place_y(bin_["value"])) for bin_ in bins]
    shapes = [f'<path class="line" d="{_path(points)}"/>'] if len(points) > 1 else []
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
    axes = _axes(ticks_x, place_x, ticks, place_y, number, number)
    return _svg("Truth by decile of the score", [*axes, *shapes])


def preference_chart(bins: Sequence[Mapping[str, float]]) -> str:
    """Return a chart of the observed share of pairs ranked right over the predicted probability, with the diagonal of a
    calibrated reward model."""
    ticks_x, ticks = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0], [0.0, 0.25, 0.5, 0.75, 1.0]
    place_x, place_y = _scale_x(ticks_x), _scale_y(ticks)
    points = [(place_x(bin_["predicted"]), place_y(bin_["observed"])) for bin_ in bins]
    shapes = [
        f'<line class="chance" x1="{place_x(0.5):.1f}" y1="{place_y(0.5):.1f}" x2="{place_x(1):.1f}" '
        f'y2="{place_y(1):.1f}"/>'
    ]
    shapes += [f'<path class="line" d="{_path(points)}"/>'] if len(points) > 1 else []
    for bin_, (x, y) in zip(bins, points, strict=True):
        text = (
            f"predicted {percent(bin_['predicted'])}: observed {percent(bin_['observed'])}, {bin_['pairs']:.0f} pairs"
        )
        shapes.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(text)}</title></circle>')
    return _svg("Calibration", [*_axes(ticks_x, place_x, ticks, place_y, percent, percent), *shapes])


def roc_chart(points: Sequence[tuple[float, float]]) -> str:
    """Return a chart of the true positive rate over the false positive rate; empty text if there are no points."""
    if not points:
        return ""
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    place_x, place_y = _scale_x(ticks), _scale_y(ticks)
    placed = [(place_x(x), place_y(y)) for x, y in points]
    area = [*placed, (place_x(1.0), place_y(0.0))]
    chance = f'x1="{place_x(0):.1f}" y1="{place_y(0):.1f}" x2="{place_x(1):.1f}" y2="{place_y(1):.1f}"'
    shapes = [
        f'<line class="chance" {chance}/>',
        f'<path class="area" d="{_path(area)} Z"/>',
        f'<path class="line" d="{_path(placed)}"/>',
    ]
    return _svg("ROC", [*_axes(ticks, place_x, ticks, place_y, percent, percent), *shapes])


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


def _scales(
    xs: Sequence[int], ys: Sequence[float | None], low: float | None, high: float | None
) -> tuple[list[float], Callable[[float], float], Callable[[float], float]] | None:
    """Return the ticks of the y axis and the functions from x and y to coordinates; None if no y is finite."""
    finite = [y for y in ys if y is not None and math.isfinite(y)]
    if not finite:
        return None
    lowest, highest = min(finite), max(finite)
    bottom = lowest if low is None else min(lowest, low)
    top = highest if high is None else max(highest, high)
    if low is not None and not top > bottom:
        top = bottom + (abs(bottom) or 1.0)
    ticks = nice_ticks(bottom, top)
    if low is not None and lowest >= low:  # nothing lies beyond a bound
        ticks = [tick for tick in ticks if tick >= low - 1e-9]
    if high is not None and highest <= high:
        ticks = [tick for tick in ticks if tick <= high + 1e-9]
    return ticks, _scale_x(xs), _scale_y(ticks)


def _points(
    values: Mapping[int, float | None],
    kind: str,
    subject: str,
    describe: Callable[[int, float], str],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
) -> tuple[list[list[tuple[float, float]]], list[str]]:
    """Return the segments of the line, which end at gaps, and its dots. Their titles begin with `subject`."""
    runs: list[list[tuple[float, float]]] = [[]]
    dots = []
    for x, y in values.items():
        if y is None or not math.isfinite(y):
            runs.append([])
            continue
        point = (place_x(x), place_y(y))
        runs[-1].append(point)
        title = f"<title>{subject} {x}: {escape(describe(x, y))}</title>"
        dots.append(f'<circle class="{kind}" cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3">{title}</circle>')
    return [run for run in runs if run], dots


def _with_bounds(text: Format, bounds: Mapping[int, tuple[float, float]]) -> Callable[[int, float], str]:
    """Return a function that formats the value of a round, with its bounds if it has any."""

    def describe(x: int, y: float) -> str:
        return f"{text(y)} ({text(bounds[x][0])} to {text(bounds[x][1])})" if x in bounds else text(y)

    return describe


def _bands(
    values: Mapping[int, float | None],
    bounds: Mapping[int, tuple[float, float]],
    colour: str,
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
) -> list[str]:
    """Return the bands between the bounds, one per segment without gaps; the class `alone` marks single points."""
    stretches: list[list[int]] = [[]]
    for x, y in values.items():
        if y is None or x not in bounds:
            stretches.append([])
        else:
            stretches[-1].append(x)
    shapes = []
    for stretch in filter(None, stretches):
        edge = [(place_x(x), place_y(bounds[x][1])) for x in stretch]
        edge += [(place_x(x), place_y(bounds[x][0])) for x in reversed(stretch)]
        alone = " alone" if len(stretch) == 1 else ""
        shapes.append(f'<path class="band{alone} {colour}" d="{_path(edge)} Z"/>')
    return shapes


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return SVG path data for a line through the points."""
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _scale_x(xs: Sequence[float], width: int = WIDTH, inset: float = 0.0) -> Callable[[float], float]:
    """Return the function from x to a coordinate. inset: margin at both ends, in steps of x."""
    first, last = xs[0] - inset, xs[-1] + inset
    if last <= first:
        first, last = first - 1, last + 1
    return lambda x: LEFT + (x - first) / (last - first) * (width - LEFT - RIGHT)


def _scale_y(ticks: Sequence[float]) -> Callable[[float], float]:
    """Return the function from y to a coordinate."""
    low, high = ticks[0], ticks[-1]
    return lambda y: HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _axes(
    xs: Sequence[float],
    place_x: Callable[[float], float],
    ticks: Sequence[float],
    place_y: Callable[[float], float],
    text: Format,
    text_x: Format = str,
    width: int = WIDTH,
) -> list[str]:
    """Return the grid lines and labels of the y axis, and at most ten labels of the x axis."""
    parts = []
    for tick in ticks:
        y = place_y(tick)
        kind = "grid zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text(tick))}</text>'
        )
    for x in xs[:: max(1, math.ceil(len(xs) / 10))]:
        label = f'x="{place_x(x):.1f}" y="{HEIGHT - 7}" text-anchor="middle"'
        parts.append(f'<text class="tick" {label}>{escape(text_x(x))}</text>')
    return parts


def _svg(name: str, parts: Sequence[str], width: int = WIDTH) -> str:
    """Return an SVG element with these parts and an accessible name."""
    head = f'<svg class="plot" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(name)}">'
    return head + "".join(parts) + "</svg>"
