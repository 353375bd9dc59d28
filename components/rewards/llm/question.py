"""One question to a judge, and once more with what was wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from components.errors import JudgeError
from components.rewards.llm.answers import find_json
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.protocol import Answer, Messages, add_costs

T = TypeVar("T")
SHOWN = 200
"""Characters of an answer in a message."""


class InvalidAnswer(Exception):
    """An answer that cannot be used as it is. The message tells the judge what to correct."""

    def __init__(self, correction: str, rest: Any = None):
        super().__init__(correction)
        self.rest = rest
        """What of it can be used; None is nothing."""


@dataclass(frozen=True)
class Judgement(Generic[T]):
    """What became of a question."""

    value: T | None
    """None: nothing could be used, and `why` says why."""
    cost: float | None
    """Of all calls."""
    why: str = ""


async def ask_for_json(
    client: JudgeClient,
    messages: Messages,
    schema: dict[str, Any],
    read: Callable[[dict[str, Any]], T],
    repeat: int = 0,
    needed: Sequence[str] = (),
) -> Judgement[T]:
    """What `read` makes of the JSON object that the judge answers with; it raises InvalidAnswer where that is not as it
    should be. Then the judge is asked once more, with its answer and what was wrong. needed: what the object has to
    hold, where that is not all that the schema requires. Raises BudgetSpent, ResourceError."""
    wanted = list(needed or schema["required"])
    try:
        first = await client.ask(messages, schema, repeat)
    except JudgeError as error:
        return Judgement(None, 0.0, str(error))
    try:
        value = _read(first, wanted, read)
        client.keep(first)
        return Judgement(value, first.cost)
    except InvalidAnswer as wrong:
        before = wrong
    corrected = [
        *messages,
        {"role": "assistant", "content": first.text or first.refusal or "(nothing)"},
        {"role": "user", "content": f"{before} Answer again, with the whole JSON object and nothing else."},
    ]
    try:
        second = await client.ask(corrected, schema, repeat, at_once=True)
    except JudgeError as error:
        return Judgement(before.rest, first.cost, str(error))
    cost = add_costs(first.cost, second.cost)
    try:
        value = _read(second, wanted, read)
        client.keep(first, second)
        return Judgement(value, cost)
    except InvalidAnswer as wrong:
        rest = wrong.rest if wrong.rest is not None else before.rest
        return Judgement(
            rest, cost, f"{client.name} did not judge as it was asked, twice. {wrong} It said: {_shown(second)}"
        )


def _read(answer: Answer, wanted: Sequence[str], read: Callable[[dict[str, Any]], T]) -> T:
    if answer.refusal:
        raise InvalidAnswer(
            f"You refused ({answer.refusal[:SHOWN]}), and only a judgement of what others wrote is wanted."
        )
    alone = wanted[0] if len(wanted) == 1 else None  # then its value may come without its name

    def fits(one: Any) -> bool:
        if isinstance(one, list):
            return alone is not None and bool(one) and all(isinstance(item, dict) for item in one)
        return isinstance(one, dict) and all(name in one for name in wanted)

    found = find_json(answer.text, fits)
    if found is None and answer.cut_off:
        raise InvalidAnswer("Your answer was cut off because it was too long: be much briefer in the explanations.")
    if found is None:
        raise InvalidAnswer(f"Your answer holds no JSON object with {', '.join(wanted)}.")
    return read({alone: found} if isinstance(found, list) and alone is not None else found)


def _shown(answer: Answer) -> str:
    said = answer.refusal or answer.text
    return repr(said if len(said) <= SHOWN else said[:SHOWN] + "…")
