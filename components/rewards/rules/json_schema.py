"""JSON Schema validation of the answer: 1 if it is valid, else 0 with the first error.

Validation can take forever for some patterns, so it runs in a subprocess. An answer that exceeds the time limit or
cannot be validated counts as invalid: 0. Errors of the schema itself are detected before, whatever the answer: an
invalid pattern, a reference that does not resolve within the schema, or an endless cycle of references. Nothing is
fetched.

JSON is parsed strictly: no duplicate names in an object, and only finite numbers.
"""

from __future__ import annotations

import json
import re
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

from pydantic import Field

from components.errors import AnswerTooCostly, JudgeError, Problem, SpecError
from components.json_text import STRICT
from components.rewards.answer_worker import AnswerWorker
from components.rewards.rules.answers import AnswerReader, check_field, field
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_FENCED = re.compile(r"\s*+```(?:json)?[^\S\n]*+\n(.*)\n[^\S\n]*+```\s*+", re.DOTALL)


@registered("reward.json_schema")
class JsonSchema:
    """Validity of the answer under a JSON schema.

    Args:
        schema: The JSON schema; or a field of the episode that holds it, such as `input.schema`.
        answer: Place of the answer (`components.rewards.rules.answers`). A surrounding fence of three backticks is
            removed.
        seconds: CPU time limit of the validation.
    """

    def __init__(
        self,
        schema: dict[str, Any] | str,
        answer: str = "text",
        seconds: Annotated[float, Field(gt=0, le=600)] = 2.0,
    ):
        self.schema = schema
        self._answer = AnswerReader(answer)
        if isinstance(schema, str):
            check_field(schema, "reward.schema")
        elif (error := _schema_error(schema)) is not None:
            raise SpecError([Problem("reward.schema", f"is no JSON schema: {error}")])
        self._misfit = AnswerWorker(
            "components.rewards.rules.json_schema:misfit", seconds, ["jsonschema", "referencing"]
        )

    def fields_read(self) -> dict[str, str]:
        """Return the fields of the episode that are read, by configuration key."""
        return {"schema": self.schema} if isinstance(self.schema, str) else {}

    def __call__(self, trajectory: Trajectory) -> Score:
        schema = field(trajectory, self.schema) if isinstance(self.schema, str) else self.schema
        if isinstance(self.schema, str) and (problem := _schema_error(schema)) is not None:
            raise JudgeError(f"{self.schema} is no JSON schema: {problem}")
        text = self._answer.of(trajectory)
        try:
            reason = "no answer" if text is None else self._misfit(text=text, schema=schema)
        except AnswerTooCostly as error:
            reason = f"the answer could not be validated: {error}"
        return Score(trajectory.id, float(not reason), explanation=reason)


def misfit(text: str, schema: dict[str, Any]) -> str:
    """Return the validation error of a text; empty if it is valid."""
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
        violation = best_match(kind(schema, registry=Registry()).iter_errors(data))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001  the schema is valid, so the answer is at fault
        return f"the answer could not be validated: {type(error).__name__}: {error!s:.200}"
    return "" if violation is None else f"{violation.json_path}: {violation.message:.200}"


def _schema_error(schema: Any) -> str | None:
    """Return the error of a schema; None if it is usable."""
    from jsonschema import validators
    from jsonschema.exceptions import SchemaError

    if not isinstance(schema, dict):
        return f"{schema!r:.80} is no mapping"
    try:
        validators.validator_for(schema, default=validators.validator_for({})).check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message:.200}"
    return _reference_error(schema)


# A subschema under these keywords applies to the same value as its parent.
_SAME_VALUE = ("not", "if", "then", "else")
_SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")


def _reference_error(schema: dict[str, Any]) -> str | None:
    """Return the error in the references of a schema, which validation would meet only for some answers."""
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root: Any = Resource.from_contents(schema, default_specification=DRAFT202012)
    pending = [(root, Registry().resolver_with_root(root))]
    same_value: dict[int, list[int]] = {}
    while pending:
        resource, resolver = pending.pop()
        part = resource.contents
        if not isinstance(part, dict) or id(part) in same_value:
            continue
        applied = [part.get(key) for key in _SAME_VALUE]
        applied += [subschema for key in _SAME_VALUE_LISTS for subschema in part.get(key) or ()]
        for key in ("$ref", "$dynamicRef"):
            if isinstance(part.get(key), str):
                try:
                    target = resolver.lookup(part[key])
                except (Unresolvable, LookupError, ValueError):
                    return f"it refers to {part[key]!r:.80}, which is not in it"
                applied.append(target.contents)
                referenced = Resource.from_contents(target.contents, default_specification=DRAFT202012)
                pending.append((referenced, target.resolver))
        same_value[id(part)] = [id(subschema) for subschema in applied if isinstance(subschema, dict)]
        pending += [(subschema, resolver.in_subresource(subschema)) for subschema in resource.subresources()]
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError:
        return "it refers to itself without end"
    return None
