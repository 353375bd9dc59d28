"""Rewards in the form of TRL's trainers and of HelloAgents, as they are: `(completions, **columns) -> list[float]`.

A function is called once for each group, by name, with

    prompts, completions   as text (`form: text`): what was said before the agent's first message, and its last message;
                           or as messages in OpenAI's form (`form: messages`): those before its first one, and all from
                           there on, answers of tools among them
    completion_ids         the tokens that were sampled, as a list of ids
    columns                every field of the scenario's input and of the outcome, input first, and those that `columns`
                           names: {ground_truth: input.answer}. Where one episode of the group lacks a field: None
    log_metric, log_extra  TRL's: log_metric(name, value) becomes a component of each score of the group;
                           log_extra(column, values) one of each, if these are numbers, or else a line of explanation

A function with `**kwargs` gets all of them, any other what its parameters name. `trainer_state` and `environments` are
not to be had: judging is a stage of its own, before any training step. A function that demands them is refused.

It returns a number for each completion. None means that it does not apply (TRL leaves such a function out of the sum;
`optional: true` of a part of `combined` does). Anything else that is no finite number leaves that episode unscored, a
list of another length the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from components.errors import JudgeError, Problem, SpecError
from components.rewards.composition.composed import not_applicable
from components.rewards.judge import number, unscored
from components.rewards.rules.answers import check_field, field, last_text, main_history
from components.rewards.user_functions import ColumnsFunction, build_function, is_async
from components.specs.registered import registered
from components.trajectories.convert import to_openai
from components.trajectories.schema import Message, Score, Trajectory

PROVIDED_COLUMNS = ("prompts", "completions", "completion_ids", "log_metric", "log_extra")
REFUSED = ("trainer_state", "environments")


@registered("reward.columns")
class Columns:
    """A function of columns as a reward.

    Args:
        function: `package.module.name` of the function, or `{_target_: package.module.name, argument: value}`; of
            a class an instance is called. Its package must be in `allow`. In code, the function.
        form: What prompts and completions are, `text` or `messages`.
        columns: Fields of the episode (`components.rewards.rules.answers`) under names of their own.
        blocking: Whether a plain function waits for others, such as a server, and is to be asked in threads.
    """

    def __init__(
        self,
        function: ColumnsFunction,
        form: Literal["text", "messages"] = "text",
        columns: dict[str, str] | None = None,
        blocking: bool = False,
    ):
        self.function = build_function(function)
        self.form, self.columns, self.blocking = form, dict(columns or {}), blocking
        self.waits = is_async(self.function)
        self.name = getattr(self.function, "__name__", None) or getattr(
            getattr(self.function, "func", self.function), "__name__", type(self.function).__name__
        )
        for name, path in self.columns.items():
            check_field(path, f"reward.columns.{name}")
        parameters = _free(self.function)
        self._all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self._named = {name: one for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
        if problems := self._problems():
            raise SpecError(problems)

    def _problems(self) -> list[Problem]:
        found = []
        for name, one in self._named.items():
            if name in REFUSED and one.default is inspect.Parameter.empty:
                message = f"{self.name} asks for {name}, which only a trainer has; judging comes before training"
                found.append(Problem("reward.function", message))
            if one.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
                found.append(Problem("reward.function", f"{self.name} takes {name} by place; expected names only"))
        if not self._all and not {"completions", "completion_ids"} & set(self._named):
            message = f"{self.name} takes no completions; expected (completions, **columns) -> list of numbers"
            found.append(Problem("reward.function", message))
        if taken := sorted({*PROVIDED_COLUMNS, *REFUSED} & set(self.columns)):
            message = f"{taken[0]} is given already; expected another name"
            found.append(Problem(f"reward.columns.{taken[0]}", message))
        if not self._all and (idle := sorted(set(self.columns) - set(self._named))):
            message = f"{self.name} has no parameter {idle[0]}; it has {', '.join(self._named)}"
            found.append(Problem(f"reward.columns.{idle[0]}", message))
        return found

    def fields_read(self) -> dict[str, str]:
        """Fields of the episode that are read, by key."""
        return {f"columns.{name}": path for name, path in self.columns.items()}

    def score_group(self, group: Sequence[Trajectory]) -> list[Score] | Awaitable[list[Score]]:
        """One score for each trajectory of a scenario."""
        log = _Log(len(group))
        found = self.function(**self._given(group, log))
        if self.waits:
            return self._later(group, found, log)
        if inspect.iscoroutine(found):
            found.close()
            raise JudgeError(f"{self.name} returned a coroutine; expected `async def`, or a list of numbers")
        return self._read(group, found, log)

    async def _later(self, group: Sequence[Trajectory], found: Awaitable[Any], log: _Log) -> list[Score]:
        return self._read(group, await found, log)

    def _given(self, group: Sequence[Trajectory], log: _Log) -> dict[str, Any]:
        """The arguments of one call."""
        shown = [self._shown(one) for one in group]
        given: dict[str, Any] = self._columns(group) | {
            "prompts": [prompt for prompt, _ in shown],
            "completions": [completion for _, completion in shown],
            "completion_ids": [_sampled(one) for one in group],
            "log_metric": log.metric,
            "log_extra": log.extra,
        }
        lacking = [
            name
            for name, one in self._named.items()
            if name not in given and one.default is inspect.Parameter.empty and name not in REFUSED
        ]
        if lacking:
            columns = ", ".join(sorted(set(given) - set(PROVIDED_COLUMNS))) or "none"
            raise JudgeError(
                f"{self.name} asks for {', '.join(lacking)}; the columns are {columns}. To name one: "
                f"reward.columns={{{lacking[0]}: input.FIELD}}"
            )
        return given if self._all else {name: value for name, value in given.items() if name in self._named}

    def _columns(self, group: Sequence[Trajectory]) -> dict[str, list[Any]]:
        rows = [{**one.outcome, **one.scenario.input} for one in group]
        names = dict.fromkeys(name for row in rows for name in row if name not in REFUSED)
        found = {name: [row.get(name) for row in rows] for name in names}
        return found | {name: [field(one, path) for one in group] for name, path in self.columns.items()}

    def _shown(self, one: Trajectory) -> tuple[Any, Any]:
        """Prompt and completion."""
        messages = main_history(one).messages
        begin = next((at for at, message in enumerate(messages) if _own(message, messages)), len(messages))
        if self.form == "text":
            return "\n\n".join(message.content for message in messages[:begin]), last_text(one)
        return [to_openai(one) for one in messages[:begin]], [to_openai(one) for one in messages[begin:]]

    def _read(self, group: Sequence[Trajectory], found: Any, log: _Log) -> list[Score]:
        """The scores of what was returned."""
        found = found.tolist() if hasattr(found, "tolist") else found  # an array or a tensor
        if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
            raise JudgeError(f"{self.name} returned {found!r:.80} ({type(found).__name__}), expected a list of numbers")
        values = list(found)
        if len(values) != len(group):
            raise JudgeError(f"{self.name} returned {len(values)} values for {len(group)} completions")
        return [
            replace(self._score(one, value), **log.of(place))
            for place, (one, value) in enumerate(zip(group, values, strict=True))
        ]

    def _score(self, one: Trajectory, value: Any) -> Score:
        if value is None:
            return not_applicable(one, f"{self.name} returned None: it does not apply")
        try:
            return Score(one.id, number(value, f"what {self.name} returned"))
        except JudgeError as error:
            return unscored(one, error)


class _Log:
    """What a function logs, for the scores of its group."""

    def __init__(self, size: int):
        self._size = size
        self._metrics: dict[str, float] = {}
        self._extra: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        self._metrics[name] = number(value, f"log_metric {name}")

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self._size:
            raise JudgeError(f"log_extra {column} has {len(values)} values for {self._size} completions")
        self._extra[column] = list(values)

    def of(self, place: int) -> dict[str, Any]:
        """Components and explanation of one score."""
        extra = {name: values[place] for name, values in self._extra.items()}
        numbers = {name: float(value) for name, value in extra.items() if isinstance(value, int | float)}
        said = [f"{name}: {value}" for name, value in extra.items() if name not in numbers and value is not None]
        return {"components": {**self._metrics, **numbers}, "explanation": "\n".join(said)}


def _free(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters that no configuration has filled."""
    filled = getattr(function, "keywords", {})
    return {name: one for name, one in inspect.signature(function).parameters.items() if name not in filled}


def _own(message: Message, messages: Sequence[Message]) -> bool:
    """Whether a message is the agent's: sampled, or where nobody noted tokens, an assistant's."""
    if any(one.span is not None for one in messages):
        return message.span is not None
    return message.role == "assistant"


def _sampled(one: Trajectory) -> list[int]:
    return [
        token
        for history in one.histories
        for message in history.messages
        if message.span is not None
        for token in history.token_ids[slice(*message.span)]
    ]
