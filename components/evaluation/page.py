"""Rendering of self-contained HTML pages from the templates, with every value escaped.

The pages load no resources and run no scripts; their content security policy forbids it. Text of models and
environments is shown as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from components.evaluation.format import FILTERS

TEMPLATES = Path(__file__).parent / "templates"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def page(template: str, **values: Any) -> str:
    """Render a template as HTML text that can be encoded as UTF-8."""
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
    # Models emit lone surrogates, which UTF-8 cannot encode, and control characters, which HTML does not allow.
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", html.encode("utf-8", "replace").decode("utf-8"))
