"""Self-contained HTML pages from the templates, with every value escaped, and the formats of their numbers and texts.

The pages load no resources and run no scripts; their content security policy forbids it. Text of models and
environments is shown as text. Missing and non-finite numbers become a dash.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.pages.episodes import view
from components.redaction import mask, mask_text

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = 6
"""Number of colours of rows and lines; further ones reuse them from the first."""
_NONE = "–"
_THIN = "\N{NARROW NO-BREAK SPACE}"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def page(template: str, **values: Any) -> str:
    """Render a template as HTML text that can be encoded as UTF-8."""
    html = _environment(TEMPLATES).get_template(template).render(values, sections=[], colours=COLOURS)
    # Models emit lone surrogates, which UTF-8 cannot encode, and control characters, which HTML does not allow.
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", html.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def _environment(folder: Path) -> Environment:
    """Return the templates of a folder, each compiled once per process."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment


def percent(value: float | None) -> str:
    """Format a share as a percentage: 0.123 as `12 %`. Small percentages have one decimal."""
    if value is None or not math.isfinite(value):
        return _NONE
    share = 100 * value
    return f"{share:.1f}{_THIN}%" if 0 < abs(share) < 2 and abs(share - round(share)) > 0.05 else f"{share:.0f}{_THIN}%"


def number(value: float | None) -> str:
    """Format a number with three significant digits, and without an exponent from 1e-4 to below 1e6."""
    if value is None or not math.isfinite(value):
        return _NONE
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6 or size < 1e-4:
        return f"{value:.2g}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Format a duration: `0.42 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if seconds < 10:
        return f"{seconds:.2g}{_THIN}s"
    if seconds < 60:
        return f"{seconds:.0f}{_THIN}s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{_THIN}min" + (f" {remainder:02d}{_THIN}s" if remainder else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_THIN}h" + (f" {minutes:02d}{_THIN}min" if minutes else "")


def interval(measure: Mapping[str, Any], text: str = "number") -> str:
    """Format an interval, `0.61 to 0.74`, as numbers or as percentages."""
    low, high = measure["low"], measure["high"]
    if low is None or high is None:
        return ""
    return f"{percent(low)} to {percent(high)}" if text == "percent" else f"{number(low)} to {number(high)}"


def points(value: float | None) -> str:
    """Format a difference of shares in percentage points, with its sign."""
    return _NONE if value is None or not math.isfinite(value) else f"{100 * value:+.0f}"


def css(value: float | None) -> str:
    """Format a share as a CSS percentage, clipped to 0 to 100."""
    return "0%" if value is None or not math.isfinite(value) else f"{100 * min(max(value, 0.0), 1.0):.2f}%"


def arguments(text: str) -> str:
    """Format the JSON arguments of a tool call as `key=value, ...`. Text that is not a JSON object is unchanged."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    if not isinstance(parsed, dict):
        return text
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in parsed.items())


def compact(value: Any) -> str:
    """Format JSON data on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def judgement(difference: Mapping[str, Any]) -> str:
    """Return the verdict that the interval of a difference allows."""
    if difference["low"] is None:
        return "not known"
    return "better" if difference["low"] > 0 else "worse" if difference["high"] < 0 else "no clear difference"


def masked_yaml(data: Mapping[str, Any]) -> str:
    """Format a configuration as YAML, with its secrets masked."""
    import yaml

    return yaml.safe_dump(mask(dict(data)), sort_keys=False, allow_unicode=True, width=110) if data else ""


FILTERS = {
    "percent": percent,
    "number": number,
    "duration": duration,
    "interval": interval,
    "points": points,
    "css": css,
    "arguments": arguments,
    "compact": compact,
    "judgement": judgement,
    "mask_text": mask_text,
    "masked_yaml": masked_yaml,
    "view": view,
}
