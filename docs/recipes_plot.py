"""Plot of the recipes' results: held-out success before and after training, by experiment and seed, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

LEFT, WIDTH, ROW, TOP = 170, 560, 26, 30
"""Pixels: column of the names, width of the plot, height of a row, height above the first row."""


def plot(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return an SVG with a row for each experiment: a ring for each seed before training, a dot after it, and a line
    between the means. groups: rows of docs/results/recipes.json by experiment, in the order of the plot."""
    height = TOP + ROW * len(groups) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="16">Held-out success: rings before, dots after training, one for each seed</text>',
    ]
    bottom = TOP + ROW * len(groups)
    for tick in range(0, 11, 2):
        x = _x(tick / 10)
        parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick / 10:.1f}</text>')
    for number, (name, runs) in enumerate(groups.items()):
        y = TOP + ROW * number + ROW / 2
        before, after = (fmean(run[key] for run in runs) for key in ("before", "after"))
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<line x1="{_x(before)}" y1="{y}" x2="{_x(after)}" y2="{y}" stroke="#2a6fbb" stroke-width="3" '
            'opacity="0.4"/>'
        )
        for run in runs:
            parts.append(f'<circle cx="{_x(run["before"])}" cy="{y}" r="4" fill="white" stroke="#666"/>')
            parts.append(f'<circle cx="{_x(run["after"])}" cy="{y}" r="4" fill="#2a6fbb" opacity="0.8"/>')
    return "\n".join([*parts, "</svg>\n"])


def _x(share: float) -> float:
    """Return the position of a success rate, in pixels."""
    return round(LEFT + share * WIDTH, 1)
