"""Tools of the airline domain: reservations, flights, baggage, passengers, certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Literal, Unpack

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from components.environments.tau_bench.database import Record
from components.environments.tau_bench.toolset import Toolset, answer
from components.environments.tools import InvalidAction, tool

NOW = "2024-05-15T15:00:00"
"""Time of all conversations, as the policy states it."""
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
"""Ids of the reservations of an episode, in their order."""
NEW_CERTIFICATES = (3221322, 3221323, 3221324)
"""Numbers of the certificates of an episode, in their order."""
BAG, INSURANCE = 50, 30
"""Price of a bag that is not free, and of the insurance of a passenger, in dollars."""
AIRPORTS = {
    "SFO": "San Francisco", "JFK": "New York", "LAX": "Los Angeles", "ORD": "Chicago", "DFW": "Dallas",
    "DEN": "Denver", "SEA": "Seattle", "ATL": "Atlanta", "MIA": "Miami", "BOS": "Boston", "PHX": "Phoenix",
    "IAH": "Houston", "LAS": "Las Vegas", "MCO": "Orlando", "EWR": "Newark", "CLT": "Charlotte",
    "MSP": "Minneapolis", "DTW": "Detroit", "PHL": "Philadelphia", "LGA": "LaGuardia",
}  # fmt: skip
"""City of each airport, in the order of the recorded answer."""

Cabin = Annotated[Literal["basic_economy", "economy", "business"], "cabin of all passengers and flights"]
Reservation = Annotated[str, "reservation id, such as 8JX2WO"]
Day = Annotated[str, "such as 2024-05-20"]
Airport = Annotated[str, "three letters, such as SFO"]
Dollars = Annotated[int | float, Field(allow_inf_nan=False), WithJsonSchema({"type": "number"})]


class Fields:
    """Metadata of a JSON object with these fields, `string` or `number` each.

    Further fields are stored with them in the order of the call, as in the recorded answers.
    """

    def __init__(self, **types: str):
        self.types = types

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Record:
        properties = {name: {"type": kind} for name, kind in self.types.items()}
        return {"type": "object", "properties": properties, "required": list(self.types)}

    def _check(self, value: Record) -> Record:
        for name, kind in self.types.items():
            item = value.get(name)
            if kind == "string" and not isinstance(item, str):
                raise ValueError(f"expected {', '.join(self.types)}; {name} must be text")
            if kind == "number" and (isinstance(item, bool) or not isinstance(item, int | float) or item - item != 0):
                raise ValueError(f"expected {', '.join(self.types)}; {name} must be a finite number")
        return value


FlightChoice = Annotated[Record, Fields(flight_number="string", date="string")]
Passenger = Annotated[Record, Fields(first_name="string", last_name="string", dob="string")]
Payment = Annotated[Record, Fields(payment_id="string", amount="number")]


class Booking(TypedDict):
    user_id: str
    origin: Airport
    destination: Airport
    flight_type: Literal["one_way", "round_trip"]
    cabin: Cabin
    flights: Annotated[list[FlightChoice], "flights of the whole trip, in their order"]
    passengers: list[Passenger]
    payment_methods: Annotated[list[Payment], "payment methods of the user's profile, with the dollars of each"]
    total_baggages: int
    nonfree_baggages: Annotated[int, "bags that are charged"]
    insurance: Literal["yes", "no"]


class AirlineTools(Toolset):
    """Tools of the airline domain."""

    tables = {
        "flights": ("flight_number", "origin", "destination", "dates"),
        "reservations": ("reservation_id", "user_id", "cabin", "flights", "passengers", "payment_history"),
        "users": ("name", "email", "payment_methods", "reservations"),
    }
    nouns = {"flights": "flight", "reservations": "reservation", "users": "user"}
    changing = (
        "book_reservation",
        "cancel_reservation",
        "send_certificate",
        "update_reservation_baggages",
        "update_reservation_flights",
        "update_reservation_passengers",
    )

    # Looking up

    @tool
    def get_user_details(self, user_id: Annotated[str, "such as sara_doe_496"]) -> str:
        """Profile of a user: addresses, payment methods, membership, reservations."""
        return answer(self.find("users", user_id))

    @tool
    def get_reservation_details(self, reservation_id: Reservation) -> str:
        """Flights, passengers, payments, baggage and insurance of a reservation."""
        return answer(self.find("reservations", reservation_id))

    @tool
    def list_all_airports(self) -> str:
        """All airports with their cities."""
        return answer(AIRPORTS)

    @tool
    def search_direct_flight(self, origin: Airport, destination: Airport, date: Day) -> str:
        """Direct flights between two airports on a day that can be booked."""
        return answer(self._departures(date, origin, destination))

    @tool
    def search_onestop_flight(self, origin: Airport, destination: Airport, date: Day) -> str:
        """Pairs of flights with one stop between two airports that can be booked. date: day of the first flight."""
        # As in the recorded answers, seats and prices of the second flight are those of `date`, also if it departs on
        # the next day.
        pairs = []
        for first in self._departures(date, origin):
            arrival, _, later = first["scheduled_arrival_time_est"].partition("+")
            day = _next_day(date) if later else date
            pairs += [
                [{**first, "date": date}, {**second, **self._day(second, date), "date": day}]
                for second in self._departures(day, first["destination"], destination)
                if arrival <= second["scheduled_departure_time_est"]
            ]
        return answer(pairs)

    # Changing

    @tool
    def book_reservation(self, **booking: Unpack[Booking]) -> str:
        """Book a reservation. The payments must add up to the price of flights, bags and insurance."""
        user, count = self.find("users", booking["user_id"]), len(booking["passengers"])
        flights = self._priced(booking["flights"], booking["cabin"], count)
        total = sum(flight["price"] for flight in flights) * count + BAG * booking["nonfree_baggages"]
        total += INSURANCE * count * (booking["insurance"] == "yes")
        for payment in booking["payment_methods"]:
            name = payment["payment_id"]
            method = self.payment_method(booking["user_id"], name, f"payment method {name} not found")
            if method["source"] in ("gift_card", "certificate") and method["amount"] < payment["amount"]:
                raise InvalidAction(f"not enough balance in payment method {name}")
        paid = sum(payment["amount"] for payment in booking["payment_methods"])
        if paid != total:
            raise InvalidAction(f"payment amount does not add up, total price is {total}, but paid {paid}")
        key = next((key for key in NEW_RESERVATIONS if self.database.get("reservations", key) is None), None)
        if key is None:
            raise InvalidAction("no more reservations can be booked in this conversation")
        user = self.database.edit("users", booking["user_id"])
        for payment in booking["payment_methods"]:
            self._spend(user, payment)
        user["reservations"].append(key)
        record = {
            "reservation_id": key, "user_id": booking["user_id"], "origin": booking["origin"],
            "destination": booking["destination"], "flight_type": booking["flight_type"], "cabin": booking["cabin"],
            "flights": flights, "passengers": booking["passengers"], "payment_history": booking["payment_methods"],
            "created_at": NOW, "total_baggages": booking["total_baggages"],
            "nonfree_baggages": booking["nonfree_baggages"], "insurance": booking["insurance"],
        }  # fmt: skip
        self.database.add("reservations", key, record)
        return answer(record)

    @tool
    def cancel_reservation(self, reservation_id: Reservation) -> str:
        """Cancel a whole reservation and refund its payments."""
        self.find("reservations", reservation_id)
        record = self.database.edit("reservations", reservation_id)
        record["payment_history"] += [
            {"payment_id": payment["payment_id"], "amount": -payment["amount"]} for payment in record["payment_history"]
        ]
        record["status"] = "cancelled"
        return answer(record)

    @tool
    def update_reservation_flights(
        self,
        reservation_id: Reservation,
        cabin: Cabin,
        flights: Annotated[list[FlightChoice], "all flights of the new reservation, also those that stay"],
        payment_id: Annotated[str, "gift card or credit card that pays or receives the difference"],
    ) -> str:
        """Change the flights or the cabin of a reservation."""
        record = self.find("reservations", reservation_id)
        count = len(record["passengers"])
        new = self._priced(flights, cabin, count, record)
        before, after = (sum(flight["price"] for flight in group) for group in (record["flights"], new))
        record = self._charge(record, payment_id, (after - before) * count)
        record["flights"] = new
        return answer(record)

    @tool
    def update_reservation_baggages(
        self,
        reservation_id: Reservation,
        total_baggages: int,
        nonfree_baggages: Annotated[int, "bags that are charged, in all"],
        payment_id: Annotated[str, "gift card or credit card that pays"],
    ) -> str:
        """Change the number of checked bags of a reservation."""
        record = self.find("reservations", reservation_id)
        record = self._charge(record, payment_id, BAG * max(0, nonfree_baggages - record["nonfree_baggages"]))
        record |= {"total_baggages": total_baggages, "nonfree_baggages": nonfree_baggages}
        return answer(record)

    @tool
    def update_reservation_passengers(self, reservation_id: Reservation, passengers: list[Passenger]) -> str:
        """Change the details of the passengers of a reservation; their number stays."""
        if len(self.find("reservations", reservation_id)["passengers"]) != len(passengers):
            raise InvalidAction("number of passengers does not match")
        record = self.database.edit("reservations", reservation_id)
        record["passengers"] = passengers
        return answer(record)

    @tool
    def send_certificate(self, user_id: str, amount: Dollars) -> str:
        """Send a certificate to a user, which pays for later bookings. amount: dollars."""
        self.find("users", user_id)
        user = self.database.edit("users", user_id)
        names = (f"certificate_{number}" for number in NEW_CERTIFICATES)
        name = next((name for name in names if name not in user["payment_methods"]), None)
        if name is None:
            raise InvalidAction("no more certificates can be sent in this conversation")
        user["payment_methods"][name] = {"source": "certificate", "amount": amount, "id": name}
        return f"Certificate {name} added to user {user_id} with amount {amount}."

    # Shared by the tools

    def _departures(self, date: str, origin: str, destination: str | None = None) -> list[Record]:
        """Return the flights of a day that can be booked, in the order of the database."""
        departures = []
        for _, flight in self.database.records("flights"):
            day = flight["dates"].get(date, {})
            if flight["origin"] != origin or day.get("status") != "available":
                continue
            if destination is None or flight["destination"] == destination:
                departures.append({**{key: value for key, value in flight.items() if key != "dates"}, **day})
        return departures

    def _day(self, flight: Record, date: str) -> Record:
        """Return the status, seats and prices of a flight on a day; empty if it does not fly."""
        day: Record = self.find("flights", flight["flight_number"])["dates"].get(date, {})
        return day

    def _priced(
        self, choices: Sequence[Record], cabin: str, seats: int, held: Mapping[str, Any] | None = None
    ) -> list[Record]:
        """Return the flights of a reservation with their prices. Raises InvalidAction if a flight cannot be booked.

        held: reservation that is changed; its own flights keep their price if the cabin stays.
        """
        priced = []
        for choice in choices:
            number, date = choice["flight_number"], choice["date"]
            flight = self.database.get("flights", number)
            if flight is None:
                raise InvalidAction(f"flight {number} not found")
            own = _own_flight(held, number, date, cabin)
            day = flight["dates"].get(date, {})
            if own is None and day.get("status") != "available":
                raise InvalidAction(f"flight {number} not available on date {date}")
            if own is None and day["available_seats"][cabin] < seats:
                raise InvalidAction(f"not enough seats on flight {number}")
            price = day["prices"][cabin] if own is None else own["price"]
            route = {"origin": flight["origin"], "destination": flight["destination"]}
            priced.append({**choice, "price": price, **route})
        return priced

    def _charge(self, record: Record, payment_id: str, amount: float) -> Record:
        """Charge a payment method for a change, or refund it; return the reservation to edit."""
        method = self.payment_method(record["user_id"], payment_id)
        if method["source"] == "certificate":
            raise InvalidAction("certificate cannot be used to update reservation")
        if method["source"] == "gift_card" and method["amount"] < amount:
            raise InvalidAction("gift card balance is not enough")
        edited = self.database.edit("reservations", record["reservation_id"])
        if method["source"] == "gift_card":
            self._spend(self.database.edit("users", record["user_id"]), {"payment_id": payment_id, "amount": amount})
        if amount:
            edited["payment_history"].append({"payment_id": payment_id, "amount": amount})
        return edited

    def _spend(self, user: Record, payment: Mapping[str, Any]) -> None:
        """Take a payment from a user's method; a certificate is used up."""
        method = user["payment_methods"][payment["payment_id"]]
        if method["source"] == "gift_card":
            method["amount"] -= payment["amount"]
        elif method["source"] == "certificate":
            del user["payment_methods"][payment["payment_id"]]


def _own_flight(held: Mapping[str, Any] | None, number: str, date: str, cabin: str) -> Record | None:
    """Return the flight of a reservation that a choice keeps; None if it is new."""
    if held is None or held["cabin"] != cabin:
        return None
    own: list[Record] = [item for item in held["flights"] if [item["flight_number"], item["date"]] == [number, date]]
    return own[0] if own else None


def _next_day(day: str) -> str:
    try:
        return str(date.fromisoformat(day) + timedelta(1))
    except (ValueError, OverflowError):
        return day
