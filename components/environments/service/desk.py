"""What the service desks share: a database, a policy that the agent must keep, and a customer.

The agent's tools do what they are told wherever that is possible at all: keeping the policy is the agent's task. Each
breach is noted with the number of the rule and stands in the outcome. Three rules hold at every desk: nothing of an
account is looked at or changed before its owner is verified; a change is made only after the agent has named its terms
(numbers, amounts) and the customer said yes to that; and a colleague is called only where the policy says so.

An episode succeeds when the customer has ended it, the right customer was verified, the database is
exactly what the right actions leave behind (compared by its digest), the customer was told what it needs to know, and
no rule was broken. What is said beside calls of tools does not reach the customer.
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from components.environments.protocol import Messages, Step
from components.environments.service.customer import HEARD, STOP, ScriptedCustomer, ServedCustomer, agrees, clear, says
from components.environments.tools import Invalid, ToolEnvironment, call, tool
from components.trajectories.schema import Scenario

TALK = 40
"""Messages to the customer after which it leaves, whatever was said."""


class ServiceDesk(ToolEnvironment):
    """To be subclassed: with tools, `topics`, and `generate`.

    seed: of the generated scenarios. train, heldout: scenarios of the two splits. user: `scripted`, or a model that
    plays the customer: `{url, model, key_variable, timeout}`.
    """

    topics: ClassVar[dict[str, str]]
    """What a customer may be asked for: a pattern of the words that ask for it."""
    identity: ClassVar[str]
    """The rule of each desk about whose account it is, about the customer's yes, and about colleagues."""
    consent: ClassVar[str]
    colleagues: ClassVar[str]

    def __init__(
        self,
        seed: int = 0,
        train: Annotated[int, Field(ge=0, le=4000)] = 512,
        heldout: Annotated[int, Field(ge=0, le=4000)] = 128,
        user: Literal["scripted"] | ServedCustomer = "scripted",
    ):
        self.user = ServedCustomer(**user) if isinstance(user, dict) else user
        self._scenarios = self.generate(seed, train, heldout)

    @staticmethod
    def key_arguments(given: dict[str, Any]) -> dict[str, Any]:
        """What determines results: which model plays the customer, not where its server is."""
        user = given.get("user", "scripted")
        return {**given, "user": {"model": user.model} if isinstance(user, ServedCustomer) else user}

    @abc.abstractmethod
    def generate(self, seed: int, train: int, heldout: int) -> Sequence[Scenario]:
        """The scenarios of both splits."""

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split]

    # The episode

    def begin(self, scenario: Scenario) -> str:
        if isinstance(self.user, ServedCustomer):
            self.user.key()  # a key that is missing would fail every episode alike
        self.open(scenario.input["database"])
        self.customer = ScriptedCustomer(scenario.input["customer"], self.topics)
        self.missing = list(range(len(scenario.input["facts"])))
        return str(scenario.input["customer"]["opening"])

    def open(self, database: dict[str, Any]) -> None:
        """A session over a copy of a database."""
        self.database: dict[str, Any] = deepcopy(database)
        self.verified: str | None = None
        self.handed_over = False
        self.breaches: list[str] = []
        self.changes: list[str] = []
        """Changes that were made, as text to compare them by."""
        self.quoted: list[str] = []
        """Terms of the last change."""
        self.talk: list[list[str]] = []
        """What the agent said, and what the customer answered."""
        self._served = ""

    def step(self, action: dict[str, Any]) -> Any:
        """A `Step`; where a model plays the customer and is spoken to, something to await."""
        if isinstance(self.user, ServedCustomer) and not action.get("tool_calls"):
            return self._ask_customer(self.user, action)
        return super().step(action)

    async def _ask_customer(self, user: ServedCustomer, action: dict[str, Any]) -> Step:
        script, text = self.scenario.input["customer"], action.get("content") or ""
        seed = int(hashlib.sha256(self.scenario.id.encode()).hexdigest()[:7], 16)
        self._served = await user.answer(script, self.talk, text, seed)
        return super().step(action)

    def said(self, text: str) -> Messages:
        facts, heard = self.scenario.input["facts"], text[:HEARD] if clear(text[:HEARD]) else ""
        self.missing = [n for n in self.missing if not any(says(heard, word) for word in facts[n]["words"])]
        if isinstance(self.user, ServedCustomer):
            reply = self._served
        else:
            questions = [facts[n]["question"] for n in self.missing if facts[n]["question"]]
            reply = self.customer.answer(text, done=self.as_expected(), missing=questions)
        self.talk.append([heard, reply])
        if len(self.talk) >= TALK and STOP not in reply:
            reply = f"I have to go. {STOP}"
        self.done = STOP in reply
        return [{"role": "user", "content": reply}]

    def outcome(self, answer: str) -> dict[str, Any]:
        state, told = self.as_expected(), not self.missing
        return {
            "success": self.done and state and told and not self.breaches,
            "progress": self._progress(state),
            "state": state,
            "told": told,
            "ended": self.done,
            "breaches": list(self.breaches),
        }

    def _progress(self, state: bool) -> float:
        """Share of what there is to do: verifying, the changes, the facts; nothing once a rule is broken."""
        if self.breaches:
            return 0.0
        given = self.scenario.input
        right = [given["verified"] == self.verified] if given["verified"] else []
        right += [one in self.changes for one in given["changes"]]
        right += [number not in self.missing for number in range(len(given["facts"]))]
        right.append(state and self.done)
        return round(sum(right) / len(right), 4)

    def as_expected(self) -> bool:
        """Whether all is as the right actions leave it."""
        given = self.scenario.input
        return self.digest() == given["expected"] and given["verified"] in ("", self.verified)

    def digest(self) -> str:
        """Of the database, and of whether the customer was handed over."""
        state = json.dumps([self.database, self.handed_over], sort_keys=True)
        return hashlib.sha256(state.encode()).hexdigest()

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        return [
            call(one["call"], one["arguments"], number)
            if "call" in one
            else {"role": "assistant", "content": one["say"]}
            for number, one in enumerate(scenario.input["solution"])
        ]

    def save(self) -> dict[str, Any]:
        kept = {name: deepcopy(getattr(self, name)) for name in self._state}
        return {**kept, "customer": self.customer.save()}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        self.reset(scenario)
        for name in self._state:
            setattr(self, name, deepcopy(state[name]))
        self.customer.restore(state["customer"])

    _state = (
        "database", "verified", "handed_over", "breaches", "changes", "quoted", "talk", "missing", "invalid_actions",
        "done",
    )  # fmt: skip

    # For tools

    @tool
    def hand_over(self, reason: Annotated[str, "in a few words"]) -> str:
        """Hands the customer over to a colleague, which ends the conversation."""
        self.handed_over = self.done = True
        if not self.scenario.input["hand_over"]:
            self.breach(self.colleagues, "handed over without need")
        return "handed over"

    def breach(self, rule: str, what: str) -> None:
        """Notes that a rule was broken, once."""
        if f"{rule}: {what}" not in self.breaches:
            self.breaches.append(f"{rule}: {what}")

    def record(self, table: str, key: str, what: str) -> dict[str, Any]:
        """A record of the database, or Invalid. what: its name in a few words."""
        try:
            return self.database[table][key]
        except KeyError:
            raise Invalid(f"no {what} {key[:40]}") from None

    def looks_at(self, customer: str) -> None:
        """Something of that customer's account is looked at."""
        if self.verified is None:
            self.breach(self.identity, "looked at an account before verifying")
        elif self.verified != customer:
            self.breach(self.identity, "looked at somebody else's account")

    def changes_for(self, customer: str, name: str, terms: Sequence[object], given: Sequence[object]) -> None:
        """A change is made for that customer. terms: what has to be named before it says yes. given: the arguments of
        the call, that tell changes apart."""
        if self.verified is None:
            self.breach(self.identity, f"{name} before verifying")
        elif self.verified != customer:
            self.breach(self.identity, f"{name} on somebody else's account")
        self.quoted = [str(term) for term in terms]
        if not any(agrees(reply) and all(says(said, term) for term in self.quoted) for said, reply in self.talk):
            self.breach(self.consent, f"{name} without the customer's yes to its terms")
        self.changes.append(json.dumps([name, *given]))


def answer(**fields: Any) -> str:
    """What a tool tells: JSON on one line."""
    return json.dumps(fields)
