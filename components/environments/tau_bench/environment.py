"""Episodes of tau-bench: a policy, tools on a database, and a simulated user.

The system message is the published policy. A message without tool calls goes to the user; content beside tool calls
does not reach it. The conversation ends when the user stops or the agent transfers it to a human agent.

The reward is the published one: an episode that has ended succeeds if the database equals that after the gold actions
on a fresh one, and each required output occurs in a message to the user, regardless of case and thousands separators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field

from components.environments.protocol import Messages, Step
from components.environments.restorable import RestorableState
from components.environments.tau_bench.data import DOMAINS, DomainData, PublishedTask, read_domain
from components.environments.tau_bench.database import EpisodeDatabase
from components.environments.tau_bench.toolset import TRANSFER, Toolset
from components.environments.tau_bench.user import GREETING, STOP, SimulatedUser, scripted_opening, scripted_reply
from components.environments.tools import InvalidAction, ToolEnvironment, call, run_tool
from components.errors import SpecError
from components.specs.marks import FILES
from components.specs.registered import registered
from components.trajectories.schema import Scenario

HARDEST = 5
"""Highest difficulty."""


@registered("environment.tau_bench")
class TauBench(RestorableState):
    """tau-bench: the agent serves a user under a published policy, with the published databases and tasks.

    Scenario types: the tool of the gold actions that changes the database; `several`, or `none`. Difficulty: their
    number, 5 at most; 1 for none.

    Args:
        data: Folder with the published data of both domains.
        domain: `retail` or `airline`.
        heldout: Published splits whose tasks are held out.
        train_share: Share of the held-out tasks for training, in a domain without a published split for it (airline);
            0 holds out all.
        nothing_required: Tasks that require neither a change of the database nor an output, so that an agent without
            any tool call succeeds: `keep` as published, or `drop`.
        user: `scripted`, or a model that plays the user: `{url, model, key_variable, timeout, temperature,
            max_tokens}`.
    """

    saved = ("talk",)
    refusal = "Error"

    def __init__(
        self,
        data: Annotated[str, FILES],
        domain: Literal["retail", "airline"] = "retail",
        heldout: Sequence[Literal["dev", "test"]] = ("test",),
        train_share: Annotated[float, Field(ge=0, lt=1)] = 0.5,
        nothing_required: Literal["keep", "drop"] = "keep",
        user: Literal["scripted"] | SimulatedUser = "scripted",
    ):
        if domain not in DOMAINS:
            raise SpecError.at("environment.domain", f"{domain!r}: expected one of {', '.join(DOMAINS)}")
        self.user = SimulatedUser(**user) if isinstance(user, dict) else user
        self.domain = domain
        self.data = read_domain(data, domain)
        self.system = self.data.policy
        drawn = _draw_scenarios(self.data, domain, heldout, train_share)
        if nothing_required == "drop":
            drawn = [scenario for scenario in drawn if _requires(self.data, domain, scenario)]
        self._scenarios = drawn
        self.tool_set: Toolset = DOMAINS[domain](EpisodeDatabase(self.data.tables))
        self._gold_digests: dict[str, str] = {}

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that determine results: the data by its content, the user's model without its server."""
        user = arguments.get("user", "scripted")
        if not isinstance(user, str):
            user = {name: getattr(user, name) for name in ("model", "temperature", "max_tokens")}
        data = read_domain(arguments["data"], arguments.get("domain", "retail"))
        return {**arguments, "user": user, "data": data.digest}

    # The episode

    def toolbox(self) -> Toolset:
        return self.tool_set

    def reset(self, scenario: Scenario) -> Any:
        """Return the first messages, or an awaitable of them if a model plays the user."""
        messages = super().reset(scenario)
        return self._ask_for_opening(self.user, messages) if isinstance(self.user, SimulatedUser) else messages

    def begin(self, scenario: Scenario) -> str:
        if isinstance(self.user, SimulatedUser):
            self.user.key()  # a missing key would fail every episode; raise now
        self.tool_set = DOMAINS[self.domain](EpisodeDatabase(self.data.tables))
        self.talk: list[list[str]] = [[GREETING, scripted_opening(scenario.input["instruction"])]]
        """Conversation: pairs of an agent message and the user's reply."""
        return self.talk[0][1]

    def step(self, action: dict[str, Any]) -> Any:
        """Return a `Step`, or an awaitable of one for a message to a user that a model plays."""
        if isinstance(self.user, SimulatedUser) and not action.get("tool_calls"):
            return self._ask_for_reply(self.user, action)
        return super().step(action)

    async def _ask_for_opening(self, user: SimulatedUser, messages: Messages) -> Messages:
        self.talk = [[GREETING, await user.say(self._instruction(), [[GREETING, ""]], self.scenario.id)]]
        return [*messages[:-1], {"role": "user", "content": self.talk[0][1]}]

    async def _ask_for_reply(self, user: SimulatedUser, action: dict[str, Any]) -> Step:
        talk = [*self.talk, [action.get("content") or "", ""]]
        self._reply = await user.say(self._instruction(), talk, self.scenario.id)
        return super().step(action)

    def _instruction(self) -> str:
        return str(self.scenario.input["instruction"])

    def on_message(self, text: str) -> Messages:
        self.talk.append([text, ""])
        if isinstance(self.user, SimulatedUser):
            reply = self._reply
        else:
            reply = scripted_reply(len(self.talk) - 2, self._as_expected() and self._informed())
        self.talk[-1][1] = reply
        self.done = STOP in reply
        return [{"role": "user", "content": reply}]

    def _run_tool(self, name: str, arguments: Any) -> str:
        result = super()._run_tool(name, arguments)
        self.done = self.done or self.tool_set.transferred
        return result

    def outcome(self, answer: str) -> dict[str, Any]:
        state, informed = self._as_expected(), self._informed()
        return {"success": self.done and state and informed, "state": state, "informed": informed, "ended": self.done}

    def _as_expected(self) -> bool:
        """Return True if the database equals that after the gold actions."""
        return self.tool_set.database.digest() == self._gold_digest()

    def gold(self) -> EpisodeDatabase:
        """Return a fresh database after the gold actions of the scenario."""
        return _gold_database(self.data, self.domain, self.scenario)

    def _gold_digest(self) -> str:
        """Return the digest of the database after the gold actions, computed once for each scenario."""
        if self.scenario.id not in self._gold_digests:
            self._gold_digests[self.scenario.id] = self.gold().digest()
        return self._gold_digests[self.scenario.id]

    def _informed(self) -> bool:
        """Return True if each required output occurs in a message to the user."""
        texts = [text.lower().replace(",", "") for text, _ in self.talk[1:]]
        return all(any(output.lower() in text for text in texts) for output in self.scenario.input["outputs"])

    # Solver and saved states

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the gold actions, then a message with the required outputs; a transfer comes last."""
        actions, outputs = scenario.input["actions"], scenario.input["outputs"]
        calls = [action for action in actions if action["name"] != TRANSFER]
        messages = [call(action["name"], action["kwargs"], number) for number, action in enumerate(calls)]
        transfers = [action for action in actions if action["name"] == TRANSFER]
        if transfers and not outputs:
            return [*messages, call(TRANSFER, transfers[0]["kwargs"], len(messages))]
        text = f"This is the information: {'; '.join(outputs)}." if outputs else "All requests are done."
        return [*messages, {"role": "assistant", "content": text}]

    def save(self) -> dict[str, Any]:
        return {**super().save(), "changes": self.tool_set.database.changes(), "transferred": self.tool_set.transferred}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        ToolEnvironment.reset(self, scenario)
        self.talk = [list(pair) for pair in state["talk"]]
        self.invalid_actions, self.done = state["invalid_actions"], state["done"]
        self.tool_set.database.restore(state["changes"])
        self.tool_set.transferred = state["transferred"]


def _draw_scenarios(data: DomainData, domain: str, heldout: Sequence[str], train_share: float) -> list[Scenario]:
    """Return the scenarios of both splits.

    heldout: published splits that are held out. train_share: share of them for training, if no split is published for
    it. Raises SpecError if a split is not published.
    """
    missing = [split for split in heldout if split not in data.tasks]
    if missing or not heldout:
        message = f"{list(heldout)}: {domain} has the published splits {', '.join(data.tasks)}"
        raise SpecError.at("environment.heldout", message)
    drawn = [_scenario(domain, "train", *item, "train") for item in enumerate(data.tasks.get("train", ()))]
    share = 0.0 if drawn else train_share
    others = [(published, *item) for published in heldout for item in enumerate(data.tasks[published])]
    for place, task in enumerate(others):
        is_training = int((place + 1) * share) > int(place * share)
        drawn.append(_scenario(domain, *task, "train" if is_training else "heldout"))
    return drawn


def _scenario(domain: str, published: str, number: int, task: PublishedTask, split: str) -> Scenario:
    changing = [action.name for action in task.actions if action.name in DOMAINS[domain].changing]
    kind = "none" if not changing else changing[0] if len(set(changing)) == 1 else "several"
    input = task.model_dump(include={"user_id", "instruction", "actions", "outputs"})
    return Scenario(f"{domain}-{published}-{number}", input, split, kind, min(max(len(changing), 1), HARDEST))


def _gold_database(data: DomainData, domain: str, scenario: Scenario) -> EpisodeDatabase:
    """Return a fresh database after the gold actions; those that fail change nothing."""
    tools = DOMAINS[domain](EpisodeDatabase(data.tables))
    for action in scenario.input["actions"]:
        with suppress(InvalidAction):
            run_tool(tools, action["name"], action["kwargs"])
    return tools.database


def _requires(data: DomainData, domain: str, scenario: Scenario) -> bool:
    """Return True if a scenario requires a change of the database or an output."""
    return bool(scenario.input["outputs"]) or any(_gold_database(data, domain, scenario).changes().values())
