"""Request bodies: types are strict, unknown keys are refused, and problems are worded for a client of the API.

JSON has types of its own, so none is converted: `"no"` and `1` are no booleans, `"0.5"` and `true` no numbers. Only a
whole number may stand for a number with a fraction. A similar name is suggested for a typing error only, because the
names of other servers' parameters resemble ours by chance.

Every parameter of a request is supported, accepted at its neutral value (`service_tier: "auto"`), because clients send
such values by default, or rejected with its name and reason; none is ignored. The size of a request is limited, and so
are the sampler's parameters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from components.errors import Problem, SpecError
from components.inference.protocol import MAIN, Sampling
from components.specs import Spec, validate
from components.specs.wording import shortened
from components.strict_json import parse

Body = TypeVar("Body", bound=Spec)
Neutral = dict[str, tuple[Any, ...]]
"""Unsupported parameters, each with its neutral values, which are accepted."""
LONGEST_NAME = 256
"""Maximum length of the name of a tool, an author or a model, and of a stop string."""
MAX_MESSAGES = 4096
"""Maximum number of messages per conversation, parts per message, and calls per message."""
MAX_ALTERNATIVES = 20
"""Maximum number of most likely tokens to return for each token."""
MAX_STOPS = 16
"""Maximum number of stop strings per request."""
MAX_NUMBER = 2**31 - 1
"""Maximum value of a token count."""
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-3, 100.0
"""Range of temperatures above 0. Logits divided by much smaller values overflow."""
LOWEST_TOP_P = 1e-9
"""Minimum of top_p. Much smaller values underflow to 0, which excludes all tokens."""
CHARACTERS_PER_EDIT = 4
"""Characters of a name for which one wrong character is a typing error."""
_UNKNOWN = re.compile(r"no such key(?: in (?P<place>\S+))?; expected one of ")
_VALUE = re.compile(r"'([^']*)': expected one of ")


def _off(value: bool) -> bool:
    if value:
        raise ValueError("false, because this server does not support it")
    return value


def _usable(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"0 for greedy answers, or at least {LOWEST_TEMPERATURE:g}")
    return temperature


Off = Annotated[bool, AfterValidator(_off)]
"""Switch of a feature that is not supported."""
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Tokens = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES, strict=True)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]


class RequestBody(Spec):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True)

    _numbers = model_validator(mode="before")(classmethod(lambda cls, data: data))  # type: ignore[arg-type]
    """Strict types reject a bool for a number by themselves."""


class SamplingBody(RequestBody):
    """Parameters that all APIs share."""

    model: Name
    """Model name: `name`, or `name@version` to require that policy version."""
    temperature: Annotated[float, Field(ge=0, le=HIGHEST_TEMPERATURE), AfterValidator(_usable)] | None = None
    top_p: Annotated[float, Field(ge=LOWEST_TOP_P, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] | None = None
    """0 and -1 mean no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Sampling seed; None uses a random seed per request."""
    stream: bool | None = None
    user: str | None = None
    """The caller's label; it has no effect."""

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the parameters for the engine, with the defaults of the API."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            max_tokens=max_tokens,
        )

    def sampling_seed(self) -> int:
        """Return the seed; a random one without."""
        return secrets.randbits(31) if self.seed is None else self.seed


class StreamOptions(RequestBody):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """Last chunk with the token counts."""
    include_obfuscation: Off | None = None


class ChunkedBody(SamplingBody):
    """Parameters that Chat Completions and completions share."""

    n: int | None = Field(None, ge=1, le=128)
    """Number of responses to the conversation or prompt; response i uses seed + i."""
    stop: Stop | None = None
    """Strings that end a response."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Token ids of prompt and response in the response, as in vLLM."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def stream_problems(self) -> list[Problem]:
        """Return the problem of options of a stream without one."""
        wrong = self.stream_options and not self.stream
        return [Problem("stream_options", "is allowed with stream: true only")] if wrong else []

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ResponsesStreamOptions(RequestBody):
    """Options of a streamed response of the Responses API."""

    include_obfuscation: Off | None = None


@dataclass(frozen=True)
class RequestContext:
    """Models and settings of a server, for the reading of a request."""

    policy: Callable[[str], str]
    """Version of a model name."""
    default_max_tokens: int = 512
    recorded: bool = False
    """True if the server records responses for training: `strict` of tools then has no effect, so that calls are the
    policy's own, and logits cannot be changed."""
    sampled_arguments: Collection[str] = ()
    """Call arguments that the model wrote, which are accepted even if they are invalid JSON."""
    agent: str = MAIN
    """Name of the requesting agent."""

    def check_arguments(self, text: str, path: str, problems: list[Problem]) -> None:
        """Add a problem if the arguments of a call are no JSON object and were not written by the model."""
        try:
            readable = isinstance(parse(text.encode()), dict)
        except ValueError:
            readable = False
        if not readable and text not in self.sampled_arguments:
            problems.append(Problem(path, f"expected the text of a JSON object, got {text!r:.200}"))


def read_body(cls: type[Body], data: Any, path: str = "", apart: Sequence[str] = ()) -> Body:
    """Return a JSON object of a request. path: its place in the request. apart: keys that are read elsewhere.

    Raises SpecError with every problem; that of an unknown key lists all that are known.
    """
    try:
        needed = {name: data[name] for name in data if name not in apart} if isinstance(data, dict) else data
        return validate(cls, needed, path=path, configuration=False)
    except SpecError as error:
        raise SpecError([_worded(problem, path, apart) for problem in error.problems]) from None


def read_part(cls: type[Body], data: Any, path: str, problems: list[Problem], apart: Sequence[str] = ()) -> Body | None:
    """Return a JSON object of a request as `read_body`; None after adding its problems."""
    try:
        return read_body(cls, data, path, apart)
    except SpecError as error:
        problems += error.problems
        return None


def parse_parameters(cls: type[Body], body: dict[str, Any], neutral: Neutral) -> tuple[Body, list[Problem]]:
    """Return a request without the parameters of `neutral`, and the problems of these. Raises SpecError with every
    problem if the others are invalid."""
    problems = unsupported(body, neutral)
    try:
        return read_body(cls, body, apart=tuple(neutral)), problems
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
