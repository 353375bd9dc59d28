"""Options of a model that its chat template cannot say, in a comment of the template, so that they stay with it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

_COMMENT = re.compile(r"\{#- espalier (\{[^{}]*+\}) -#\}")


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
        """Return the options in the source of a template."""
        match = _COMMENT.search(template)
        return cls(**json.loads(match[1])) if match else cls()

    def comment(self) -> str:
        """Return the comment with these options; empty for the defaults."""
        return "" if self == TemplateOptions() else f"{{#- espalier {json.dumps(asdict(self))} -#}}"
