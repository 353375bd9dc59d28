"""Environments made of methods: each tool is a method, its JSON schema follows from its signature.

    class Counter(ToolEnvironment):
        system = "Count to the number that is asked for, then say it."

        def scenarios(self, split):
            return [Scenario(f"{split}-{n}", {"goal": n}, split) for n in range(2, 9)]

        def begin(self, scenario):
            self.count = 0
            return f"Count to {scenario.input['goal']}."

        @tool
        def add(self, number: Annotated[int, "at most 3"]) -> str:
            "adds to the count"
            if number > 3:
                raise Invalid("3 at most")
            self.count += number
            return str(self.count)

        def outcome(self, answer):
            return {"success": self.count == self.scenario.input["goal"] and str(self.count) in answer}

What a model gets wrong (no such tool, arguments that do not fit, `Invalid`) is answered with `error: ...` and counted
as `invalid_actions` in the outcome. A message without calls ends the episode (`said`).

`TextEnvironment` is one whose only action is a line of text, such as games and simulators have: it takes it as the
argument of its one tool, or as what the agent says.
"""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from components.environments.protocol import Messages, Step
from components.trajectories.schema import Scenario

Method = TypeVar("Method", bound=Callable[..., Any])


class Invalid(Exception):
    """An action that cannot be carried out, raised by tools; the message is what the agent is told."""


def tool(method: Method) -> Method:
    """Marks a method as a tool. Its docstring says what it does; annotations are the types of its arguments, with
    `Annotated[int, "at most 3"]` also what they mean. It returns what the agent is told."""
    method.__tool__ = True  # type: ignore[attr-defined]
    return method


class ToolEnvironment(abc.ABC):
    """To be subclassed: with `scenarios`, `begin`, `outcome`, and methods that are tools."""

    system = ""
    """The first message, where there is one."""

    scenario: Scenario
    """The one that is played."""
    reward: float
    """Of the step under way; tools may add to it."""
    done: bool
    """Tools may end the episode."""
    invalid_actions: int

    @abc.abstractmethod
    def scenarios(self, split: str) -> Sequence[Scenario]:
        """All scenarios of a split, in a fixed order; empty where there is no such split."""

    @abc.abstractmethod
    def begin(self, scenario: Scenario) -> str:
        """Sets the state of the episode; returns what the user says first."""

    @abc.abstractmethod
    def outcome(self, answer: str) -> dict[str, Any]:
        """What the episode came to if it ended now, `success` among it. answer: what the agent said last, without
        calling a tool; empty where it has not."""

    def said(self, text: str) -> Messages:
        """The agent spoke and called no tool: returns what the user answers. By default this ends the episode."""
        self.done = True
        return []

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Lets go of what is held."""

    def tools(self) -> list[dict[str, Any]]:
        return [dict(one.schema) for one in _tools_of(type(self)).values()]

    def reset(self, scenario: Scenario) -> Messages:
        self.scenario, self.reward, self.done, self.invalid_actions = scenario, 0.0, False, 0
        first = {"role": "user", "content": self.begin(scenario)}
        return [{"role": "system", "content": self.system}, first] if self.system else [first]

    def step(self, action: dict[str, Any]) -> Step:
        self.reward = 0.0
        calls, answer = action.get("tool_calls") or [], ""
        observation: Messages = []
        for call in calls:
            told = "error: the episode is over" if self.done else self._call(call["function"])
            observation.append({"role": "tool", "tool_call_id": call["id"], "content": told})
        if not calls:
            answer = action.get("content") or ""
            observation = self.said(answer)
        info = {"invalid_actions": self.invalid_actions, **self.outcome(answer)}
        return Step(observation, self.reward, self.done, info)

    def _call(self, function: dict[str, Any]) -> str:
        """Carries out one call; the answer, or what is wrong with it."""
        try:
            one = _tools_of(type(self)).get(function["name"])
            if one is None:
                raise Invalid(f"no tool {function['name']}; there are {', '.join(_tools_of(type(self))) or 'none'}")
            return str(getattr(self, one.name)(**one.arguments(function["arguments"])))
        except Invalid as error:
            self.invalid_actions += 1
            return f"error: {error}"


class TextEnvironment(ToolEnvironment):
    """To be subclassed: with `scenarios`, `begin`, `act` and `outcome`. An action is text, by the tool `act` or as what
    the agent says."""

    @abc.abstractmethod
    def act(self, action: str) -> str:
        """Carries out an action; returns the observation."""

    def said(self, text: str) -> Messages:
        return [{"role": "user", "content": self._act(text)}]

    def tools(self) -> list[dict[str, Any]]:
        return [ACT.schema]

    def _call(self, function: dict[str, Any]) -> str:
        if function["name"] != ACT.name:
            self.invalid_actions += 1
            return f"error: no tool {function['name']}; there is {ACT.name}"
        try:
            return self._act(ACT.arguments(function["arguments"])["action"])
        except Invalid as error:
            self.invalid_actions += 1
            return f"error: {error}"

    def _act(self, text: str) -> str:
        try:
            return self.act(text.strip())
        except Invalid as error:
            self.invalid_actions += 1
            return f"error: {error}"


def call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """An assistant message that calls one tool, for solvers. number: of the message."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}_0", "type": "function", "function": function}],
    }


def acts(actions: Sequence[str]) -> list[dict[str, Any]]:
    """The assistant messages that carry out actions in a `TextEnvironment`."""
    return [call(ACT.name, {"action": action}, number) for number, action in enumerate(actions)]


class _Tool:
    def __init__(self, name: str, method: Callable[..., Any]):
        self.name = name
        hints = get_type_hints(method, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in list(inspect.signature(method).parameters.values())[1:]:
            hint = hints.get(parameter.name, str)
            default = ... if parameter.default is parameter.empty else parameter.default
            note = hint.__metadata__[0] if get_origin(hint) is Annotated else None
            fields[parameter.name] = (hint, Field(default, description=note if isinstance(note, str) else None))
        self._model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = _plain(self._model.model_json_schema())
        parameters.setdefault("properties", {})
        description = " ".join((inspect.getdoc(method) or "").split())
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    def arguments(self, text: Any) -> dict[str, Any]:
        """Those of a call, of the types of the method. Raises Invalid."""
        try:
            given: BaseModel = self._model.model_validate_json(text if isinstance(text, str) else json.dumps(text))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            if first["type"] == "json_invalid":
                raise Invalid(f"the arguments of {self.name} are no JSON object") from None
            raise Invalid(f"{self.name}: {f'{at}: ' if at else ''}{first['msg']}; it takes {self._takes()}") from None
        return {name: getattr(given, name) for name in type(given).model_fields}

    def _takes(self) -> str:
        return ", ".join(self.schema["function"]["parameters"]["properties"]) or "no arguments"


def _plain(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic adds."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
        return {key: _plain(value) for key, value in kept.items()}
    return [_plain(one) for one in schema] if isinstance(schema, list) else schema


_found: dict[type, dict[str, _Tool]] = {}


def _tools_of(kind: type) -> dict[str, _Tool]:
    """By name, in the order in which they are written; of a subclass after those of its bases."""
    if kind not in _found:
        methods: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            methods |= {name: one for name, one in vars(base).items() if getattr(one, "__tool__", False)}
        _found[kind] = {name: _Tool(name, getattr(kind, name)) for name in methods}
    return _found[kind]


def _act(self: Any, action: str) -> None:
    """carries out one action"""


ACT = _Tool("act", _act)
