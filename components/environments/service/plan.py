"""Correct conversations, from which scenarios are created.

A `ConversationPlan` holds a session of the desk and executes what the agent should look up, offer, do and decline while
it records the solution. The rules are therefore defined in one place, the tools: a trial returns the rules that a
change would break and the terms that the customer must hear, and the final state is the expected state.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from components.environments.service.customer import PATIENCE, says
from components.environments.service.desk import ServiceDesk
from components.trajectories.schema import Scenario

CONSENT = " Shall I go ahead?"
"""End of an offer."""
INSISTS = "I hear that, but surely you can make an exception for me."
"""Reply of the customer to a refusal that it does not yet accept."""


@dataclass
class Intent:
    """A request of the customer."""

    opening: str
    """First message about the request."""
    goal: str
    """The request as a complete sentence, repeated when the agent does not understand."""
    facts: dict[str, str]
    """Facts that the customer knows, by topic."""
    ask: str
    """Question with which the agent asks for the facts."""
    act: Callable[[ConversationPlan], None] = lambda plan: None
    """Function that adds the correct actions to a plan; the default leaves the request to a colleague."""
    complications: int = 0
    """Number of conditions and indirections beyond the plain case."""


@dataclass(frozen=True)
class Change:
    """A change that the customer requests."""

    offer: str
    """Offer of the agent, with placeholders for the terms."""
    cannot: str
    """Reasons for which the rules may forbid it."""
    words: str
    """The request, repeated by the customer."""
    tool: str
    arguments: dict[str, Any]


@dataclass
class ConversationPlan:
    """A correct conversation, executed and recorded."""

    desk: ServiceDesk
    database: dict[str, Any]
    rng: random.Random
    temper: str = "calm"
    solution: list[dict[str, Any]] = field(default_factory=list)
    wishes: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    refusals: int = 0
    """Number of refusals that the customer needs to hear."""
    declined: int = 0
    """Number of requests that the rules forbid."""
    complications: int = 0
    hand_over: bool = False

    def __post_init__(self) -> None:
        self.temper = self.rng.choice(sorted(PATIENCE))
        self.desk.open(self.database)

    def say(self, text: str, reply: str = "") -> None:
        """Add a message to the customer and its reply."""
        self.solution.append({"say": text})
        self.desk.talk.append([text, reply])

    def do(self, tool: str, /, **arguments: Any) -> Any:
        """Call a tool; return its parsed result."""
        self.solution.append({"call": tool, "arguments": arguments})
        result = getattr(self.desk, tool)(**arguments)
        return json.loads(result) if result.startswith(("{", "[")) else result

    def trial(self, change: Change) -> tuple[list[str], list[str]]:
        """Return the rules that a change would break if the customer agreed, and its terms. The state is restored."""
        desk = self.desk
        before = {name: deepcopy(getattr(desk, name)) for name in ("database", "breaches", "changes", "quoted")}
        getattr(desk, change.tool)(**change.arguments)
        rules = {breach.partition(":")[0] for breach in desk.breaches} - {desk.consent}
        terms = desk.quoted
        for name, value in before.items():
            setattr(desk, name, value)
        return sorted(rules), terms

    def offer(self, terms: list[str], text: str, *, reply: str, yes: bool = True, words: str = "") -> None:
        """Offer a change with its terms; the customer answers with `reply`. words: its repeated request."""
        text = text.format(*terms)
        assert all(says(text, term) for term in terms), (text, terms)
        self.wishes.append({"terms": terms, "yes": yes, "reply": reply, "words": words})
        self.say(text, reply)

    def reject(self, change: Change, terms: list[str], reply: str) -> None:
        """Offer a change that the customer rejects."""
        self.offer(terms, change.offer + CONSENT, reply=reply, yes=False)
        self.complications += 1

    def change(self, change: Change) -> None:
        """Offer a change and make it, or decline it if a rule forbids it."""
        rules, terms = self.trial(change)
        if rules:
            self.decline(rules, change.cannot)
            return
        self.offer(terms, change.offer + CONSENT, reply="Yes, please do that.", words=change.words)
        self.do(change.tool, **change.arguments)

    def decline(self, rules: list[str], why: str) -> None:
        """Refuse a request and name a rule; any of `rules` is correct. Customers who are not calm need two refusals."""
        self.tell(rules, "")
        self.declined += 1
        self.complications += 1
        for _ in range(1 if self.temper == "calm" else 2):
            self.refusals += 1
            self.say(f"I am sorry, I cannot do that: {why} (rule {rules[0]}).")
        self.complications += self.temper != "calm"

    def tell(self, words: list[str], question: str) -> None:
        """Add a fact that the customer must hear, in any of these words. question: asks for the fact again."""
        self.facts.append({"words": words, "question": question})

    def converse(self, intents: list[Intent], ask: str, identity: dict[str, str]) -> bool:
        """Play the conversation: verify the customer, ask for the facts, handle each intent.

        Return False if the scenario is unusable, because it has two refusals. ask: question for the identity.
        identity: arguments of the tool `verify`.
        """
        if self.hand_over:
            self.do_hand_over()
            return True
        self.say(ask)
        self.do("verify", **identity)
        if self.desk.verified is None:
            self.decline([self.desk.identity], "what you told me does not belong together")
            return True
        self.say(" ".join(["Thank you.", *dict.fromkeys(intent.ask for intent in intents)]))
        self.do("view_customer", customer=self.desk.verified)
        for intent in intents:
            intent.act(self)
        return self.declined < 2

    def do_hand_over(self) -> None:
        """Hand the customer over to a colleague."""
        self.desk.handed_over = True
        self.solution.append({"call": "hand_over", "arguments": {"reason": "the policy asks for a colleague"}})

    def scenario(self, name: str, split: str, kind: str, intents: list[Intent], who: dict[str, str]) -> Scenario:
        """Return the scenario of the played conversation. who: facts of the customer about itself, by topic."""
        desk = self.desk
        assert not desk.breaches, desk.breaches
        if "call" in self.solution[-1] and not self.hand_over:
            self.say("That is done. Is there anything else?")
        facts: dict[str, list[str]] = {topic: [text] for topic, text in who.items()}
        for intent in intents:
            for topic, text in intent.facts.items():
                facts.setdefault(topic, []).append(text)
        input = {
            "database": self.database,
            "customer": {
                "opening": _greeting(self.temper) + " Also, ".join(intent.opening for intent in intents),
                "goal": " And ".join(intent.goal for intent in intents),
                "temper": self.temper,
                "facts": {topic: " ".join(texts) for topic, texts in facts.items()},
                "wishes": self.wishes,
                "refusals": self.refusals,
                "insists": INSISTS,
            },
            "facts": self.facts,
            "solution": self.solution,
            "changes": list(desk.changes),
            "verified": desk.verified or "",
            "hand_over": self.hand_over,
            "expected": desk.digest(),
        }
        complications = self.complications + sum(intent.complications for intent in intents) + len(intents) - 1
        return Scenario(name, input, split, kind, min(5, 1 + complications))


def _greeting(temper: str) -> str:
    return {"calm": "Hello! ", "brisk": "", "cross": "Listen. "}[temper]
