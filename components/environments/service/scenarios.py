"""Drawing of scenarios: a database of three customers and their records, one or two requests, and the conversation.

A record is an order or a booking. The number of a customer's first record is part of the scenario's id.
"""

from __future__ import annotations

import abc
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from components.environments.service.desk import ServiceDesk
from components.environments.service.plan import Change, ConversationPlan, Intent
from components.trajectories.schema import Scenario

CUSTOMERS, RECORDS_EACH = 3, 2
"""Number of customers of a scenario, and of records of a customer."""


class ScenarioWriter(abc.ABC):
    """Writer of one scenario. The request of kind K is the result of the method `_K`, for the number of a record.

    A request of the kind `stranger` is a cancellation by somebody who is not the customer.
    """

    letter: ClassVar[str]
    """Prefix of the numbers of records."""
    first_names: ClassVar[Sequence[str]]
    last_names: ClassVar[Sequence[str]]
    kinds: ClassVar[Sequence[str]]
    """Scenario types, in the order in which they alternate."""
    second_kinds: ClassVar[Sequence[str]]
    """Kinds that may also be a second request in a scenario."""
    colleague_kind: ClassVar[str]
    """Kind that a colleague handles."""
    ask: ClassVar[str]
    """Question for the name and the identity of the customer."""
    balances: ClassVar[range]
    """Range of the balance of a credit."""
    identity: ClassVar[tuple[str, str, str]]
    """Field of a customer that proves its identity, the topic of it, and the sentence that tells it."""
    suffix: ClassVar[str] = ""
    """Words after the description of a record whose number is unknown."""

    def __init__(self, desk: ServiceDesk, rng: random.Random, numbers: Sequence[str]):
        self.desk, self.rng, self.numbers = desk, rng, numbers[:RECORDS_EACH]
        self.database = self.draw_database(numbers)
        drawn = zip(rng.sample(self.first_names, CUSTOMERS), rng.sample(self.last_names, CUSTOMERS), strict=True)
        for index, (first, last) in enumerate(list(drawn)):
            self._draw_customer(f"C{index + 1}", f"{first} {last}", numbers[RECORDS_EACH * index :][:RECORDS_EACH])
        self.customer: dict[str, Any] = self.database["customers"]["C1"]

    def _draw_customer(self, key: str, name: str, numbers: Sequence[str]) -> None:
        card, credit = (f"P{number}" for number in self.rng.sample(range(10, 100), 2))
        self.database["customers"][key] = {
            "name": name,
            **self.draw_profile(),
            "payments": {
                card: {"kind": "card", "ending": str(self.rng.randrange(1000, 9999))},
                credit: {"kind": self.desk.credit, "balance": self.rng.choice(self.balances)},
            },
        }
        self.draw_records(key, numbers, card)

    @abc.abstractmethod
    def draw_database(self, numbers: Sequence[str]) -> dict[str, Any]:
        """Return a database without customers and records."""

    @abc.abstractmethod
    def draw_profile(self) -> dict[str, Any]:
        """Return the fields of a customer besides name and payments."""

    @abc.abstractmethod
    def draw_records(self, customer: str, numbers: Sequence[str], card: str) -> None:
        """Add the records of a customer, paid by a card."""

    @abc.abstractmethod
    def other_identity(self, identity: str) -> str:
        """Return an identity that is not the customer's."""

    @abc.abstractmethod
    def describe(self, number: str) -> str:
        """Return the customer's description of a record, such as `the order with the lamp`."""

    @abc.abstractmethod
    def view(self, plan: ConversationPlan, number: str) -> None:
        """View a record and what belongs to it."""

    @abc.abstractmethod
    def _cancel(self, number: str) -> Intent:
        """Return the request to cancel a record."""

    def _stranger(self, number: str) -> Intent:
        return self._cancel(number)

    def which(self, number: str) -> tuple[str, int]:
        """Return the customer's description of a record, by number or content, and its complications."""
        description = self.describe(number)
        if self.rng.random() < 0.5:
            return f"{description[0].upper()}{description[1:]} is {number}.", 0
        return f"I do not have the number; it is {description}{self.suffix}.", 1

    def open(self, plan: ConversationPlan, number: str, complications: int) -> None:
        """View a record; if its number is unknown, try the records of the customer in turn."""
        for candidate in self.numbers if complications else [number]:
            self.view(plan, candidate)
            if candidate == number:
                return

    def act(self, number: str, complications: int, change: Change) -> Callable[[ConversationPlan], None]:
        """Return the correct actions of a request: view the record, then make the change or decline it."""

        def act(plan: ConversationPlan) -> None:
            self.open(plan, number, complications)
            plan.change(change)

        return act

    def scenario(self, name: str, split: str, kind: str, allowed: Sequence[str]) -> Scenario | None:
        """Return the scenario; None if the draw is unusable and must be repeated. allowed: kinds of second requests."""
        kinds = [kind]
        others = [second for second in self.second_kinds if second != kind and second in allowed]
        if others and kind in self.second_kinds and self.rng.random() < 0.35:
            kinds.append(self.rng.choice(others))
        intents = [getattr(self, f"_{request}")(number) for request, number in zip(kinds, self.numbers, strict=False)]
        field, topic, sentence = self.identity
        identity = self.customer[field] if kind != "stranger" else self.other_identity(self.customer[field])
        plan = ConversationPlan(self.desk, self.database, self.rng, hand_over=kind == self.colleague_kind)
        if not plan.converse(intents, self.ask, {"name": self.customer["name"], field: identity}):
            return None
        about = {"name": f"{self.customer['name']}.", topic: sentence.format(identity)}
        return plan.scenario(name, split, kind, intents, about)


@functools.lru_cache(maxsize=4)  # a collector creates many desks with the same scenarios
def generate(
    desk_type: type[ServiceDesk],
    writer: type[ScenarioWriter],
    seed: int,
    train: int,
    heldout: int,
    kinds: tuple[str, ...] = (),
) -> tuple[Scenario, ...]:
    """Return the scenarios of both splits, cycling through the kinds, by default the writer's. Numbers of records are
    unique."""
    kinds = kinds or tuple(writer.kinds)
    count, per_scenario = train + heldout, CUSTOMERS * RECORDS_EACH
    if not count:
        return ()
    desk, name = desk_type(train=0, heldout=0), desk_type.__name__.lower()
    rng = random.Random(f"{name} {seed}")
    numbers = [f"{writer.letter}{number}" for number in rng.sample(range(1000, 100_000), per_scenario * count)]
    scenarios: list[Scenario] = []
    attempt = 0
    while len(scenarios) < count:
        index = len(scenarios)
        reserved = numbers[per_scenario * index :][:per_scenario]
        draw = writer(desk, random.Random(f"{name} {seed} {index} {attempt}"), reserved)
        split = "train" if index < train else "heldout"
        scenario = draw.scenario(f"{name}-{reserved[0]}", split, kinds[index % len(kinds)], kinds)
        attempt = attempt + 1 if scenario is None else 0
        if scenario is not None:
            scenarios.append(scenario)
    return tuple(scenarios)
