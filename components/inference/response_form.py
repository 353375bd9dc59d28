"""The form that a request demands of a response: JSON of a schema, or a call of a tool.

Engines that sample hold a response to its form by constrained decoding: a grammar excludes each token that cannot
continue a valid response (`components.inference.grammar`). Engines of other servers pass the form on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ANY_OBJECT = '{"type": "object"}'
"""Schema of `json_object`."""


@dataclass(slots=True, frozen=True)
class ResponseForm:
    """The form of a response."""

    json_schema: str | None = None
    """JSON text of the schema that the content of a response without calls validates against; None allows any text."""
    schema_name: str = "response"
    """Label of the schema; it has no effect."""
    calls: tuple[str, ...] | None = None
    """Names of the tools of which the response calls exactly one; empty if it calls none, so that its text is content
    whatever it looks like. None leaves calls to the model."""
    strict: bool = False
    """True to hold the arguments of calls that the model makes to the schemas of their tools, if `calls` is None."""
    single: bool = False
    """True to hold a response to one call at most, if `strict`."""

    @property
    def constrained(self) -> bool:
        """True if tokens are excluded, so that the response is not a sample of the policy's own distribution."""
        return self.json_schema is not None or bool(self.calls) or self.strict

    @property
    def without_calls(self) -> bool:
        """True if the text of the response is its content, even if it looks like a call."""
        return self.calls == ()

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the content."""
        return json.loads(self.json_schema or "{}")


@dataclass(slots=True, frozen=True)
class LogitChange:
    """Changes of the logits that a request demands, before the temperature."""

    bias: tuple[tuple[int, float], ...] = ()
    """Additions to the logits of tokens, by token id."""
    presence: float = 0.0
    """Subtraction from the logit of each token that was sampled before in the response."""
    frequency: float = 0.0
    """Subtraction from the logit of a token for each time that it was sampled before in the response."""


NO_CHANGE = LogitChange()
"""The model's own logits."""
FREE = ResponseForm()
"""Any response."""
NO_CALLS = ResponseForm(calls=())
"""Text."""


def parameter_of(form: ResponseForm) -> str:
    """Return the name of the request's parameter that demands a form."""
    return "response_format" if form.json_schema is not None else "tools" if form.strict else "tool_choice"
