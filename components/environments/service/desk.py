"""Base class of the service desks: a database, a policy that the agent must follow, and a customer.

The tools execute every possible action, also if it violates the policy: following the policy is the agent's task. Each
breach is recorded in the outcome with the number of the rule. Three rules hold at every desk. An account is read or
changed only after its owner is verified. A change is made only after the agent has named its terms (numbers, amounts)
and the customer has agreed. A conversation is handed over to a colleague only if the policy says so.

An episode succeeds if the customer has ended it, the right customer was verified, the digest of the database equals
that after the correct actions, the customer was told the required facts, and no rule was broken. Message content beside
tool calls does not reach the customer. Subclasses define tools, `topics` and `generate`.
"""

from __future__ import annotations

import abc
import hashlib
import json
import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from components.environments.protocol import Messages, Step
from components.environments.restorable import RestorableState
from components.environments.service.customer import (
    MAX_LENGTH,
    STOP,
    ScriptedCustomer,
    ServedCustomer,
    agrees,
    clear,
    says,
)
from components.environments.tools import InvalidAction, call, to_json, tool
from components.trajectories.schema import Scenario

MAX_MESSAGES = 40
"""Number of messages to the customer after which it leaves."""


class ServiceDesk(RestorableState):
    """A service desk: the agent serves a customer under a policy.

    Args:
        seed: Seed of the generated scenarios.
        train, heldout: Number of scenarios of the split.
        requests: Kinds of the customers' requests, in turn. The policy then has only the rules that these need, and the
            tools are those that they need. None means all.
        user: `scripted`, or a model that plays the customer: `{url, model, key_variable, timeout}`.
    """

    saved = ("database", "verified", "handed_over", "breaches", "changes", "quoted", "talk", "missing")
    topics: ClassVar[dict[str, str]]
    """Topics that the agent may ask about, each with a pattern of the words that ask for it."""
    identity: ClassVar[str]
    """Number of the rule about verifying the customer."""
    consent: ClassVar[str]
    """Number of the rule about the customer's agreement to a change."""
    colleagues: ClassVar[str]
    """Number of the rule about handing over to a colleague."""
    requests: ClassVar[dict[str, tuple[str, str]]]
    """Rules and tools that each kind of request needs besides `basics`, as words."""
    basics: ClassVar[tuple[str, str]]
    """Rules and tools that every request needs, as words."""
    credit: ClassVar[str]
    """Kind of the payment that has a balance."""
    credit_rule: ClassVar[str]
    """Number of the rule about the balance."""

    def __init__(
        self,
        seed: int = 0,
        train: Annotated[int, Field(ge=0, le=4000)] = 512,
        heldout: Annotated[int, Field(ge=0, le=4000)] = 128,
        user: Literal["scripted"] | ServedCustomer = "scripted",
        requests: Annotated[Sequence[str], Field(min_length=1)] | None = None,
    ):
        self.user = ServedCustomer(**user) if isinstance(user, dict) else user
        if unknown := sorted({*(requests or ())} - {*self.requests}):
            raise ValueError(f"requests: {', '.join(unknown)} is unknown; expected {', '.join(self.requests)}")
        rules, tools = zip(self.basics, *(self.requests[kind] for kind in requests or self.requests), strict=True)
        self._tools = {*" ".join(tools).split()}
        self.system = _with_rules(self.system, {*" ".join(rules).split()})
        self._scenarios = self.generate(seed, train, heldout, tuple(requests or ()))

    @staticmethod
    def key_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that determine results: the model that plays the customer, not its server."""
        user = arguments.get("user", "scripted")
        return {**arguments, "user": {"model": user.model} if isinstance(user, ServedCustomer) else user}

    @abc.abstractmethod
    def generate(self, seed: int, train: int, heldout: int, kinds: tuple[str, ...]) -> Sequence[Scenario]:
        """Return the scenarios of both splits. kinds: of the requests; all if empty."""

    def tools(self) -> list[dict[str, Any]]:
        return [spec for spec in super().tools() if spec["function"]["name"] in self._tools]

    def _run_tool(self, name: str, arguments: Any) -> str:
        if name not in self._tools:
            raise InvalidAction(f"no tool {name[:40]}; there are {', '.join(sorted(self._tools))}")
        return super()._run_tool(name, arguments)

    # The episode

    def begin(self, scenario: Scenario) -> str:
        if isinstance(self.user, ServedCustomer):
            self.user.key()  # a missing key would fail every episode; raise now
        self.open(scenario.input["database"])
        self.customer = ScriptedCustomer(scenario.input["customer"], self.topics)
        self.missing = list(range(len(scenario.input["facts"])))
        return str(scenario.input["customer"]["opening"])

    def open(self, database: dict[str, Any]) -> None:
        """Start a session on a copy of a database."""
        self.database: dict[str, Any] = deepcopy(database)
        self.verified: str | None = None
        self.handed_over = False
        self.breaches: list[str] = []
        self.changes: list[str] = []
        """Changes made so far, as JSON strings."""
        self.quoted: list[str] = []
        """Terms of the last change."""
        self.talk: list[list[str]] = []
        """Conversation: pairs of an agent message and the customer's reply."""
        self._served = ""

    def step(self, action: dict[str, Any]) -> Any:
        """Return a `Step`, or an awaitable of one for a message to a customer that a model plays."""
        if isinstance(self.user, ServedCustomer) and not action.get("tool_calls"):
            return self._ask_customer(self.user, action)
        return super().step(action)

    async def _ask_customer(self, user: ServedCustomer, action: dict[str, Any]) -> Step:
        script, text = self.scenario.input["customer"], action.get("content") or ""
        seed = int(hashlib.sha256(self.scenario.id.encode()).hexdigest()[:7], 16)
        self._served = await user.answer(script, self.talk, text, seed)
        return super().step(action)

    def on_message(self, text: str) -> Messages:
        facts, understood = self.scenario.input["facts"], text[:MAX_LENGTH] if clear(text[:MAX_LENGTH]) else ""
        self.missing = [n for n in self.missing if not any(says(understood, word) for word in facts[n]["words"])]
        if isinstance(self.user, ServedCustomer):
            reply = self._served
        else:
            questions = [facts[n]["question"] for n in self.missing if facts[n]["question"]]
            reply = self.customer.answer(text, done=self.as_expected(), missing=questions)
        self.talk.append([understood, reply])
        if len(self.talk) >= MAX_MESSAGES and STOP not in reply:
            reply = f"I have to go. {STOP}"
        self.done = STOP in reply
        return [{"role": "user", "content": reply}]

    def outcome(self, answer: str) -> dict[str, Any]:
        state, informed = self.as_expected(), not self.missing
        return {
            "success": self.done and state and informed and not self.breaches,
            "progress": self._progress(state),
            "state": state,
            "told": informed,
            "ended": self.done,
            "breaches": list(self.breaches),
        }

    def _progress(self, state: bool) -> float:
        """Return the completed share of the task (verification, changes, facts, end); 0 after a breach."""
        if self.breaches:
            return 0.0
        task = self.scenario.input
        completed = [task["verified"] == self.verified] if task["verified"] else []
        completed += [change in self.changes for change in task["changes"]]
        completed += [number not in self.missing for number in range(len(task["facts"]))]
        completed.append(state and self.done)
        return round(sum(completed) / len(completed), 4)

    def as_expected(self) -> bool:
        """Return True if the state equals that after the correct actions."""
        task = self.scenario.input
        return self.digest() == task["expected"] and task["verified"] in ("", self.verified)

    def digest(self) -> str:
        """Return the digest of the database and of the hand-over flag."""
        state = json.dumps([self.database, self.handed_over], sort_keys=True)
        return hashlib.sha256(state.encode()).hexdigest()

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        return [
            call(action["call"], action["arguments"], number)
            if "call" in action
            else {"role": "assistant", "content": action["say"]}
            for number, action in enumerate(scenario.input["solution"])
        ]

    def save(self) -> dict[str, Any]:
        return {"desk": super().save(), "customer": self.customer.save()}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        super().restore(scenario, state["desk"])
        self.customer.restore(state["customer"])

    # Shared by the tools

    @tool
    def hand_over(self, reason: Annotated[str, "in a few words"]) -> str:
        """Hands the customer over to a colleague, which ends the conversation."""
        self.handed_over = self.done = True
        if not self.scenario.input["hand_over"]:
            self.breach(self.colleagues, "handed over without need")
        return "handed over"

    def breach(self, rule: str, violation: str) -> None:
        """Record the breach of a rule, without duplicates."""
        if f"{rule}: {violation}" not in self.breaches:
            self.breaches.append(f"{rule}: {violation}")

    def record(self, table: str, key: str, noun: str) -> dict[str, Any]:
        """Return a record of the database. Raises InvalidAction if there is none. noun: kind of the record."""
        try:
            return self.database[table][key]
        except KeyError:
            raise InvalidAction(f"no {noun} {key[:40]}") from None

    def verify_customer(self, name: str, field: str, value: str, noun: str) -> str:
        """Verify the customer with this name and this value of a field; return the result for the agent."""
        for key, customer in self.database["customers"].items():
            if customer["name"].lower() == name.strip().lower() and customer[field] == value.strip():
                self.verified = key
                return to_json(customer=key, verified=True)
        return f"no customer with this name and {noun}"

    def require_payment(self, customer: str, payment: str) -> None:
        """Raises InvalidAction if the customer does not have this payment."""
        if payment not in self.database["customers"][customer]["payments"]:
            raise InvalidAction(f"this customer has no payment {payment[:40]}")

    def pay(self, customer: str, payment: str, amount: int) -> None:
        """Charge a payment, or refund it if the amount is negative. Only credit has a balance."""
        record = self.database["customers"][customer]["payments"][payment]
        if record["kind"] == self.credit:
            record["balance"] -= amount
            if record["balance"] < 0:
                self.breach(self.credit_rule, f"{self.credit} that does not cover it")

    def check_access(self, customer: str) -> None:
        """Record a breach if the account of this customer may not be read."""
        if self.verified is None:
            self.breach(self.identity, "looked at an account before verifying")
        elif self.verified != customer:
            self.breach(self.identity, "looked at somebody else's account")

    def record_change(self, customer: str, name: str, terms: Sequence[object], arguments: Sequence[object]) -> None:
        """Record a change to the account of a customer, and a breach if it is not allowed.

        terms: terms that the agent must name before the customer agrees. arguments: arguments of the call, which
        identify the change.
        """
        if self.verified is None:
            self.breach(self.identity, f"{name} before verifying")
        elif self.verified != customer:
            self.breach(self.identity, f"{name} on somebody else's account")
        self.quoted = [str(term) for term in terms]
        if not any(agrees(reply) and all(says(text, term) for term in self.quoted) for text, reply in self.talk):
            self.breach(self.consent, f"{name} without the customer's yes to its terms")
        self.changes.append(json.dumps([name, *arguments]))


def _with_rules(policy: str, rules: set[str]) -> str:
    """Return a policy without the lines of other rules. A rule is a line that begins with its number."""
    lines = (line for line in policy.split("\n") if not re.match(r"[AR]\d", line) or line.split()[0] in rules)
    return "\n".join(lines)
