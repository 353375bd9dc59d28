"""Whether the answer is JSON that fits a schema: 1, or 0 with what does not fit.

Validation may take for ever where a schema's pattern meets what nobody foresaw, so it is done in a process beside this
one. An answer that takes too long, or cannot be validated, does not fit: 0. What is wrong with the schema itself is
found before, whatever the answer: a pattern that is none, a reference to what is not in it or to itself without end.
Nothing is fetched.

JSON is read strictly: a name stands once in an object, and numbers are finite.
"""

from __future__ import annotations

import json
import re
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

from pydantic import Field

from components.errors import AnswerTooCostly, JudgeError, Problem, SpecError
from components.json_text import STRICT
from components.rewards.rules.answers import Answer, check_field, field
from components.rewards.worker_process import WorkerProcess
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_FENCED = re.compile(r"\s*+```(?:json)?[^\S\n]*+\n(.*)\n[^\S\n]*+```\s*+", re.DOTALL)


@registered("reward.json_schema")
class JsonSchema:
    """An answer that fits a schema.

    Args:
        schema: The JSON schema; or a field of the episode that holds it, such as `input.schema`. answer: Where the
        answer stands (`components.rewards.rules.answers`). A fence of three backticks around it is taken off. seconds:
        Of CPU time that validation may take.
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
        self._misfit = WorkerProcess(
            "components.rewards.rules.json_schema:misfit", seconds, ["jsonschema", "referencing"]
        )

    def fields_read(self) -> dict[str, str]:
        """Fields of the episode that are read, by key."""
        return {"schema": self.schema} if isinstance(self.schema, str) else {}

    def __call__(self, trajectory: Trajectory) -> Score:
        schema = field(trajectory, self.schema) if isinstance(self.schema, str) else self.schema
        if isinstance(self.schema, str) and (wrong := _wrong(schema)) is not None:
            raise JudgeError(f"{self.schema} is no JSON schema: {wrong}")
        text = self._answer.of(trajectory)
        try:
            why = "no answer" if text is None else self._misfit(text=text, schema=schema)
        except AnswerTooCostly as error:
            why = f"the answer could not be validated: {error}"
        return Score(trajectory.id, float(not why), explanation=why)


def misfit(text: str, schema: dict[str, Any]) -> str:
    """What is wrong with a text that should fit the schema; empty where nothing is."""
    from jsonschema import validators
    from jsonschema.exceptions import best_match
    from referencing import Registry

    fenced = _FENCED.fullmatch(text)
    try:
        data = json.loads(fenced[1] if fenced else text, **STRICT)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error!s:.200}"
    kind = validators.validator_for(schema, default=validators.validator_for({}))
    try:
        found = best_match(kind(schema, registry=Registry()).iter_errors(data))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001  the schema is in order, so it is the answer
        return f"the answer could not be validated: {type(error).__name__}: {error!s:.200}"
    return "" if found is None else f"{found.json_path}: {found.message:.200}"


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
    return _unusable(schema)


# A schema under these keywords applies to the same value as the one that it is in.
_SAME_VALUE = ("not", "if", "then", "else")
_SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")


def _unusable(schema: dict[str, Any]) -> str | None:
    """Return what is wrong with the references of a schema, which validation would find where an answer leads it."""
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root: Any = Resource.from_contents(schema, default_specification=DRAFT202012)
    left = [(root, Registry().resolver_with_root(root))]
    same_value: dict[int, list[int]] = {}
    while left:
        resource, resolver = left.pop()
        part = resource.contents
        if not isinstance(part, dict) or id(part) in same_value:
            continue
        applied = [part.get(key) for key in _SAME_VALUE]
        applied += [each for key in _SAME_VALUE_LISTS for each in part.get(key) or ()]
        for key in ("$ref", "$dynamicRef"):
            if isinstance(part.get(key), str):
                try:
                    target = resolver.lookup(part[key])
                except (Unresolvable, LookupError, ValueError):
                    return f"it refers to {part[key]!r:.80}, which is not in it"
                applied.append(target.contents)
                found = Resource.from_contents(target.contents, default_specification=DRAFT202012)
                left.append((found, target.resolver))
        same_value[id(part)] = [id(each) for each in applied if isinstance(each, dict)]
        left += [(each, resolver.in_subresource(each)) for each in resource.subresources()]
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError:
        return "it refers to itself without end"
    return None
