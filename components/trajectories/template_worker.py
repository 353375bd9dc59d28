"""Child side of `components.trajectories.chat_template`: renders Jinja templates as transformers does.

It does without transformers itself, whose import takes seconds. The sandbox of Jinja keeps a template from Python's
internals; the limits of the process keep it from all memory and time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """Tag `generation`, around the text that a model is to learn; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the node of a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


FIXED_TEXT = 1 << 20
"""Maximum number of characters of a template's own text in a rendering."""
EXPANSION = 8
"""Maximum length of the rendered messages and tools, as a multiple of their JSON."""


def render(template: str, today: str, conversations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of conversations, given as variables of the template. today: ISO date that templates read as the
    current one. Raises MemoryError if a text is too long."""
    program, texts = _compiled(template, today), []
    for variables in conversations:
        text = program.render(**variables)
        if len(text) > FIXED_TEXT and len(text) > (most := FIXED_TEXT + EXPANSION * len(json.dumps(variables))):
            raise MemoryError(f"it writes {len(text)} characters; expected at most {most}")
        texts.append(text)
    return texts


@lru_cache(maxsize=8)
def _compiled(template: str, today: str) -> Template:
    jinja = environment()
    jinja.filters["tojson"] = _as_json
    jinja.globals["raise_exception"] = _raise
    jinja.globals["strftime_now"] = datetime.fromisoformat(today).strftime
    return jinja.from_string(template)


def environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with the syntax of chat templates."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
