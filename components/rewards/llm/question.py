"""Question to a judge, with one correction if the answer is invalid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from components.errors import JudgeError
from components.json_text import find_json
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.protocol import JudgeAnswer, Messages, add_costs

T = TypeVar("T")
MAX_QUOTED = 200
"""Maximum characters of an answer in a message."""


class InvalidAnswer(Exception):
    """Invalid answer of a judge. The message tells the judge what to correct."""

    def __init__(self, correction: str, usable: Any = None):
        super().__init__(correction)
        self.usable = usable
        """Valid part of the answer; None if there is none."""


@dataclass(frozen=True)
class Judgement(Generic[T]):
    """Result of a question."""

    value: T | None
    """Parsed value; None if nothing is usable, with the reason in `reason`."""
    cost: float | None
    """Cost of all calls; None if unknown."""
    reason: str = ""


async def ask_for_json(
    client: JudgeClient,
    messages: Messages,
    schema: dict[str, Any],
    read: Callable[[dict[str, Any]], T],
    repeat: int = 0,
    needed: Sequence[str] = (),
) -> Judgement[T]:
    """Return what `read` makes of the JSON object that the judge answers with. If `read` raises InvalidAnswer, the
    judge is asked once more, with its answer and the problem. needed: keys that the object must have, if these are not
    all that the schema requires. Raises BudgetExceeded, ResourceError."""
    required = list(needed or schema["required"])
    try:
        first = await client.ask(messages, schema, repeat)
    except JudgeError as error:
        return Judgement(None, 0.0, str(error))
    try:
        value = _read(first, required, read)
        client.keep(first)
        return Judgement(value, first.cost)
    except InvalidAnswer as error:
        first_error = error
    correction = [
        *messages,
        {"role": "assistant", "content": first.text or first.refusal or "(nothing)"},
        {"role": "user", "content": f"{first_error} Answer again, with the whole JSON object and nothing else."},
    ]
    try:
        second = await client.ask(correction, schema, repeat, immediate=True)
    except JudgeError as error:
        return Judgement(first_error.usable, first.cost, str(error))
    cost = add_costs(first.cost, second.cost)
    try:
        value = _read(second, required, read)
        client.keep(first, second)
        return Judgement(value, cost)
    except InvalidAnswer as error:
        usable = error.usable if error.usable is not None else first_error.usable
        return Judgement(
            usable, cost, f"{client.name} did not judge as it was asked, twice. {error} It said: {_quoted(second)}"
        )


def _read(answer: JudgeAnswer, required: Sequence[str], read: Callable[[dict[str, Any]], T]) -> T:
    if answer.refusal:
        raise InvalidAnswer(
            f"You refused ({answer.refusal[:MAX_QUOTED]}), and only a judgement of what others wrote is wanted."
        )
    only_key = required[0] if len(required) == 1 else None  # then a bare list is accepted as its value

    def fits(data: Any) -> bool:
        if isinstance(data, list):
            return only_key is not None and bool(data) and all(isinstance(item, dict) for item in data)
        return isinstance(data, dict) and all(name in data for name in required)

    data = find_json(answer.text, fits)
    if data is None and answer.cut_off:
        raise InvalidAnswer("Your answer was cut off because it was too long: be much briefer in the explanations.")
    if data is None:
        raise InvalidAnswer(f"Your answer holds no JSON object with {', '.join(required)}.")
    return read({only_key: data} if isinstance(data, list) and only_key is not None else data)


def _quoted(answer: JudgeAnswer) -> str:
    text = answer.refusal or answer.text
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "…")
