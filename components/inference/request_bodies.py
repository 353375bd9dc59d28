"""Request bodies: types are strict, unknown keys are refused, and problems are worded for a client of the API.

JSON has types of its own, so none is converted: `"no"` and `1` are no booleans, `"0.5"` and `true` no numbers. Only a
whole number may stand for a number with a fraction. A similar name is suggested for a typing error only, because the
names of other servers' parameters resemble ours by chance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, model_validator

from components.errors import Problem, SpecError
from components.specs import Spec, validate
from components.specs.wording import shortened

Body = TypeVar("Body", bound=Spec)
Neutral = dict[str, tuple[Any, ...]]
"""Unsupported parameters, each with its neutral values, which are accepted."""
LONGEST_NAME = 256
"""Maximum length of the name of a tool, an author or a model, and of a stop string."""
CHARACTERS_PER_EDIT = 4
"""Characters of a name for which one wrong character is a typing error."""
_UNKNOWN = re.compile(r"no such key(?: in (?P<place>\S+))?; expected one of ")
_VALUE = re.compile(r"'([^']*)': expected one of ")


def _off(value: bool) -> bool:
    if value:
        raise ValueError("false, because this server does not support it")
    return value


Off = Annotated[bool, AfterValidator(_off)]
"""Switch of a feature that is not supported."""


class RequestBody(Spec):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True)

    _numbers = model_validator(mode="before")(classmethod(lambda cls, data: data))  # type: ignore[arg-type]
    """Strict types reject a bool for a number by themselves."""


class StreamOptions(RequestBody):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """Last chunk with the token counts."""
    include_obfuscation: Off | None = None


class ResponsesStreamOptions(RequestBody):
    """Options of a streamed response of the Responses API."""

    include_obfuscation: Off | None = None


def read_body(cls: type[Body], data: Any, path: str = "", apart: Sequence[str] = ()) -> Body:
    """Return a JSON object of a request. path: its place in the request. apart: keys that are read elsewhere.

    Raises SpecError with every problem; that of an unknown key lists all that are known.
    """
    try:
        needed = {name: data[name] for name in data if name not in apart} if isinstance(data, dict) else data
        return validate(cls, needed, path=path, configuration=False)
    except SpecError as error:
        raise SpecError([_worded(problem, path, apart) for problem in error.problems]) from None


def parse_parameters(
    cls: type[Body], body: dict[str, Any], neutral: Neutral, apart: Sequence[str]
) -> tuple[Body, list[Problem]]:
    """Return a request without the parameters of `neutral` and `apart`, and the problems of those of `neutral`. Raises
    SpecError with every problem if the others are invalid."""
    problems = unsupported(body, neutral)
    try:
        return read_body(cls, body, apart=(*neutral, *apart)), problems
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from None


def unsupported(body: dict[str, Any], neutral: Neutral) -> list[Problem]:
    """Return a problem for each unsupported parameter of a request that is not at its neutral value."""
    text = "is not supported by this server; leave it out or send"
    return [
        Problem(name, f"{shortened(body[name])} {text} {shortened(allowed[-1])}")
        for name, allowed in neutral.items()
        if name in body and not any(_same(body[name], value) for value in allowed)
    ]


def unknown_keys(data: dict[str, Any], known: Sequence[str], path: str) -> list[Problem]:
    """Return a problem for each key of an object that is not known."""
    message = f"no such key in {path}; expected one of {', '.join(known)}"
    return [Problem(f"{path}.{name}", message, _typing_error(name, known)) for name in data if name not in known]


def _same(value: Any, neutral: Any) -> bool:
    """Return True for equal JSON values: `1` is not `true`, `0` is `0.0`."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _worded(problem: Problem, path: str, apart: Sequence[str]) -> Problem:
    """Return a problem as a client of the API reads it. path, apart: as in `read_body`."""
    message = problem.message
    message = message.replace("expected a mapping of keys to values", "expected an object")
    if unknown := _UNKNOWN.match(message):
        parent = ".".join(filter(None, (path, unknown["place"])))
        name = problem.path.removeprefix(f"{parent}.")
        known = sorted({*message[unknown.end() :].split(", "), *(apart if parent == path else ())})
        start = f"no such key in {parent}" if parent else "no such parameter"
        message = f"{start}; expected one of {', '.join(known)}"
        near = _typing_error(name, known)
        return Problem(problem.path, message, near and f"{parent}.{near}".removeprefix("."))
    value = _VALUE.match(message)
    near = _typing_error(value[1], [problem.nearest]) if value and problem.nearest else None
    return Problem(problem.path, message, near)


def _typing_error(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that differs from `name` by a few characters; None without one."""
    most = max(1, len(name) // CHARACTERS_PER_EDIT)
    near = [(edits, other) for other in known if (edits := _edits(name, other, most)) <= most]
    return min(near)[1] if near else None


def _edits(a: str, b: str, most: int) -> int:
    """Return the Levenshtein distance of two names: characters to insert, delete or replace. More than `most` if their
    lengths differ by more, which bounds the time for a long name."""
    if abs(len(a) - len(b)) > most:
        return most + 1
    row = list(range(len(b) + 1))
    for index, left in enumerate(a, 1):
        diagonal, row[0] = row[0], index
        for place, right in enumerate(b, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (left != right))
    return row[-1]
