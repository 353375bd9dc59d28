"""Small charts as SVG text: lines over rounds, and stacked bars.

The charts contain no colours. They use CSS classes, so the page defines their look in light and dark mode. Non-finite
numbers leave a gap. Every mark has a `<title>`, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from types import MappingProxyType

WIDTH, HEIGHT = 340, 180
COLOURS = 6
"""Number of line colours; further lines reuse them from the first."""
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 24
"""Margins for the labels, in units of the view box."""

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
        points = " L".join(f"{x:.1f} {y:.1f}" for x, y in run)
        if len(run) > 1:
            if filled:
                area = f"M{run[0][0]:.1f} {base:.1f} L{points} L{run[-1][0]:.1f} {base:.1f} Z"
                shapes.append(f'<path class="area" d="{area}"/>')
            shapes.append(f'<path class="line" d="M{points}"/>')
    return svg(name, [*axis_y(ticks, place_y, text), *_axis_x(xs, place_x), *shapes, *dots])


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
        lines += [f'<path class="line {colour}" d="{path(run)}"/>' for run in runs if len(run) > 1]
        marks += dots
        ringed, why = rings.get(label, (None, ""))
        if ringed is not None and (y := values.get(ringed)) is not None:
            title = f"<title>{subject} {ringed}: {escape(why)}</title>"
            centre = f'cx="{place_x(ringed):.1f}" cy="{place_y(y):.1f}"'
            marks.append(f'<circle class="ring {colour}" {centre} r="6.5">{title}</circle>')
    return svg(name, [*axis_y(ticks, place_y, text), *_axis_x(xs, place_x), *bands, *lines, *marks])


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
    place_x, place_y = _scale_x(xs, width, inset=0.5), scale_y(ticks)
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
    return svg(name, [*axis_y(ticks, place_y, text, width), *_axis_x(xs, place_x), *shapes], width)


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
    return ticks, _scale_x(xs), scale_y(ticks)


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
        shapes.append(f'<path class="band{alone} {colour}" d="{path(edge)} Z"/>')
    return shapes


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return SVG path data for a line through the points."""
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _scale_x(xs: Sequence[int], width: int = WIDTH, inset: float = 0.0) -> Callable[[float], float]:
    """Return the function from x to a coordinate. inset: margin at both ends, in steps of x."""
    first, last = xs[0] - inset, xs[-1] + inset
    if last <= first:
        first, last = first - 1, last + 1
    return lambda x: LEFT + (x - first) / (last - first) * (width - LEFT - RIGHT)


def scale_y(ticks: Sequence[float]) -> Callable[[float], float]:
    """Return the function from y to a coordinate."""
    low, high = ticks[0], ticks[-1]
    return lambda y: HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def axis_y(ticks: Sequence[float], place: Callable[[float], float], text: Format, width: int = WIDTH) -> list[str]:
    """Return the grid lines and labels of the y axis."""
    parts = []
    for tick in ticks:
        y = place(tick)
        kind = "grid zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text(tick))}</text>'
        )
    return parts


def _axis_x(xs: Sequence[int], place: Callable[[float], float]) -> list[str]:
    every = max(1, math.ceil(len(xs) / 10))
    return [
        f'<text class="tick" x="{place(x):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{x}</text>' for x in xs[::every]
    ]


def svg(name: str, parts: Sequence[str], width: int = WIDTH) -> str:
    """Return an SVG element with these parts and an accessible name."""
    head = f'<svg class="plot" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(name)}">'
    return head + "".join(parts) + "</svg>"
