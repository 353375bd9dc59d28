"""Pages: self-contained HTML from the templates, with every value escaped.

The pages load nothing and run no scripts: their content policy forbids it. What a model or an environment wrote is
shown as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from components.evaluation.format import FILTERS

TEMPLATES = Path(__file__).parent / "templates"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def page(template: str, **values: Any) -> str:
    """The template filled with the values, as HTML text that can be written as UTF-8."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    html = environment.get_template(template).render(values)
    # Lone surrogates cannot be written as UTF-8, control characters are not allowed in HTML: both come out of models.
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", html.encode("utf-8", "replace").decode("utf-8"))
