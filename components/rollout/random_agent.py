"""The random agent: a baseline that acts without a model.

Each turn it draws one of the environment's legal actions (`protocol.LegalActions`) or, if the environment has tools,
one of its tools with arguments drawn from their JSON schema. A string without a list of values is a word of the
conversation, or a number in it, so that ids that the task mentions can occur. Ending with an answer is one more choice
beside the tools: the text is a word of the conversation as well. Tools whose texts are programs or long sentences are
called with such words, too, which are valid calls but rarely valid programs.

An environment without tools, or whose only tool is the `act` of `tools.TextEnvironment`, takes free text. If it lists
no legal actions, it cannot be played at random: SpecError.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from components.environments.protocol import ACT_TOOL, Environment, LegalActions, Messages
from components.errors import Problem, SpecError
from components.inference.protocol import ChatCompletion, ChatRequest
from components.rollout.agent import AgentLoop, as_messages, ask
from components.rollout.formats import Presentation, text_tool
from components.rollout.request import EpisodeRequest
from components.rollout.tool_schemas import as_tools
from components.trajectories.parts import RANDOM
from components.trajectories.schema import Scenario, Trajectory

MOST_ITEMS = 3
"""Maximum number of items of a drawn array."""
SPREAD = 100
"""Range of a number without bounds: from 0 to this."""
WORD = re.compile(r"[^\s,;:!?\"'()\[\]{}<>]+")


class RandomAgent:
    """An agent that draws each action at random. The seed of the episode determines its actions."""

    needs_environment = True
    holds_environment = False

    def __init__(self, max_observation: int):
        self._loop = AgentLoop(Presentation("native", max_observation))

    async def play(self, engine: Any, environment: Environment, request: EpisodeRequest) -> Trajectory:
        """Play one episode, as `players.player.Agent`. engine: ignored."""
        return await self._loop.play(RandomEngine(environment), environment, request)


class RandomEngine:
    """Engine whose responses are random actions. environment: the environment of the episode; None: no actions are
    listed, only tools."""

    policy = RANDOM

    def __init__(self, environment: Environment | None = None):
        self._environment = environment

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return a random action."""
        rng = random.Random(request.seed)
        actions = await legal_actions(self._environment)
        message = _message(rng, request.tools, actions, _words(request.messages))
        return ChatCompletion(message, "tool_calls" if "tool_calls" in message else "stop", [], [], [], self.policy)

    def load_policy(self, version: str, folder: str | None) -> None:
        """Do nothing: there is no model."""

    def release(self) -> None:
        """Do nothing: there is no model."""

    def close(self) -> None:
        """Do nothing: there is no model."""


async def check_random(environment: Environment, scenario: Scenario) -> None:
    """Raise SpecError if the environment lists neither tools nor legal actions. scenario: any scenario of it."""
    as_messages(await ask(environment.reset, scenario), "reset")
    tools = as_tools(await ask(environment.tools))
    if tools and [tool["function"]["name"] for tool in tools] != [ACT_TOOL]:
        return
    if not await legal_actions(environment):
        raise SpecError(
            [
                Problem(
                    "environment",
                    f"{type(environment).__name__} takes free text and lists no legal actions, so there is no random "
                    "policy for it; expected an environment with tools, or with a method legal_actions()",
                )
            ]
        )


async def legal_actions(environment: Environment | None) -> Sequence[str]:
    """Return the legal actions that the environment lists; empty if it lists none."""
    return await ask(environment.legal_actions) if isinstance(environment, LegalActions) else ()


def _message(
    rng: random.Random, tools: list[dict[str, Any]], actions: Sequence[str], words: Sequence[str]
) -> dict[str, Any]:
    """Return an assistant message with a random action."""
    if actions:
        action = rng.choice(list(actions))
        shown = text_tool(tools)
        return _called(shown[0], {shown[1]: action}) if shown else _said(action)
    choice = rng.randrange(len(tools) + 1)
    if choice == len(tools):
        return _said(rng.choice(words))
    function = tools[choice]["function"]
    return _called(function["name"], _value(rng, function.get("parameters") or {"type": "object"}, words))


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _called(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def _value(rng: random.Random, schema: dict[str, Any], words: Sequence[str], definitions: Any = None) -> Any:
    """Return a random value of a JSON schema. Optional properties are present with probability 1/2."""
    definitions = schema.get("$defs") or definitions or {}
    if "$ref" in schema:
        return _value(rng, definitions[schema["$ref"].rpartition("/")[2]], words, definitions)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _value(rng, rng.choice(options), words, definitions)
    kind = schema.get("type", "string")
    match rng.choice(kind) if isinstance(kind, list) else kind:
        case "object":
            required = schema.get("required") or []
            properties = (schema.get("properties") or {}).items()
            return {
                name: _value(rng, part, words, definitions)
                for name, part in properties
                if name in required or rng.random() < 0.5
            }
        case "array":
            count = rng.randint(schema.get("minItems", 0), max(schema.get("minItems", 0), MOST_ITEMS))
            return [_value(rng, schema.get("items") or {}, words, definitions) for _ in range(count)]
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "integer":
            return _number(rng, schema, words, whole=True)
        case "number":
            return _number(rng, schema, words, whole=False)
    return rng.choice(words)


def _number(rng: random.Random, schema: dict[str, Any], words: Sequence[str], *, whole: bool) -> float:
    """Return a number within the bounds of the schema; without bounds a number of the conversation, if it has one."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and (above := schema.get("exclusiveMinimum")) is not None:
        low = above + 1 if whole else above
    if high is None and (below := schema.get("exclusiveMaximum")) is not None:
        high = below - 1 if whole else below
    if low is None and high is None:
        numbers = [float(word) for word in words if re.fullmatch(r"-?\d{1,9}(\.\d+)?", word)]
        numbers = [number for number in numbers if not whole or number.is_integer()]
        if numbers:
            number = rng.choice(numbers)
            return int(number) if whole else number
    low = (0 if high is None else high - SPREAD) if low is None else low
    high = low + SPREAD if high is None else high
    return rng.randint(int(low), int(high)) if whole else rng.uniform(low, high)


def _words(messages: Messages) -> list[str]:
    """Return the distinct words and numbers of the conversation but of the system message; never empty."""
    texts = [str(message.get("content") or "") for message in messages if message["role"] != "system"]
    words = [word.strip(".") for text in texts for word in WORD.findall(text)]
    return list(dict.fromkeys(word for word in words if word)) or ["1"]
