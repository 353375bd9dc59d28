"""Whether the answer is JSON that fits a schema: 1, or 0 with what does not fit.

Validation may take for ever where a schema's pattern meets what nobody foresaw, so it is done in a process beside this
one; what takes too long is unscored. A schema may refer to what is in it, and to nothing that would have to be fetched.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import Field

from components.errors import JudgeError, Problem, SpecError
from components.rewards.answers import Answer, check_field, field
from components.rewards.apart import Apart
from components.trajectories.schema import Score, Trajectory

_FENCED = re.compile(r"\s*+```(?:json)?[^\S\n]*+\n(.*)\n[^\S\n]*+```\s*+", re.DOTALL)


class JsonSchema:
    """An answer that fits a schema.

    Args:
        schema: The JSON schema; or a field of the episode that holds it, such as `input.schema`.
        answer: Where the answer stands (`components.rewards.answers`). A fence of three backticks around it is taken
            off.
        seconds: That validation may take.
    """

    def __init__(
        self,
        schema: dict[str, Any] | str,
        answer: str = "text",
        seconds: Annotated[float, Field(gt=0, le=600)] = 2.0,
    ):
        self.schema = schema
        self._answer = Answer(answer)
        if isinstance(schema, str):
            check_field(schema, "reward.schema")
        elif (wrong := _wrong(schema)) is not None:
            raise SpecError([Problem("reward.schema", f"is no JSON schema: {wrong}")])
        self._misfit = Apart("components.rewards.json_schema:misfit", seconds, ["jsonschema", "referencing"])

    def __call__(self, trajectory: Trajectory) -> Score:
        schema = field(trajectory, self.schema) if isinstance(self.schema, str) else self.schema
        if isinstance(self.schema, str) and (wrong := _wrong(schema)) is not None:
            raise JudgeError(f"{self.schema} is no JSON schema: {wrong}")
        text = self._answer.of(trajectory)
        why = "no answer" if text is None else self._misfit(text=text, schema=schema)
        return Score(trajectory.id, float(not why), explanation=why)


def misfit(text: str, schema: dict[str, Any]) -> str:
    """What is wrong with a text that should fit the schema; empty where nothing is."""
    from jsonschema import validators
    from jsonschema.exceptions import best_match
    from referencing import Registry

    fenced = _FENCED.fullmatch(text)
    try:
        data = json.loads(fenced[1] if fenced else text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error!s:.200}"
    kind = validators.validator_for(schema, default=validators.validator_for({}))
    found = best_match(kind(schema, registry=Registry()).iter_errors(data))
    return "" if found is None else f"{found.json_path}: {found.message:.200}"


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _wrong(schema: Any) -> str | None:
    """What keeps it from being a schema."""
    from jsonschema import validators
    from jsonschema.exceptions import SchemaError

    if not isinstance(schema, dict):
        return f"{schema!r:.80} is no mapping"
    try:
        validators.validator_for(schema, default=validators.validator_for({})).check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message:.200}"
    return None
