"""Database of an airline scenario: customers, flights and bookings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, timedelta
from typing import Any

from components.environments.service.airline_policy import FREE, TODAY
from components.environments.service.plan import ConversationPlan
from components.environments.service.scenarios import ScenarioWriter

CITIES = ("Aldmoor", "Brisewick", "Corvane", "Dunhaven", "Eastray", "Farrow", "Glenport", "Holmsey")
FIRST = ("Alma", "Boris", "Cleo", "Diego", "Elsa", "Franz", "Gina", "Henrik", "Ida", "Jakob", "Kaja", "Leon", "Mira")
LAST = ("Anders", "Bergmann", "Castell", "Duval", "Eriksen", "Fontana", "Grimaldi", "Holt", "Iversen", "Jovanova")


class AirlineBookings(ScenarioWriter):
    """Writer of the database of a scenario of the airline desk; its records are bookings."""

    letter = "B"
    first_names, last_names = FIRST, LAST
    ask = "I will gladly help. May I have your full name and your date of birth?"
    balances = range(50, 900)
    identity = ("born", "birth", "I was born on {}.")

    def draw_database(self, numbers: Sequence[str]) -> dict[str, Any]:
        self.cities = self.rng.sample(CITIES, 5)
        self.flight_numbers = iter(self.rng.sample(range(100, 1000), 40))
        return {"customers": {}, "flights": {}, "bookings": {}, "next": 100_000 + int(numbers[0][1:])}

    def draw_profile(self) -> dict[str, Any]:
        born = date(1950, 1, 1) + timedelta(self.rng.randrange(19_000))
        return {"born": str(born), "level": self.rng.choice(sorted(FREE))}

    def draw_records(self, customer: str, numbers: Sequence[str], card: str) -> None:
        rng, name = self.rng, self.database["customers"][customer]["name"]
        for booking, destination in zip(numbers, rng.sample(self.cities[1:], 2), strict=True):
            flight = self.add_flight(self.cities[0], destination, TODAY + timedelta(rng.randrange(3, 40)))
            others = [other for other in (f"{rng.choice(FIRST)} {name.split()[1]}" for _ in range(6)) if other != name]
            passengers = [name, *sorted(set(others))[: rng.randrange(0, 3)]]
            self.database["bookings"][booking] = {
                "customer": customer,
                "flight": flight,
                "cabin": "economy",
                "fare": rng.choice(("light", "flex")),
                "passengers": passengers,
                "bags": rng.randrange(0, len(passengers) + 1),
                "booked": str(TODAY - timedelta(rng.randrange(5, 60))),
                "payment": card,
                "paid": self.database["flights"][flight]["cabins"]["economy"]["price"] * len(passengers),
                "compensation": 0,
                "state": "booked",
            }

    def add_flight(self, origin: str, destination: str, day: date) -> str:
        rng = self.rng
        price, departs = rng.randrange(60, 300), rng.randrange(6, 20)
        key = f"NG{next(self.flight_numbers)}"
        self.database["flights"][key] = {
            "origin": origin,
            "destination": destination,
            "date": str(day),
            "departs": f"{departs:02}:{rng.randrange(0, 60, 5):02}",
            "arrives": f"{departs + rng.randrange(1, 4):02}:{rng.randrange(0, 60, 5):02}",
            "delay": 0,
            "cancelled": False,
            "cabins": {
                "economy": {"price": price, "seats": rng.randrange(6, 60)},
                "business": {"price": price + rng.randrange(50, 300), "seats": rng.randrange(3, 12)},
            },
        }
        return key

    def other_identity(self, identity: str) -> str:
        return str(date.fromisoformat(identity) + timedelta(1))

    def describe(self, number: str) -> str:
        return f"the booking to {self.flight_of(number)['destination']}"

    def view(self, plan: ConversationPlan, number: str) -> None:
        plan.do("view_flight", flight=plan.do("view_booking", booking=number)["flight"])

    def destination(self, booking: str) -> str:
        return str(self.flight_of(booking)["destination"])

    def flight_of(self, booking: str) -> dict[str, Any]:
        return self.database["flights"][self.database["bookings"][booking]["flight"]]

    def sort_key_of(self, preference: str, cabin: str) -> Callable[[str], tuple[Any, str]]:
        """Return the sort key of flights for a customer who prefers cheap or early ones."""
        flights = self.database["flights"]
        if preference.startswith("cheap"):
            return lambda flight: (flights[flight]["cabins"][cabin]["price"], flight)
        return lambda flight: (flights[flight]["departs"], flight)

    def view_flights(self, plan: ConversationPlan, origin: str, destination: str, day: date) -> None:
        for flight in plan.do("find_flights", origin=origin, destination=destination, date=str(day))["flights"]:
            plan.do("view_flight", flight=flight)

    def maybe_departed(self, booking: str, probability: float) -> None:
        """Move the departure into the past with the given probability."""
        if self.rng.random() < probability:
            self.flight_of(booking)["date"] = str(TODAY - timedelta(self.rng.randrange(1, 9)))
