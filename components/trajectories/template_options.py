"""Options of a model that its chat template cannot say, in a comment of the template, so that they stay with it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

from components.errors import ResourceError
from components.trajectories.call_forms import FORMS
from components.trajectories.native_calls import PYTHONIC

_COMMENT = re.compile(r"\{#- espalier (\{[^#]*\}) -#\}(?:\{\{- '' \}\})?")


@dataclass(frozen=True)
class TemplateOptions:
    """Options of reading and continuing a model's answers."""

    keep_reasoning: bool = False
    """True if later prompts keep the reasoning of earlier answers, as it was sampled, also where the template drops
    it."""
    call_form: str | None = None
    """Name of the form of calls (`call_forms.FORMS`, or `pythonic`); None for the one that the template writes."""

    @classmethod
    def read(cls, template: str) -> TemplateOptions:
        """Return the options in the source of a template. Raises ResourceError for options that are not known."""
        match = _COMMENT.search(template)
        if match is None:
            return cls()
        try:
            options = json.loads(match[1])
        except ValueError as error:
            raise ResourceError(f"the chat template has options that are no JSON: {match[1]}; {error}") from None
        known = {field.name for field in fields(cls)}
        if unknown := sorted(options.keys() - known):
            _refuse(", ".join(unknown), options, f"only {' and '.join(sorted(known))}")
        if not isinstance(options.get("keep_reasoning", False), bool):
            _refuse("keep_reasoning", options, "true or false")
        if (form := options.get("call_form")) is not None and form not in (forms := [PYTHONIC, *FORMS]):
            _refuse("call_form", options, f"null or one of {', '.join(forms)}")
        return cls(**options)

    def write(self, template: str) -> str:
        """Return a template with these options in place of its own."""
        template = _COMMENT.sub("", template)
        # The comment is followed by an expression, because Jinja trims nothing after expressions.
        note = f"{{#- espalier {json.dumps(asdict(self))} -#}}{{{{- '' }}}}"
        return template if self == TemplateOptions() else note + template


def _refuse(name: str, options: dict[str, Any], expected: str) -> NoReturn:
    raise ResourceError(
        f"the chat template has the options {json.dumps(options)}; {name}: expected {expected}. Use the version of "
        "Espalier that exported the model, or correct the comment in chat_template.jinja"
    )
