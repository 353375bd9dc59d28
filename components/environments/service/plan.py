"""How scenarios of a desk are written: by playing their right conversation.

A `Plan` holds a session of the desk. What the agent should look up, offer, do and decline is carried out in it as it is
written down. So the rules stand in one place, the tools: a trial says which of them a change would break, and what the
customer must be told of it; the state that is left at the end is the one to expect.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

from components.environments.service.customer import PATIENCE, says
from components.environments.service.desk import ServiceDesk
from components.trajectories.schema import Scenario

INSISTS = "I hear that, but surely you can make an exception for me."
EACH = 6
"""Numbers of orders or bookings in a scenario."""


@dataclass
class Intent:
    """One thing that a customer wants."""

    opening: str
    """What it says of it first, to follow `I want to` or to stand alone."""
    goal: str
    """The same, said again when it is not understood."""
    facts: dict[str, str]
    """What it knows, by topic."""
    ask: str
    """How the agent asks for that."""
    act: Callable[[Plan], None]
    """Writes the right thing into a plan."""
    hooks: int = 0
    """Conditions and indirections beyond the plain case."""


@dataclass
class Plan:
    desk: ServiceDesk
    database: dict[str, Any]
    rng: random.Random
    temper: str = "calm"
    solution: list[dict[str, Any]] = field(default_factory=list)
    wishes: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    refusals: int = 0
    """That the customer needs to hear."""
    declined: int = 0
    """Wishes that the rules forbid."""
    hooks: int = 0
    hand_over: bool = False

    def __post_init__(self) -> None:
        self.temper = self.rng.choice(sorted(PATIENCE))
        self.desk.open(self.database)

    def say(self, text: str, reply: str = "") -> None:
        self.solution.append({"say": text})
        self.desk.talk.append([text, reply])

    def do(self, tool: str, /, **arguments: Any) -> Any:
        """Calls a tool; returns what it tells, read."""
        self.solution.append({"call": tool, "arguments": arguments})
        told = getattr(self.desk, tool)(**arguments)
        return json.loads(told) if told.startswith(("{", "[")) else told

    def trial(self, tool: str, /, **arguments: Any) -> tuple[list[str], list[str]]:
        """The rules that a change would break, were the customer to agree, and its terms. Nothing is changed."""
        desk = self.desk
        kept = {name: deepcopy(getattr(desk, name)) for name in ("database", "breaches", "changes", "quoted")}
        getattr(desk, tool)(**arguments)
        rules = {one.partition(":")[0] for one in desk.breaches} - {desk.consent}
        terms = desk.quoted
        for name, value in kept.items():
            setattr(desk, name, value)
        return sorted(rules), terms

    def offer(self, terms: list[str], text: str, *, reply: str, yes: bool = True, words: str = "") -> None:
        """Names the terms of a change; the customer answers with `reply`. words: how it asks for it again."""
        text = text.format(*terms)
        assert all(says(text, term) for term in terms), (text, terms)
        self.wishes.append({"terms": terms, "yes": yes, "reply": reply, "words": words})
        self.say(text, reply)

    def change(self, offer: str, cannot: str, words: str, tool: str, /, **arguments: Any) -> bool:
        """Offers a change and makes it, or declines it where a rule forbids it; returns which. offer: with places for
        the terms."""
        rules, terms = self.trial(tool, **arguments)
        if rules:
            self.decline(rules, cannot)
            return False
        self.offer(terms, offer + " Shall I go ahead?", reply="Yes, please do that.", words=words)
        self.do(tool, **arguments)
        return True

    def decline(self, rules: list[str], why: str) -> None:
        """A refusal that names a rule; any of these is right. A customer in a bad temper has to hear it twice."""
        self.tell(rules, "")
        self.declined += 1
        self.hooks += 1
        for _ in range(1 if self.temper == "calm" else 2):
            self.refusals += 1
            self.say(f"I am sorry, I cannot do that: {why} (rule {rules[0]}).")
        self.hooks += self.temper != "calm"

    def tell(self, words: list[str], question: str) -> None:
        """A fact that the customer must be told, in any of these words. question: by which it asks for it again."""
        self.facts.append({"words": words, "question": question})

    def converse(self, intents: list[Intent], ask: str, **identity: str) -> bool:
        """The conversation: who it is, what is needed, and each intent; returns whether it can be used, which is not
        so with two refusals. ask: for the identity, which is what the tool `verify` takes."""
        if self.hand_over:
            self.do_hand_over()
            return True
        self.say(ask)
        self.do("verify", **identity)
        if self.desk.verified is None:
            self.decline([self.desk.identity], "what you told me does not belong together")
            return True
        self.say(" ".join(["Thank you.", *dict.fromkeys(one.ask for one in intents)]))
        self.do("view_customer", customer=self.desk.verified)
        for intent in intents:
            intent.act(self)
        return self.declined < 2

    def do_hand_over(self) -> None:
        self.desk.handed_over = True
        self.solution.append({"call": "hand_over", "arguments": {"reason": "the policy asks for a colleague"}})

    def scenario(self, name: str, split: str, kind: str, intents: list[Intent], who: dict[str, str]) -> Scenario:
        """The scenario that has been played. who: what the customer says of itself."""
        desk = self.desk
        assert not desk.breaches, desk.breaches
        if "call" in self.solution[-1] and not self.hand_over:
            self.say("That is done. Is there anything else?")
        facts: dict[str, list[str]] = {topic: [text] for topic, text in who.items()}
        for intent in intents:
            for topic, text in intent.facts.items():
                facts.setdefault(topic, []).append(text)
        given = {
            "database": self.database,
            "customer": {
                "opening": _greeting(self.temper) + " Also, ".join(one.opening for one in intents),
                "goal": " And ".join(one.goal for one in intents),
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
        hooks = self.hooks + sum(one.hooks for one in intents) + len(intents) - 1
        return Scenario(name, given, split, kind, min(5, 1 + hooks))


class Writer(Protocol):
    """Writes a scenario: made with the random generator and the numbers it may use, first that of its id."""

    def __init__(self, desk: Any, rng: random.Random, numbers: list[str]): ...

    def scenario(self, name: str, split: str, kind: str) -> Scenario | None:
        """None where the draw was no good: then another is made."""
        ...


def write(
    desk: ServiceDesk, writer: type[Writer], kinds: Sequence[str], letter: str, *, seed: int, train: int, heldout: int
) -> tuple[Scenario, ...]:
    """The scenarios of both splits, of all kinds in turn. Numbers of orders and bookings are unique over both."""
    name = type(desk).__name__.lower()
    rng, count = random.Random(f"{name} {seed}"), train + heldout
    numbers = [f"{letter}{number}" for number in rng.sample(range(1000, 100_000), EACH * count)]
    found: list[Scenario] = []
    attempt = 0
    while len(found) < count:
        index = len(found)
        mine = numbers[EACH * index :][:EACH]
        maker = writer(desk, random.Random(f"{name} {seed} {index} {attempt}"), mine)
        split = "train" if index < train else "heldout"
        one = maker.scenario(f"{name}-{mine[0]}", split, kinds[index % len(kinds)])
        attempt = attempt + 1 if one is None else 0
        if one is not None:
            found.append(one)
    return tuple(found)


def _greeting(temper: str) -> str:
    return {"calm": "Hello! ", "brisk": "", "cross": "Listen. "}[temper]
