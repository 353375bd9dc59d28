"""Reward functions in the form of TRL and HelloAgents: `(completions, **columns) -> list[float]`.

A function is called once for each group, by name, with

    prompts, completions   as text (`form: text`): the text before the agent's first message, and its last message,
                           after its reasoning as `<think>...</think>`; or as OpenAI messages (`form: messages`): those
                           before the agent's first message, and all from there on, including tool results
    completion_ids         the sampled tokens, as a list of ids
    columns                every field of the scenario's input and of the outcome (input takes precedence), and the
                           fields that `columns` names: {ground_truth: input.answer}. None for episodes without a field
    log_metric, log_extra  as in TRL: log_metric(name, value) adds a component to each score of the group;
                           log_extra(column, values) adds one value to each score: a component if it is a number, else
                           a line of the explanation

A function with `**kwargs` receives all of them, any other function those that its parameters name. `trainer_state` and
`environments` are not available: judging is a separate stage before training. A function that requires them is
rejected.

The function returns a number for each completion. None means that it does not apply (TRL leaves such a function out of
the sum; a part of `combined` with `optional: true` does the same). Any other value that is not a finite number leaves
that episode unscored; a list of another length leaves the group unscored.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from components.errors import JudgeError, Problem, SpecError
from components.rewards.composition.composed import not_applicable
from components.rewards.judge import number, unscored
from components.rewards.rules.answers import (
    check_field,
    field,
    last_message,
    main_history,
    text_with_reasoning,
)
from components.rewards.user_functions import ColumnsFunction, build_function, is_async
from components.specs.registered import registered
from components.trajectories.convert import openai_json
from components.trajectories.schema import Message, Score, Trajectory

PROVIDED_COLUMNS = ("prompts", "completions", "completion_ids", "log_metric", "log_extra")
REFUSED = ("trainer_state", "environments")


@registered("reward.columns")
class Columns:
    """Reward computed by a function of columns.

    Args:
        function: `package.module.name` of the function, or `{_target_: package.module.name, argument: value}`; for a
            class, an instance is called. Its package must be in `allow`. In code, the function itself.
        form: Form of prompts and completions, `text` or `messages`.
        columns: Additional columns: fields of the episode (`components.rewards.rules.answers`) by column name.
        blocking: Set it if a plain function waits for others, such as a server: it is then called in threads.
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
        parameters = _unfilled_parameters(self.function)
        self._all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._named = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        if problems := self._problems():
            raise SpecError(problems)

    def _problems(self) -> list[Problem]:
        problems = []
        for name, parameter in self._named.items():
            if name in REFUSED and parameter.default is inspect.Parameter.empty:
                message = f"{self.name} asks for {name}, which only a trainer has; judging comes before training"
                problems.append(Problem("reward.function", message))
            if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
                problems.append(
                    Problem("reward.function", f"{self.name} takes {name} by position; expected parameters with names")
                )
        if not self._all and not {"completions", "completion_ids"} & set(self._named):
            message = f"{self.name} takes no completions; expected (completions, **columns) -> list of numbers"
            problems.append(Problem("reward.function", message))
        if duplicates := sorted({*PROVIDED_COLUMNS, *REFUSED} & set(self.columns)):
            message = f"{duplicates[0]} is a built-in column; expected another name"
            problems.append(Problem(f"reward.columns.{duplicates[0]}", message))
        if not self._all and (unused := sorted(set(self.columns) - set(self._named))):
            message = f"{self.name} has no parameter {unused[0]}; it has {', '.join(self._named)}"
            problems.append(Problem(f"reward.columns.{unused[0]}", message))
        return problems

    def fields_read(self) -> dict[str, str]:
        """Return the fields of the episode that are read, by configuration key."""
        return {f"columns.{name}": path for name, path in self.columns.items()}

    def score_group(self, group: Sequence[Trajectory]) -> list[Score] | Awaitable[list[Score]]:
        """Return one score for each trajectory of a scenario."""
        log = _Log(len(group))
        result = self.function(**self._arguments(group, log))
        if self.waits:
            return self._score_async(group, result, log)
        if inspect.iscoroutine(result):
            result.close()
            raise JudgeError(f"{self.name} returned a coroutine; expected `async def`, or a list of numbers")
        return self._parse(group, result, log)

    async def _score_async(self, group: Sequence[Trajectory], result: Awaitable[Any], log: _Log) -> list[Score]:
        return self._parse(group, await result, log)

    def _arguments(self, group: Sequence[Trajectory], log: _Log) -> dict[str, Any]:
        """Return the arguments of one call."""
        texts = [self._prompt_and_completion(trajectory) for trajectory in group]
        arguments: dict[str, Any] = self._columns(group) | {
            "prompts": [prompt for prompt, _ in texts],
            "completions": [completion for _, completion in texts],
            "completion_ids": [_sampled_tokens(trajectory) for trajectory in group],
            "log_metric": log.metric,
            "log_extra": log.extra,
        }
        missing = [
            name
            for name, parameter in self._named.items()
            if name not in arguments and parameter.default is inspect.Parameter.empty and name not in REFUSED
        ]
        if missing:
            columns = ", ".join(sorted(set(arguments) - set(PROVIDED_COLUMNS))) or "none"
            raise JudgeError(
                f"{self.name} asks for {', '.join(missing)}; the columns are {columns}. To name one: "
                f"reward.columns={{{missing[0]}: input.FIELD}}"
            )
        return arguments if self._all else {name: value for name, value in arguments.items() if name in self._named}

    def _columns(self, group: Sequence[Trajectory]) -> dict[str, list[Any]]:
        rows = [{**trajectory.outcome, **trajectory.scenario.input} for trajectory in group]
        names = dict.fromkeys(name for row in rows for name in row if name not in REFUSED)
        columns = {name: [row.get(name) for row in rows] for name in names}
        return columns | {
            name: [field(trajectory, path) for trajectory in group] for name, path in self.columns.items()
        }

    def _prompt_and_completion(self, trajectory: Trajectory) -> tuple[Any, Any]:
        """Return prompt and completion."""
        messages = main_history(trajectory).messages
        begin = next((at for at, message in enumerate(messages) if _by_agent(message, messages)), len(messages))
        if self.form == "text":
            return "\n\n".join(message.content for message in messages[:begin]), text_with_reasoning(
                last_message(trajectory)
            )
        return [openai_json(message) for message in messages[:begin]], [
            openai_json(message) for message in messages[begin:]
        ]

    def _parse(self, group: Sequence[Trajectory], result: Any, log: _Log) -> list[Score]:
        """Return the scores for the function's result."""
        result = result.tolist() if hasattr(result, "tolist") else result  # an array or a tensor
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise JudgeError(
                f"{self.name} returned {result!r:.80} ({type(result).__name__}), expected a list of numbers"
            )
        values = list(result)
        if len(values) != len(group):
            raise JudgeError(f"{self.name} returned {len(values)} values for {len(group)} completions")
        return [
            replace(self._score(trajectory, value), **log.of(index))
            for index, (trajectory, value) in enumerate(zip(group, values, strict=True))
        ]

    def _score(self, trajectory: Trajectory, value: Any) -> Score:
        if value is None:
            return not_applicable(trajectory, f"{self.name} returned None: it does not apply")
        try:
            return Score(trajectory.id, number(value, f"what {self.name} returned"))
        except JudgeError as error:
            return unscored(trajectory, error)


class _Log:
    """Metrics and extras that a function logs, for the scores of its group."""

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

    def of(self, index: int) -> dict[str, Any]:
        """Return components and explanation of one score."""
        extra = {name: values[index] for name, values in self._extra.items()}
        numbers = {name: float(value) for name, value in extra.items() if isinstance(value, int | float)}
        lines = [f"{name}: {value}" for name, value in extra.items() if name not in numbers and value is not None]
        return {"components": {**self._metrics, **numbers}, "explanation": "\n".join(lines)}


def _unfilled_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that the configuration has not filled."""
    filled = getattr(function, "keywords", {})
    return {name: parameter for name, parameter in inspect.signature(function).parameters.items() if name not in filled}


def _by_agent(message: Message, messages: Sequence[Message]) -> bool:
    """Return True if a message is the agent's: a sampled one, or without token data, an assistant message."""
    if any(other.span is not None for other in messages):
        return message.span is not None
    return message.role == "assistant"


def _sampled_tokens(trajectory: Trajectory) -> list[int]:
    return [
        token
        for history in trajectory.histories
        for message in history.messages
        if message.span is not None
        for token in history.token_ids[slice(*message.span)]
    ]
