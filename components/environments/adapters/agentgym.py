"""Client for AgentGym environment servers.

An AgentGym server runs separately (see its own instructions); this class plays its tasks over HTTP. `agentgym_kinds`
holds the protocol of each environment, `agentgym_server` the requests and instances, `agentgym_items` the selection of
tasks and the demonstrations.

An action is text: in AgentGym's format, `Thought: ...` followed by `Action: ...`; the argument of the tool `act`; or
plain text. A malformed or impossible action never reaches the server: the agent sees `error: ...`, and it counts as an
invalid action and as a step.

The rewards of an episode sum to its score; the maximum is 1. An episode ends when the server reports its end or after
`max_turns` steps (by default AgentGym's number of rounds). A server error raises EnvironmentFailed; it never becomes a
reward of zero.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from components.environments.adapters.agentgym_actions import FORMATS, Action, parse_action, storable
from components.environments.adapters.agentgym_items import (
    Listing,
    Record,
    is_file,
    listing_key,
    next_item,
    numbers,
    records,
)
from components.environments.adapters.agentgym_kinds import KINDS
from components.environments.adapters.agentgym_pool import pool_of
from components.environments.adapters.agentgym_server import (
    AgentGymServer,
    Instance,
    RequestRejected,
    ServerGone,
    server_address,
)
from components.environments.protocol import Messages, Step
from components.environments.tools import ACT, InvalidAction, call
from components.errors import EnvironmentFailed, EnvironmentUnavailable, SpecError
from components.specs.marks import FILES, SERVER
from components.specs.registered import registered
from components.trajectories.schema import Scenario

MAX_ACTION = 20_000
"""Maximum length of an action with its thought, in characters."""
TRIES = 3
"""Maximum number of attempts to start an episode if the server lost its instance, for example by a restart."""
UNKNOWN = re.compile(r"The id -?\d+ is not valid")
"""Error of servers for an instance that they do not have."""
ENDED = re.compile(r"The task with environment -?\d+ has (?:been deleted|finished)")
"""Error of servers for an instance that was closed, or whose episode is over."""
SERVER_ARGUMENTS = ("url", "instances", "timeout", "patience")
"""Arguments that do not affect episodes."""


@registered("environment.agentgym")
class AgentGym:
    """An environment on an AgentGym server.

    Args:
        kind: Name of the environment.
        url: URL of its server; /maze and /wordle are appended for these kinds.
        train, heldout: Items of the split: a number of items (train from item 0, heldout after the last train item),
            a range such as 0-199, a list of numbers and ranges, or a JSON file of records with an `item_id` such
            as webshop_12, like AgentEval and AgentTraj. A record may also have `type` and `difficulty`.
        format: Format of actions: `react`, `Thought: ...` and `Action: ...`; `tool`, the tool `act`; `plain`, only the
            action.
        system: Description of the environment in the system prompt, in place of the built-in one.
        demonstrations: JSON file in AgentTraj's format, whose actions `solve` returns.
        max_turns: Maximum number of steps of an episode; null takes AgentGym's value.
        threshold: Score above which an episode is a success; null takes AgentGym's value.
        step_errors: Effect of an error in the response to a step: `fail`, the episode fails; `tell`, it is an invalid
            action and the agent sees the error.
        max_observation: Maximum length of an observation in characters; longer ones are truncated.
        instances: Maximum number of instances that this process uses on the server; null takes a default of the kind.
        timeout: Timeout of a request, in seconds; null takes a default of the kind.
        patience: Maximum duration of retries in seconds while the server is unreachable or returns 429, 502, 503, 504.
    """

    def __init__(
        self,
        kind: Literal[
            "webshop", "sqlgym", "webarena", "weather", "movie", "academia", "sheet", "todo", "alfworld", "sciworld",
            "babyai", "textcraft", "maze", "wordle", "searchqa",
        ],
        url: Annotated[str, SERVER],
        train: Listing = 200,
        heldout: Listing = 100,
        format: Literal["react", "tool", "plain"] = "react",
        system: str | None = None,
        demonstrations: Annotated[str | None, FILES] = None,
        max_turns: Annotated[int, Field(ge=1)] | None = None,
        threshold: float | None = None,
        step_errors: Literal["fail", "tell"] = "fail",
        max_observation: Annotated[int, Field(ge=100)] = 20_000,
        instances: Annotated[int, Field(ge=1)] | None = None,
        timeout: Annotated[float, Field(gt=0)] | None = None,
        patience: Annotated[float, Field(ge=0)] = 30.0,
    ):  # fmt: skip
        if kind not in KINDS:
            raise SpecError.at("environment.kind", f"{kind!r}: expected one of {', '.join(KINDS)}")
        self.kind = KINDS[kind]
        self.name = kind
        self.format = format
        self.max_turns = self.kind.rounds if max_turns is None else max_turns
        self.threshold = self.kind.threshold if threshold is None else threshold
        self.step_errors = step_errors
        self.max_observation = max_observation
        self.instances = self.kind.instances if instances is None else instances
        self._listings: tuple[Listing, Listing] = (train, heldout)
        self._demonstrations = demonstrations
        about = self.kind.system if system is None else system
        self.system = "\n".join(part for part in (about, FORMATS[format]) if part)
        self._server = AgentGymServer(
            self.kind,
            server_address(url, self.kind.prefix),
            self.kind.timeout if timeout is None else timeout,
            patience,
        )
        self._instance: Instance | None = None
        self._pending = False
        self._done = True

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: files by their content, without the address and limits of the server."""
        relevant = {name: value for name, value in arguments.items() if name not in SERVER_ARGUMENTS}
        files = {
            name: listing_key(relevant["kind"], name, relevant.get(name))
            for name in ("train", "heldout", "demonstrations")
        }
        return relevant | files

    def scenarios(self, split: str) -> Sequence[Scenario]:
        if split not in ("train", "heldout"):
            return []
        train = numbers(self.name, "train", self._listings[0])
        heldout = numbers(self.name, "heldout", self._listings[1], after=next_item(train))
        if both := sorted(set(train) & set(heldout)):
            message = f"contains item {both[0]}, which is also in train ({len(both)} shared items)"
            raise SpecError.at("environment.heldout", message)
        listing = self._listings[split == "heldout"]
        by_item = records(self.name, split, listing) if is_file(listing) else {}
        return [self._scenario(item, split, by_item.get(item)) for item in (train if split == "train" else heldout)]

    def tools(self) -> list[dict[str, Any]]:
        return [ACT.schema] if self.format == "tool" else []

    async def reset(self, scenario: Scenario) -> Messages:
        if self._instance is not None:
            await self._release(broken=self._pending)
        self.scenario = scenario
        self._turns = self._invalid = 0
        self._score = 0.0
        self._about = ""
        first = await self._begin(int(scenario.input["item"]))
        self._done = False
        return [{"role": "system", "content": self.system}, {"role": "user", "content": first}]

    async def step(self, action: dict[str, Any]) -> Step:
        before = self._score
        calls = action.get("tool_calls") or []
        observation: Messages = []
        for tool_call in calls:
            result = await self._take(partial(self._parse_call, tool_call["function"]))
            observation.append({"role": "tool", "tool_call_id": tool_call["id"], "content": result})
        if not calls:
            result = await self._take(partial(self._parse_text, action.get("content") or ""))
            observation = [{"role": "user", "content": result}]
        return Step(observation, self._score - before, self._done, self.outcome())

    def outcome(self) -> dict[str, Any]:
        """Return the outcome of the episode as if it ended now."""
        return {
            "success": self._score > self.threshold,
            "progress": min(max(self._score, 0.0), 1.0),
            "score": self._score,
            "invalid_actions": self._invalid,
            **({"task": self._about} if self._about else {}),
        }

    async def close(self) -> None:
        if self._instance is not None:
            await self._release(broken=self._pending)

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the demonstration of this item in the configured format. Raises SpecError if there is none."""
        if self._demonstrations is None:
            raise SpecError.at(
                "environment.demonstrations", "null, but demonstrations are required; set an AgentTraj file"
            )
        record = records(self.name, "demonstrations", self._demonstrations).get(scenario.input["item"])
        if record is None or not record.messages:
            raise SpecError.at(
                "environment.demonstrations",
                f"{self._demonstrations} has no demonstration of {scenario.id}; to train on the demonstrated "
                f"items, set environment.train={self._demonstrations}",
            )
        return [self._format(text, number) for number, text in enumerate(record.messages)]

    def check_solutions(self, scenarios: Sequence[Scenario]) -> None:
        """Raise SpecError if a scenario has no demonstration."""
        for scenario in scenarios:
            self.solve(scenario)

    def _scenario(self, item: int, split: str, record: Record | None) -> Scenario:
        type, difficulty = self.kind.sort(item)
        if record is not None:
            type, difficulty = record.type or type, record.difficulty or difficulty
        return Scenario(f"{self.name}_{item}", {"item": item}, split, type or self.name, difficulty)

    def _format(self, text: str, number: int) -> dict[str, Any]:
        """Return a demonstrated message in the configured format."""
        if self.format == "react":
            return {"role": "assistant", "content": text.strip()}
        action = parse_action(text) or Action(text.strip())
        if self.format == "plain":
            return {"role": "assistant", "content": action.text}
        return call(ACT.name, {"action": action.text}, number) | {"content": action.thought}

    def _parse_call(self, function: dict[str, Any]) -> Action:
        if function["name"] != ACT.name:
            raise InvalidAction(f"no tool {function['name']:.80}. {FORMATS[self.format]}")
        text = ACT.arguments(function["arguments"])["action"]
        return parse_action(text) or Action(text.strip())

    def _parse_text(self, text: str) -> Action:
        action = parse_action(text)
        if action is None and self.format == "plain":
            action = Action(text.strip())
        if action is None:
            raise InvalidAction("there is no action. " + FORMATS[self.format])
        return action

    async def _take(self, parse: Callable[[], Action]) -> str:
        """Parse and execute one action; return the observation or an error message."""
        if self._done:
            return "error: the episode is over"
        try:
            action = parse()
            if len(action.text) + len(action.thought) > MAX_ACTION:
                raise InvalidAction(f"at most {MAX_ACTION} characters")
            if not action.text:
                raise InvalidAction("the action is empty")
            sent = storable(self.kind.send(action))
            if not sent:
                raise InvalidAction("the action is empty")
            observation = await self._act(sent)
        except InvalidAction as error:
            self._invalid += 1
            observation = f"error: {storable(str(error))}"
        self._turns += 1
        if self._done or self._turns >= self.max_turns:
            self._done = True
            if self._instance is not None:
                await self._release()
        return observation

    async def _begin(self, item: int) -> str:
        """Acquire an instance and reset it to an item; return the first observation."""
        pool = pool_of(self._server)
        for retries_left in range(TRIES - 1, -1, -1):
            self._instance = instance = await pool.acquire(self._server, self.instances)
            self._pending = True
            body = {self.kind.key: instance.id, **self.kind.reset(item)}
            try:
                answer = await self._server.post("/reset", body, passing=True)
                first = await self._first(answer, instance)
            except EnvironmentFailed as error:
                lost = await self._was_lost(error, instance)
                if lost and retries_left:
                    continue
                if not lost:
                    await self._release(broken=True)
                raise
            self._pending = False
            return first
        raise AssertionError("unreachable")

    async def _first(self, answer: Any, instance: Instance) -> str:
        if self.kind.first is None:
            answer = await self._server.get("/observation", instance)
            first = answer
        else:
            try:
                first = self.kind.first(answer)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError):
                self._reject(answer, "not a valid start of an episode")
            if isinstance(answer, dict):
                about = answer.get("task_type", answer.get("task_name"))
                self._about = storable(about)[:200] if isinstance(about, str) else ""
        return self._text(first, answer)

    async def _was_lost(self, error: EnvironmentFailed, instance: Instance) -> bool:
        """Return True if a failure means that the server no longer has the instance; forget the instance then."""
        lost, closed = isinstance(error, ServerGone), False
        if isinstance(error, RequestRejected):
            lost = UNKNOWN.search(error.error_text) is not None
            closed = "deleted" in error.error_text and ENDED.search(error.error_text) is not None
            try:
                lost = lost or not await self._server.has_instance(instance)
            except EnvironmentFailed as other:
                lost = isinstance(other, ServerGone)
        if lost:
            pool_of(self._server).invalidate(instance)
        if closed:
            pool_of(self._server).forget(instance)
        if lost or closed:
            self._instance, self._pending = None, False
        return lost or closed

    async def _act(self, action: str) -> str:
        """Execute one step on the server; return the observation. Raises InvalidAction, EnvironmentFailed."""
        instance = self._instance
        if instance is None:
            raise EnvironmentFailed("step before reset")
        if not pool_of(self._server).is_current(instance):
            self._instance, self._done = None, True
            raise EnvironmentUnavailable(f"AgentGym server: {self._server.url} was restarted during the episode")
        self._pending = True  # an interrupted step may still run on the server
        try:
            answer = await self._server.post("/step", {self.kind.key: instance.id, "action": action})
            observation = self._read(answer)
        except EnvironmentFailed as error:
            text = error.error_text if isinstance(error, RequestRejected) else None
            if self.step_errors == "tell" and text and not (UNKNOWN.search(text) or ENDED.search(text)):
                self._pending = False
                raise InvalidAction(text) from None
            self._done = True
            if not await self._was_lost(error, instance):
                await self._release(broken=True)
            raise
        self._pending = False
        return observation

    def _read(self, answer: Any) -> str:
        """Update the episode from the response to a step; return the observation. Raises EnvironmentFailed."""
        try:
            value, done = self.kind.value(answer), _done(answer)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            self._reject(answer, "not a valid step: it has no reward or no end")
        try:
            value = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            self._reject(answer, "its reward is not a finite number")
        if not isinstance(done, bool):
            self._reject(answer, "its `done` must be true or false")
        observation = self._text(answer.get(self.kind.state) if isinstance(answer, dict) else None, answer)
        score = value / self.kind.scale
        self._score = score if self.kind.running else max(self._score, score)
        self._done = done
        self._invalid += observation.startswith(self.kind.refusals) if self.kind.refusals else 0
        return observation

    def _text(self, text: Any, answer: Any) -> str:
        if not isinstance(text, str):
            self._reject(answer, "it has no observation")
        actions = answer.get("available_actions") if isinstance(answer, dict) else None
        if isinstance(actions, list) and all(isinstance(name, str) for name in actions):
            text = f"{text}\nAvailable actions: {', '.join(actions)}"
        if len(text) > self.max_observation:
            text = f"{text[: self.max_observation]}\n... ({len(text) - self.max_observation} characters are left out)"
        return storable(text)

    def _reject(self, answer: Any, reason: str) -> NoReturn:
        raise EnvironmentFailed(
            f"AgentGym server: {self._server.url} ({self.name}) returned {json.dumps(answer):.300}: {reason}"
        )

    async def _release(self, broken: bool = False) -> None:
        instance, self._instance, self._pending = self._instance, None, False
        assert instance is not None
        pool = pool_of(self._server)
        if broken:
            await pool.release_broken(self._server, instance)
        else:
            pool.release(instance)


def _done(answer: dict[str, Any]) -> Any:
    return answer["done"] if "done" in answer else answer["terminated"] or answer["truncated"]
