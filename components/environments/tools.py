"""Base classes of environments whose tools are methods; the JSON schema of a tool follows from its signature.

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
                raise InvalidAction("3 at most")
            self.count += number
            return str(self.count)

        def outcome(self, answer):
            return {"success": self.count == self.scenario.input["goal"] and str(self.count) in answer}

Mistakes of the model (unknown tool, invalid arguments, `InvalidAction` raised by a tool) return `error: ...` to it and
count as `invalid_actions` in the outcome. A message without tool calls ends the episode (see `on_message`).

`TextEnvironment` is the base class of environments whose only action is a line of text, such as games and simulators:
the action is the argument of their only tool, or the content of the message.
"""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, Unpack, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from components.environments.protocol import ACT_TOOL, Messages, Step
from components.trajectories.schema import Scenario

Method = TypeVar("Method", bound=Callable[..., Any])


class InvalidAction(Exception):
    """An action that cannot be executed, raised by tools; the agent sees the message."""


def tool(method: Method) -> Method:
    """Mark a method as a tool.

    Its docstring is the tool description, its annotations are the types of the arguments; `Annotated[int, "at most 3"]`
    adds a description of an argument. Its return value is the observation.
    """
    method.__tool__ = True  # type: ignore[attr-defined]
    return method


class ToolEnvironment(abc.ABC):
    """Base class: subclasses define `scenarios`, `begin`, `outcome`, and methods that are tools.

    A constructor that sets `_scenarios` to those of all splits replaces `scenarios`.
    """

    system = ""
    """System prompt; empty for none."""

    _scenarios: Sequence[Scenario]

    scenario: Scenario
    """Scenario of the current episode."""
    reward: float
    """Reward of the current step; tools may add to it."""
    done: bool
    """True when the episode is over; tools may set it."""
    new_context: bool
    """True if the observation of the current step begins a new context; `on_message` may set it."""
    refusal = "error"
    """First word of the answer to an invalid action."""
    invalid_actions: int
    """Number of invalid actions in the episode."""

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """Return all scenarios of a split in a fixed order; empty if the split does not exist."""
        if not hasattr(type(self), "_scenarios") and "_scenarios" not in vars(self):
            raise TypeError(f"{type(self).__name__} defines neither scenarios(split) nor _scenarios")
        return [scenario for scenario in self._scenarios if scenario.split == split]

    @abc.abstractmethod
    def begin(self, scenario: Scenario) -> str:
        """Initialize the state of the episode; return the first user message."""

    @abc.abstractmethod
    def outcome(self, answer: str) -> dict[str, Any]:
        """Return the outcome of the episode as if it ended now, including `success`.

        answer: the agent's last message without tool calls; empty if there is none.
        """

    def on_message(self, text: str) -> Messages:
        """Handle a message without tool calls; return the user's reply. The default ends the episode."""
        self.done = True
        return []

    def close(self) -> None:  # noqa: B027  most environments hold no resources
        """Release resources."""

    def tools(self) -> list[dict[str, Any]]:
        return [dict(spec.schema) for spec in _tools_of(type(self.toolbox())).values()]

    def toolbox(self) -> Any:
        """Return the object whose methods are the tools: the environment itself, unless a subclass has another."""
        return self

    def reset(self, scenario: Scenario) -> Messages:
        self.scenario, self.reward, self.done, self.invalid_actions = scenario, 0.0, False, 0
        first = {"role": "user", "content": self.begin(scenario)}
        return [{"role": "system", "content": self.system}, first] if self.system else [first]

    def step(self, action: dict[str, Any]) -> Step:
        self.reward, self.new_context = 0.0, False
        calls, answer = action.get("tool_calls") or [], ""
        observation: Messages = []
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            over = f"{self.refusal}: the episode is over"
            result = over if self.done else self._attempt(self._run_tool, name, arguments)
            observation.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            answer = action.get("content") or ""
            observation = self.on_message(answer)
        info = {"invalid_actions": self.invalid_actions, **self.outcome(answer)}
        return Step(observation, self.reward, self.done, info, self.new_context)

    def _run_tool(self, name: str, arguments: Any) -> str:
        """Execute a tool; return its result. Raises InvalidAction. arguments: JSON text."""
        return run_tool(self.toolbox(), name, arguments)

    def _attempt(self, act: Callable[..., str], *arguments: Any) -> str:
        """Return the result of an action, or an error message that counts as an invalid action."""
        try:
            return act(*arguments)
        except InvalidAction as error:
            self.invalid_actions += 1
            return f"{self.refusal}: {error}"


def run_tool(toolbox: Any, name: str, arguments: Any) -> str:
    """Execute a tool of an object whose methods are tools; return its result. Raises InvalidAction.

    arguments: JSON text, or JSON data.
    """
    tools = _tools_of(type(toolbox))
    if name not in tools:
        raise InvalidAction(f"no tool {name}; there are {', '.join(tools) or 'none'}")
    return str(getattr(toolbox, name)(**tools[name].arguments(arguments)))


class TextEnvironment(ToolEnvironment):
    """Base class: subclasses define `scenarios`, `begin`, `act` and `outcome`.

    An action is text: the argument of the tool `act`, or the content of a message without tool calls.
    """

    @abc.abstractmethod
    def act(self, action: str) -> str:
        """Execute an action; return the observation."""

    def on_message(self, text: str) -> Messages:
        return [{"role": "user", "content": self._act(text)}]

    def tools(self) -> list[dict[str, Any]]:
        return [ACT.schema]

    def _run_tool(self, name: str, arguments: Any) -> str:
        if name != ACT.name:
            raise InvalidAction(f"no tool {name}; there is {ACT.name}")
        return self._act(ACT.arguments(arguments)["action"])

    def _act(self, text: str) -> str:
        return self._attempt(self.act, text.strip())


def to_json(**fields: Any) -> str:
    """Return the result of a tool: JSON on one line."""
    return json.dumps(fields)


def shorten(text: str, limit: int = 4_000) -> str:
    """Return an observation of at most `limit` characters, and a mark where it is cut."""
    return text if len(text) <= limit else text[:limit] + " … (cut)"


def with_commands(text: str, commands: Sequence[str], limit: int) -> str:
    """Return an observation with at most `limit` of the possible commands."""
    more = f", and {len(commands) - limit} more" if len(commands) > limit else ""
    return f"{text}\nPossible: {', '.join(commands[:limit])}{more}."


def call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """Return an assistant message that calls one tool, for solvers. number: index of the message."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}_0", "type": "function", "function": function}],
    }


def acts(actions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the assistant messages that execute the given actions in a `TextEnvironment`."""
    return [call(ACT.name, {"action": action}, number) for number, action in enumerate(actions)]


class _Tool:
    """A tool method, its JSON schema, and the validation of its arguments."""

    def __init__(self, name: str, method: Callable[..., Any]):
        self.name = name
        fields: dict[str, Any] = {}
        for argument, (hint, default) in _arguments(method).items():
            note = hint.__metadata__[0] if get_origin(hint) is Annotated else None
            fields[argument] = (hint, Field(default, description=note if isinstance(note, str) else None))
        self._model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = self._model.model_json_schema()
        parameters = _plain(schema, schema.pop("$defs", {}))
        parameters.setdefault("properties", {})
        description = " ".join((inspect.getdoc(method) or "").split())
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    def arguments(self, text: Any) -> dict[str, Any]:
        """Return the arguments of a call, parsed to the types of the method. Raises InvalidAction."""
        try:
            arguments: BaseModel = self._model.model_validate_json(text if isinstance(text, str) else json.dumps(text))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            if first["type"] == "json_invalid":
                raise InvalidAction(f"the arguments of {self.name} are no JSON object") from None
            raise InvalidAction(
                f"{self.name}: {f'{at}: ' if at else ''}{first['msg']}; it takes {self._takes()}"
            ) from None
        return {name: getattr(arguments, name) for name in type(arguments).model_fields}

    def _takes(self) -> str:
        return ", ".join(self.schema["function"]["parameters"]["properties"]) or "no arguments"


def _arguments(method: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the type and default of each argument of a method; `...` marks a required one. `**names: Unpack[Fields]`
    stands for the fields of a TypedDict."""
    hints = get_type_hints(method, include_extras=True)
    arguments: dict[str, tuple[Any, Any]] = {}
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        hint = hints.get(name, str)
        if parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) is Unpack:
            fields = get_type_hints(get_args(hint)[0], include_extras=True)
            arguments |= {field: (kind, ...) for field, kind in fields.items()}
        else:
            arguments[name] = (hint, ... if parameter.default is parameter.empty else parameter.default)
    return arguments


def _plain(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a JSON schema without the titles that pydantic adds, and with definitions in place of references."""
    if isinstance(schema, dict) and "$ref" in schema:
        return _plain(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if isinstance(schema, dict):
        untitled = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
        return {key: _plain(value, definitions) for key, value in untitled.items()}
    return [_plain(item, definitions) for item in schema] if isinstance(schema, list) else schema


_tools_by_class: dict[type, dict[str, _Tool]] = {}


def _tools_of(kind: type) -> dict[str, _Tool]:
    """Return the tools of a class by name, in definition order, those of base classes first."""
    if kind not in _tools_by_class:
        methods: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            methods |= {name: value for name, value in vars(base).items() if getattr(value, "__tool__", False)}
        _tools_by_class[kind] = {name: _Tool(name, getattr(kind, name)) for name in methods}
    return _tools_by_class[kind]


def _act(self: Any, action: str) -> None:
    """carries out one action"""


ACT = _Tool(ACT_TOOL, _act)
