"""AgentGym: a client for all of its environment servers.

A server of AgentGym runs beside (see its own instructions); this class plays its tasks over HTTP. What differs from
environment to environment stands in `agentgym_kinds`, requests and instances in `agentgym_server`, which tasks are
played and how others solved them in `agentgym_items`.

An agent acts by text: in AgentGym's own form, `Thought: ...` and then `Action: ...`; by the tool `act`; or plainly.
What has no such form, or cannot be an action of this environment, never reaches the server: the agent is told
`error: ...`, and it counts as an invalid action and as a step.

The rewards of an episode add up to its score, 1 being the best. An episode ends where the server says so or after
`max_turns` steps, which is AgentGym's number of rounds unless given. What a server does wrong ends it as
EnvironmentFailed: no failure is a reward of zero.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import urlsplit

from pydantic import Field

from components.environments.adapters.agentgym_items import (
    Listing,
    Record,
    content_of,
    in_order,
    is_file,
    numbers,
    records,
)
from components.environments.adapters.agentgym_kinds import KINDS, Action
from components.environments.adapters.agentgym_server import Instance, Refused, Server, ServerGone, pool_of
from components.environments.protocol import Messages, Step
from components.environments.tools import ACT, Invalid, call
from components.errors import EnvironmentAway, EnvironmentFailed, Problem, SpecError
from components.specs.registered import registered
from components.trajectories.schema import Scenario

FORMATS = {
    "react": "Say what you think, then what you do, once:\nThought: ...\nAction: ...",
    "tool": f"Act by the tool {ACT.name}.",
    "plain": "Answer with the action and nothing else.",
}
MAX_ACTION = 20_000
"""Characters that an agent may say in one step."""
TRIES = 3
"""How often an episode is begun, where the server was restarted or does not know its instance any more."""
ACTION = re.compile(r"^[ \t]*Action:", re.MULTILINE)
NEXT = re.compile(r"^[ \t]*(?:Observation|Thought):", re.MULTILINE)
UNKNOWN = re.compile(r"The id -?\d+ is not valid")
"""What servers say of an instance that they do not have."""
ENDED = re.compile(r"The task with environment -?\d+ has (?:been deleted|finished)")
"""What servers say of an instance that was closed, or whose episode is over."""
SERVERS_OWN = ("url", "instances", "timeout", "patience")
"""Arguments that change no episode."""


@registered("environment.agentgym")
class AgentGym:
    """kind: the environment. url: of its server; to that of maze and wordle, /maze and /wordle are added.

    train, heldout: which of the server's items are played: how many (from 0 on; heldout: those after the last of
    train), a range such as 0-199, a list of numbers and ranges, or a JSON file of records with an `item_id` such as
    webshop_12, as AgentEval and AgentTraj are. A record may also have `type` and `difficulty`.

    format: how an agent is told to write an action: `react`, `Thought: ...` and `Action: ...`; `tool`, by the tool
    `act`; `plain`, nothing but the action. system: in place of what the agent is told of the environment.
    demonstrations: JSON file in AgentTraj's form, whose actions `solve` plays.

    max_turns: steps of an episode at most; null takes AgentGym's. threshold: a score above this is a success; null
    takes AgentGym's. step_errors: what an error in the answer to a step is: a failed episode (`fail`), or an invalid
    action that the agent is told of (`tell`). max_observation: characters; the rest is cut.

    instances: that this process uses on the server at once. timeout: seconds for one request. patience: seconds for
    which a server that is not there, or answers 502, 503 or 504, is tried again.
    """

    def __init__(
        self,
        kind: Literal[
            "webshop", "sqlgym", "webarena", "weather", "movie", "academia", "sheet", "todo", "alfworld", "sciworld",
            "babyai", "textcraft", "maze", "wordle", "searchqa",
        ],
        url: str,
        train: Listing = 200,
        heldout: Listing = 100,
        format: Literal["react", "tool", "plain"] = "react",
        system: str | None = None,
        demonstrations: str | None = None,
        max_turns: Annotated[int, Field(ge=1)] | None = None,
        threshold: float | None = None,
        step_errors: Literal["fail", "tell"] = "fail",
        max_observation: Annotated[int, Field(ge=100)] = 20_000,
        instances: Annotated[int, Field(ge=1)] | None = None,
        timeout: Annotated[float, Field(gt=0)] | None = None,
        patience: Annotated[float, Field(ge=0)] = 30.0,
    ):  # fmt: skip
        if kind not in KINDS:
            raise SpecError([Problem("environment.kind", f"{kind!r}: expected one of {', '.join(KINDS)}")])
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
        self._server = Server(
            self.kind, _address(url, self.kind.prefix), self.kind.timeout if timeout is None else timeout, patience
        )
        self._instance: Instance | None = None
        self._pending = False
        self._done = True

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """For stage keys: files by what they say of this environment; where the server is does not count."""
        kept = {name: value for name, value in arguments.items() if name not in SERVERS_OWN}
        files = {
            name: content_of(kept["kind"], name, kept.get(name)) for name in ("train", "heldout", "demonstrations")
        }
        return kept | files

    def scenarios(self, split: str) -> Sequence[Scenario]:
        if split not in ("train", "heldout"):
            return []
        train = numbers(self.name, "train", self._listings[0])
        heldout = numbers(self.name, "heldout", self._listings[1], after=in_order(train))
        if both := sorted(set(train) & set(heldout)):
            what = f"names item {both[0]}, which is one of train too ({len(both)} in all)"
            raise SpecError([Problem("environment.heldout", what)])
        listing = self._listings[split == "heldout"]
        said = records(self.name, split, listing) if is_file(listing) else {}
        return [self._scenario(item, split, said.get(item)) for item in (train if split == "train" else heldout)]

    def tools(self) -> list[dict[str, Any]]:
        return [ACT.schema] if self.format == "tool" else []

    async def reset(self, scenario: Scenario) -> Messages:
        if self._instance is not None:
            await self._give_back(broken=self._pending)
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
        for one in calls:
            told = await self._take(partial(self._called, one["function"]))
            observation.append({"role": "tool", "tool_call_id": one["id"], "content": told})
        if not calls:
            told = await self._take(partial(self._spoken, action.get("content") or ""))
            observation = [{"role": "user", "content": told}]
        return Step(observation, self._score - before, self._done, self.outcome())

    def outcome(self) -> dict[str, Any]:
        """What the episode came to if it ended now."""
        return {
            "success": self._score > self.threshold,
            "progress": min(max(self._score, 0.0), 1.0),
            "score": self._score,
            "invalid_actions": self._invalid,
            **({"task": self._about} if self._about else {}),
        }

    async def close(self) -> None:
        if self._instance is not None:
            await self._give_back(broken=self._pending)

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """What the demonstration of this item said, in the form that is asked for. Raises SpecError where there is
        none."""
        if self._demonstrations is None:
            raise SpecError(
                [Problem("environment.demonstrations", "null, and a solution is asked for; expected an AgentTraj file")]
            )
        record = records(self.name, "demonstrations", self._demonstrations).get(scenario.input["item"])
        if record is None or not record.said:
            raise SpecError(
                [
                    Problem(
                        "environment.demonstrations",
                        f"{self._demonstrations} has none for {scenario.id}; to train on those that it has: "
                        f"environment.train={self._demonstrations}",
                    )
                ]
            )
        return [self._shown(text, number) for number, text in enumerate(record.said)]

    def check_solutions(self, scenarios: Sequence[Scenario]) -> None:
        """Raises SpecError where one of them is not demonstrated."""
        for scenario in scenarios:
            self.solve(scenario)

    def _scenario(self, item: int, split: str, said: Record | None) -> Scenario:
        type, difficulty = self.kind.sort(item)
        if said is not None:
            type, difficulty = said.type or type, said.difficulty or difficulty
        return Scenario(f"{self.name}_{item}", {"item": item}, split, type or self.name, difficulty)

    def _shown(self, text: str, number: int) -> dict[str, Any]:
        """What a demonstration said, as an agent of this format would."""
        if self.format == "react":
            return {"role": "assistant", "content": text.strip()}
        action = parsed(text) or Action(text.strip())
        if self.format == "plain":
            return {"role": "assistant", "content": action.text}
        return call(ACT.name, {"action": action.text}, number) | {"content": action.thought}

    def _called(self, function: dict[str, Any]) -> Action:
        if function["name"] != ACT.name:
            raise Invalid(f"no tool {function['name']:.80}. {FORMATS[self.format]}")
        text = ACT.arguments(function["arguments"])["action"]
        return parsed(text) or Action(text.strip())

    def _spoken(self, text: str) -> Action:
        action = parsed(text)
        if action is None and self.format == "plain":
            action = Action(text.strip())
        if action is None:
            raise Invalid("there is no action. " + FORMATS[self.format])
        return action

    async def _take(self, read: Callable[[], Action]) -> str:
        """Carries out one action; what the agent is told."""
        if self._done:
            return "error: the episode is over"
        try:
            action = read()
            if len(action.text) + len(action.thought) > MAX_ACTION:
                raise Invalid(f"at most {MAX_ACTION} characters")
            if not action.text:
                raise Invalid("the action is empty")
            sent = _storable(self.kind.send(action))
            if not sent:
                raise Invalid("the action is empty")
            told = await self._act(sent)
        except Invalid as error:
            self._invalid += 1
            told = f"error: {_storable(str(error))}"
        self._turns += 1
        if self._done or self._turns >= self.max_turns:
            self._done = True
            if self._instance is not None:
                await self._give_back()
        return told

    async def _begin(self, item: int) -> str:
        """An instance, in the first state of an item; the first observation."""
        pool = pool_of(self._server)
        for last in range(TRIES - 1, -1, -1):
            self._instance = instance = await pool.lend(self._server, self.instances)
            self._pending = True
            body = {self.kind.key: instance.id, **self.kind.reset(item)}
            try:
                answer = await self._server.post("/reset", body, passing=True)
                first = await self._first(answer, instance)
            except EnvironmentFailed as error:
                lost = await self._was_lost(error, instance)
                if lost and last:
                    continue
                if not lost:
                    await self._give_back(broken=True)
                raise
            self._pending = False
            return first
        raise AssertionError("unreachable")

    async def _first(self, answer: Any, instance: Instance) -> str:
        if self.kind.first is None:
            answer = await self._server.get("/observation", instance)
            first = answer
        else:
            first = self.kind.first(answer)
            if isinstance(answer, dict):
                about = answer.get("task_type", answer.get("task_name"))
                self._about = _storable(about)[:200] if isinstance(about, str) else ""
        return self._text(first, answer)

    async def _was_lost(self, error: EnvironmentFailed, instance: Instance) -> bool:
        """Whether a failure is that of an instance which the server does not have any more."""
        lost, closed = isinstance(error, ServerGone), False
        if isinstance(error, Refused):
            lost = UNKNOWN.search(error.said) is not None
            closed = "deleted" in error.said and ENDED.search(error.said) is not None
            try:
                lost = lost or not await self._server.knows(instance)
            except EnvironmentFailed as other:
                lost = isinstance(other, ServerGone)
        if lost:
            pool_of(self._server).lost(instance)
        if closed:
            pool_of(self._server).forget(instance)
        if lost or closed:
            self._instance, self._pending = None, False
        return lost or closed

    async def _act(self, action: str) -> str:
        """One step on the server; the observation. Raises Invalid, EnvironmentFailed."""
        instance = self._instance
        if instance is None:
            raise EnvironmentFailed("step before reset")
        if not pool_of(self._server).has(instance):
            self._instance, self._done = None, True
            raise EnvironmentAway(f"AgentGym server: {self._server.url} was restarted during the episode")
        self._pending = True  # a step that is broken off may be under way still
        try:
            answer = await self._server.post("/step", {self.kind.key: instance.id, "action": action})
            told = self._read(answer)
        except EnvironmentFailed as error:
            said = error.said if isinstance(error, Refused) else None
            if self.step_errors == "tell" and said and not (UNKNOWN.search(said) or ENDED.search(said)):
                self._pending = False
                raise Invalid(said) from None
            self._done = True
            if not await self._was_lost(error, instance):
                await self._give_back(broken=True)
            raise
        self._pending = False
        return told

    def _read(self, answer: Any) -> str:
        """Takes the answer to a step over; the observation. Raises EnvironmentFailed where it is none."""
        try:
            value, done = self.kind.value(answer), _done(answer)
        except (KeyError, TypeError):
            self._wrong(answer, "which is no step")
        try:
            value = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            self._wrong(answer, "whose reward is no finite number")
        if not isinstance(done, bool):
            self._wrong(answer, "which does not say true or false for its end")
        told = self._text(answer.get(self.kind.state), answer)
        score = value / self.kind.scale
        self._score = score if self.kind.running else max(self._score, score)
        self._done = done
        self._invalid += told.startswith(self.kind.refusals) if self.kind.refusals else 0
        return told

    def _text(self, text: Any, answer: Any) -> str:
        if not isinstance(text, str):
            self._wrong(answer, "which has no observation")
        actions = answer.get("available_actions") if isinstance(answer, dict) else None
        if isinstance(actions, list) and all(isinstance(one, str) for one in actions):
            text = f"{text}\nAvailable actions: {', '.join(actions)}"
        if len(text) > self.max_observation:
            text = f"{text[: self.max_observation]}\n... ({len(text) - self.max_observation} characters are left out)"
        return _storable(text)

    def _wrong(self, answer: Any, what: str) -> NoReturn:
        raise EnvironmentFailed(
            f"AgentGym server: {self._server.url} ({self.name}) answered {json.dumps(answer):.300}, {what}"
        )

    async def _give_back(self, broken: bool = False) -> None:
        instance, self._instance, self._pending = self._instance, None, False
        assert instance is not None
        pool = pool_of(self._server)
        if broken:
            await pool.give_back_broken(self._server, instance)
        else:
            pool.give_back(instance)


def parsed(text: str) -> Action | None:
    """What an agent thinks and does, from `Thought: ...` and `Action: ...`; None where no action is there. What it goes
    on to imagine, an observation and a further thought, is left out. Raises Invalid for several actions."""
    text = text.strip().removesuffix("</s>").rstrip()
    found = list(ACTION.finditer(text))
    if len(found) > 1 and not NEXT.search(text, found[0].end(), found[1].start()):
        raise Invalid("one action at a time: write Action: once")
    if found:
        thought, rest = text[: found[0].start()], text[found[0].end() :]
    else:
        thought, colon, rest = text.rpartition("Action:")
        if not colon:
            return None
    if end := NEXT.search(rest):
        rest = rest[: end.start()]
    return Action(rest.strip(), thought.strip().removeprefix("Thought:").strip())


def _done(answer: dict[str, Any]) -> Any:
    return answer["done"] if "done" in answer else answer["terminated"] or answer["truncated"]


def _storable(text: str) -> str:
    """Without halves of surrogate pairs, which neither a request nor a file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _address(url: str, prefix: str) -> str:
    """A server's address without what a kind adds. Raises SpecError."""
    shown = SpecError([Problem("environment.url", f"{url!r:.200}: expected an address such as http://127.0.0.1:36001")])
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise shown from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise shown
    if parts.username is not None or parts.password is not None:
        what = "holds a name or a password, which would be stored; put a proxy that adds them before the server"
        raise SpecError([Problem("environment.url", what)])
    return url.strip().rstrip("/").removesuffix(prefix or "/").rstrip("/")
