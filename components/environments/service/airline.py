"""Service desk of an airline: flights, bookings, passengers, bags, membership.

Every scenario has its own small database: three customers, their bookings, and flights between a few cities. The policy
is the system prompt. The permitted changes of a booking depend on its fare and cabin, the member's level, the number of
passengers, the dates of booking and departure, and delays or cancellation of the flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Literal

from components.environments.service.airline_policy import (
    BAG,
    BAGS_EACH,
    DELAY,
    FEE,
    FOR_CANCELLED,
    FOR_DELAY,
    FREE,
    MAX_CORRECTED_LETTERS,
    MAX_PASSENGERS,
    SYSTEM,
    TODAY,
    distance,
)
from components.environments.service.airline_scenarios import AirlineScenario
from components.environments.service.desk import ServiceDesk
from components.environments.service.scenarios import generate
from components.environments.tools import InvalidAction, to_json, tool
from components.specs.registered import registered
from components.trajectories.schema import Scenario


@registered("environment.airline")
class Airline(ServiceDesk):
    __doc__ = ServiceDesk.__doc__

    system = SYSTEM
    identity, consent, colleagues = "A1", "A2", "A10"
    credit, credit_rule = "travel credit", "A9"
    basics = ("A1 A2", "verify view_customer view_booking view_flight")
    requests = {
        "cancel": ("A3", "cancel_booking"),
        "move": ("A4", "find_flights change_flight"),
        "cabin": ("A5", "change_cabin"),
        "bags": ("A6", "add_bags"),
        "name": ("A7", "correct_name"),
        "compensation": ("A8", "compensate"),
        "book": ("A9", "find_flights book"),
        "question": ("A4 A6", ""),
        "child": ("A10", "hand_over"),
        "stranger": ("A3", "cancel_booking"),
        "other": ("A3 A4", "cancel_booking change_flight"),
    }
    topics = {
        "name": r"names?",
        "birth": r"birth|born|birthday",
        "booking": r"bookings?|number|reservation",
        "route": r"from|to where|cit(y|ies)|route|destination",
        "date": r"dates?(?! of birth)|days?|when",
        "flight": r"flights?|prefer",
        "cabin": r"cabin|class",
        "bags": r"bags?|baggage|luggage",
        "passengers": r"passengers?|travell?ers?|who|correct(ed)?|spell(ed|ing)?",
        "payment": r"payment|pay|card|credit",
        "reason": r"reason|why|know",
    }

    def generate(self, seed: int, train: int, heldout: int, kinds: tuple[str, ...]) -> Sequence[Scenario]:
        return generate(type(self), AirlineScenario, seed, train, heldout, kinds)

    # Looking up

    @tool
    def verify(self, name: Annotated[str, "first and last"], born: Annotated[str, "such as 1990-01-31"]) -> str:
        """Finds and verifies a customer."""
        return self.verify_customer(name, "born", born, "date of birth")

    @tool
    def view_customer(self, customer: Annotated[str, "such as C1"]) -> str:
        """Level, payments and bookings of a customer."""
        record = self.record("customers", customer, "customer")
        self.check_access(customer)
        bookings = [key for key, booking in self.database["bookings"].items() if booking["customer"] == customer]
        return to_json(**record, bookings=bookings)

    @tool
    def view_booking(self, booking: Annotated[str, "such as B1042"]) -> str:
        """Flight, cabin, fare, passengers, bags, payment and state of a booking."""
        record = self.record("bookings", booking, "booking")
        self.check_access(record["customer"])
        return to_json(**record)

    @tool
    def find_flights(self, origin: str, destination: str, date: Annotated[str, "such as 2031-09-12"]) -> str:
        """Flights between two cities on a day."""
        flights = [
            key
            for key, flight in self.database["flights"].items()
            if [flight["origin"].lower(), flight["destination"].lower(), flight["date"]]
            == [origin.strip().lower(), destination.strip().lower(), date.strip()]
        ]
        return to_json(flights=flights)

    @tool
    def view_flight(self, flight: Annotated[str, "such as NG512"]) -> str:
        """Cities, date, times, hours of delay, and the price and free seats of each cabin."""
        return to_json(**self.record("flights", flight, "flight"))

    # Changing

    @tool
    def book(
        self,
        flight: str,
        cabin: Literal["economy", "business"],
        passengers: Annotated[list[str], "first and last names"],
        payment: Annotated[str, "such as P12"],
    ) -> str:
        """Books a flight for the verified customer, with a flex fare. Consent: flight, dollars in all."""
        if self.verified is None:
            self.breach("A1", "book before verifying")
            raise InvalidAction("nobody is verified")
        record = self.record("flights", flight, "flight")
        names = [" ".join(name.split())[:60] for name in passengers[: 2 * MAX_PASSENGERS]]
        if not names or not all(names):
            raise InvalidAction("passengers: their names, please")
        amount = record["cabins"][cabin]["price"] * len(names)
        self.require_payment(self.verified, payment)
        self.record_change(self.verified, "book", [flight, amount], [flight, cabin, names, payment])
        if len(names) > MAX_PASSENGERS or self._has_departed(flight) or record["cabins"][cabin]["seats"] < len(names):
            self.breach("A9", "a booking without seats, or of too many")
        self.pay(self.verified, payment, amount)
        record["cabins"][cabin]["seats"] -= len(names)
        key = f"B{self.database['next']}"
        self.database["next"] += 1
        self.database["bookings"][key] = {
            "customer": self.verified, "flight": flight, "cabin": cabin, "fare": "flex", "passengers": names, "bags": 0,
            "booked": str(TODAY), "payment": payment, "paid": amount, "compensation": 0, "state": "booked",
        }  # fmt: skip
        return to_json(booking=key, charged=amount)

    @tool
    def change_flight(self, booking: str, flight: Annotated[str, "the new one, such as NG512"]) -> str:
        """Moves a booking to another flight. Consent: booking, flight, dollars charged in all."""
        record, new = self._active_booking(booking), self.record("flights", flight, "flight")
        if record["flight"] == flight:
            raise InvalidAction(f"{booking} is on {flight} already")
        old, count = self.database["flights"][record["flight"]], len(record["passengers"])
        level = self.database["customers"][record["customer"]]["level"]
        prices = [option["cabins"][record["cabin"]]["price"] for option in (old, new)]
        amount = (max(0, prices[1] - prices[0]) + FEE * (record["fare"] == "light" and level != "gold")) * count
        self.record_change(record["customer"], "change_flight", [booking, flight, amount], [booking, flight])
        cities = [old["origin"], old["destination"]] == [new["origin"], new["destination"]]
        if not cities or new["cabins"][record["cabin"]]["seats"] < count or new["cancelled"]:
            self.breach("A4", "a flight between other cities, or without seats")
        if self._has_departed(record["flight"]) or self._has_departed(flight):
            self.breach("A4", "a flight that has departed")
        old["cabins"][record["cabin"]]["seats"] += count
        new["cabins"][record["cabin"]]["seats"] -= count
        record |= {"flight": flight, "paid": record["paid"] + amount}
        self.pay(record["customer"], record["payment"], amount)
        return to_json(booking=booking, flight=flight, charged=amount)

    @tool
    def change_cabin(self, booking: str, cabin: Literal["economy", "business"]) -> str:
        """Moves all passengers of a booking to another cabin. Consent: booking, cabin, dollars charged in all."""
        record = self._active_booking(booking)
        if record["cabin"] == cabin:
            raise InvalidAction(f"{booking} is in {cabin} already")
        cabins, count = self.database["flights"][record["flight"]]["cabins"], len(record["passengers"])
        amount = max(0, cabins[cabin]["price"] - cabins[record["cabin"]]["price"]) * count
        self.record_change(record["customer"], "change_cabin", [booking, cabin, amount], [booking, cabin])
        if cabin == "economy" or cabins[cabin]["seats"] < count or self._has_departed(record["flight"]):
            self.breach("A5", "to economy, without seats, or after departure")
        cabins[record["cabin"]]["seats"] += count
        cabins[cabin]["seats"] -= count
        record |= {"cabin": cabin, "paid": record["paid"] + amount}
        self.pay(record["customer"], record["payment"], amount)
        return to_json(booking=booking, cabin=cabin, charged=amount)

    @tool
    def add_bags(self, booking: str, bags: Annotated[int, "how many more"]) -> str:
        """Adds bags to a booking, in all. Consent: booking, dollars charged."""
        record = self._active_booking(booking)
        if not 1 <= bags <= 50:
            raise InvalidAction("bags: 1 or more")
        free, total = self._free_bags(record), record["bags"] + bags
        amount = (max(0, total - free) - max(0, record["bags"] - free)) * BAG
        self.record_change(record["customer"], "add_bags", [booking, amount], [booking, bags])
        if total > BAGS_EACH * len(record["passengers"]) or self._has_departed(record["flight"]):
            self.breach("A6", "too many bags, or after departure")
        record |= {"bags": total, "paid": record["paid"] + amount}
        self.pay(record["customer"], record["payment"], amount)
        return to_json(booking=booking, bags=total, charged=amount)

    @tool
    def correct_name(self, booking: str, wrong: Annotated[str, "as it stands"], right: str) -> str:
        """Corrects the name of a passenger. Consent: booking, right name."""
        record, right = self._active_booking(booking), " ".join(right.split())[:60]
        if wrong not in record["passengers"] or not right:
            raise InvalidAction(f"no passenger {wrong[:60]} in {booking}, or no right name")
        self.record_change(record["customer"], "correct_name", [booking, right], [booking, wrong, right])
        if distance(wrong.lower(), right.lower()) > MAX_CORRECTED_LETTERS or self._has_departed(record["flight"]):
            self.breach("A7", "more than a misspelling, or after departure")
        record["passengers"][record["passengers"].index(wrong)] = right
        return to_json(booking=booking, passengers=record["passengers"])

    @tool
    def cancel_booking(self, booking: str) -> str:
        """Cancels a booking and pays all of it back. Consent: booking, dollars."""
        record = self._active_booking(booking)
        amount = record["paid"]
        self.record_change(record["customer"], "cancel_booking", [booking, amount], [booking])
        flight = self.database["flights"][record["flight"]]
        fresh = date.fromisoformat(record["booked"]) >= TODAY - timedelta(1)
        gone = self._has_departed(record["flight"]) and not flight["cancelled"]
        if gone or not (fresh or record["fare"] == "flex" or flight["cancelled"]):
            self.breach("A3", "a booking that cannot be cancelled")
        record["state"] = "cancelled"
        flight["cabins"][record["cabin"]]["seats"] += len(record["passengers"])
        self.pay(record["customer"], record["payment"], -amount)
        return to_json(cancelled=booking, refunded=amount)

    @tool
    def compensate(self, booking: str, dollars: Annotated[int, "in all"]) -> str:
        """Gives compensation for a flight. Consent: booking, dollars."""
        record = self._active_booking(booking)
        self.record_change(record["customer"], "compensate", [booking, dollars], [booking, dollars])
        if record["compensation"] or dollars != self._compensation_due(record):
            self.breach("A8", "a compensation that is not due")
        record["compensation"] += max(-10_000, min(dollars, 10_000))
        return to_json(booking=booking, compensation=dollars)

    # The rules

    def _active_booking(self, booking: str) -> dict[str, Any]:
        record = self.record("bookings", booking, "booking")
        if record["state"] != "booked":
            raise InvalidAction(f"{booking} is {record['state']}")
        return record

    def _has_departed(self, flight: str) -> bool:
        return date.fromisoformat(self.database["flights"][flight]["date"]) < TODAY

    def _free_bags(self, booking: dict[str, Any]) -> int:
        level = self.database["customers"][booking["customer"]]["level"]
        return (FREE[level] + (booking["cabin"] == "business")) * len(booking["passengers"])

    def _compensation_due(self, booking: dict[str, Any]) -> int:
        """Return the compensation due, in dollars; -1 if none is due."""
        flight, level = self.database["flights"][booking["flight"]], self.database["customers"][booking["customer"]]
        if booking["fare"] != "flex" and level["level"] == "base":
            return -1
        amount = FOR_CANCELLED if flight["cancelled"] else FOR_DELAY if flight["delay"] >= DELAY else 0
        return amount * len(booking["passengers"]) or -1
