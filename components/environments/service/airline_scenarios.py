"""Scenarios of the airline desk: the requests of the customer and the correct conversation."""

from __future__ import annotations

from datetime import timedelta

from components.environments.service.airline_bookings import FIRST, AirlineBookings
from components.environments.service.airline_policy import (
    BAGS_EACH,
    DELAY,
    FEE,
    FOR_CANCELLED,
    FOR_DELAY,
    FREE,
    TODAY,
    distance,
)
from components.environments.service.plan import Change, ConversationPlan, Intent


class AirlineScenario(AirlineBookings):
    """Writer of a scenario of the airline desk."""

    kinds = (
        *("cancel", "move", "cabin", "bags", "name", "compensation", "book") * 2,
        *("question", "child", "stranger", "other"),
    )
    second_kinds = ("cancel", "cabin", "bags", "name", "compensation")
    colleague_kind = "child"

    def _cancel(self, booking: str) -> Intent:
        rng, record = self.rng, self.database["bookings"][booking]
        case = rng.choice(("flex", "light", "light", "fresh", "cancelled", "gone"))
        record["fare"] = "flex" if case in ("flex", "gone") else "light"
        if case == "fresh":
            record["booked"] = str(TODAY - timedelta(rng.randrange(0, 2)))
        self.flight_of(booking)["cancelled"] = case == "cancelled"
        self.maybe_departed(booking, float(case == "gone"))
        which, complications = self.which(booking)

        change = Change(
            "I would cancel booking {0}; {1} dollars go back to where they came from.",
            "this fare cannot be cancelled any more, or it has departed",
            f"I still want the booking to {self.destination(booking)} cancelled.",
            "cancel_booking",
            {"booking": booking},
        )
        return Intent(
            "I want to cancel a trip.",
            f"I want the booking to {self.destination(booking)} cancelled.",
            {"booking": which},
            "Which booking is it about?",
            self.act(booking, complications, change),
            complications + (case in ("fresh", "cancelled")),
        )

    def _move(self, booking: str) -> Intent:
        rng, record = self.rng, self.database["bookings"][booking]
        self.maybe_departed(booking, 0.15)
        which, complications = self.which(booking)
        origin, destination = (self.flight_of(booking)[name] for name in ("origin", "destination"))
        day = TODAY + timedelta(rng.randrange(5, 40))
        flights = self.database["flights"]
        to = destination if rng.random() < 0.85 else next(city for city in self.cities[1:] if city != destination)
        options = [self.add_flight(origin, to, day) for _ in range(2)]
        preference = rng.choice(("cheaper", "earlier"))
        sort_key = self.sort_key_of(preference, "economy")
        options.sort(key=sort_key)
        if rng.random() < 0.2:  # the first flight has no seats, so only the other is possible
            flights[options[0]]["cabins"]["economy"]["seats"] = len(record["passengers"]) - 1
            options.reverse()
        limit = rng.randrange(10, 40) if rng.random() < 0.35 else None
        change = Change(
            "Booking {0} would be moved to flight {1}; that costs {2} dollars in all.",
            "it has departed, or goes between other cities",
            f"I still want another flight instead of the one to {destination}.",
            "change_flight",
            {"booking": booking, "flight": options[0]},
        )

        def act(plan: ConversationPlan) -> None:
            self.open(plan, booking, complications)
            self.view_flights(plan, origin, to, day)
            rules, terms = plan.trial(change)
            if limit is not None and not rules and int(terms[2]) > limit:
                reply = f"No, I will not pay more than {limit} dollars for that. Then leave it as it is."
                plan.reject(change, terms, reply)
            else:
                plan.change(change)

        return Intent(
            "I want to take another flight.",
            f"I want another flight instead of the one to {destination}.",
            {
                "booking": which,
                "date": f"I want to fly on {day}.",
                "route": f"From {origin} to {to}.",
                "flight": f"The {preference} one, if there are two.",
            },
            "Which booking is it about, to which city and on which day would you fly, and which flight do you prefer?",
            act,
            complications + 1,
        )

    def _cabin(self, booking: str) -> Intent:
        rng, record = self.rng, self.database["bookings"][booking]
        self.maybe_departed(booking, 0.15)
        which, complications = self.which(booking)
        cabins = self.flight_of(booking)["cabins"]
        case = rng.choice(("up", "up", "up", "full", "down"))
        if case == "full":
            cabins["business"]["seats"] = len(record["passengers"]) - 1
        if case == "down":
            record |= {"cabin": "business", "paid": cabins["business"]["price"] * len(record["passengers"])}
        target = "economy" if case == "down" else "business"
        refuses = rng.random() < 0.3
        change = Change(
            "All passengers of booking {0} would fly in {1}; that costs {2} dollars in all.",
            "there are not enough seats, it has departed, or it leads to economy",
            f"I still want to fly to {self.destination(booking)} in {target}.",
            "change_cabin",
            {"booking": booking, "cabin": target},
        )

        def act(plan: ConversationPlan) -> None:
            self.open(plan, booking, complications)
            rules, terms = plan.trial(change)
            if refuses and not rules:
                plan.reject(change, terms, f"No, {terms[2]} dollars is too much for me. Then leave it as it is.")
            else:
                plan.change(change)

        return Intent(
            "I want to sit somewhere else in the plane.",
            f"I want to fly to {self.destination(booking)} in another cabin.",
            {"booking": which, "cabin": f"We all want to fly in {target}."},
            "Which booking is it about, and which cabin would you like?",
            act,
            complications,
        )

    def _bags(self, booking: str) -> Intent:
        rng, record = self.rng, self.database["bookings"][booking]
        self.maybe_departed(booking, 0.1)
        which, complications = self.which(booking)
        room = BAGS_EACH * len(record["passengers"]) - record["bags"]
        more = room + rng.randrange(1, 3) if rng.random() < 0.25 else rng.randrange(1, room + 1)

        change = Change(
            f"Booking {{0}} would get {more} more bags; that costs {{1}} dollars.",
            "these are too many bags, or it has departed",
            f"I still want more bags on the way to {self.destination(booking)}.",
            "add_bags",
            {"booking": booking, "bags": more},
        )
        return Intent(
            "I have to take more along than I thought.",
            f"I want more bags on the way to {self.destination(booking)}.",
            {"booking": which, "bags": f"{more} more in all, please."},
            "Which booking is it about, and how many more bags will there be in all?",
            self.act(booking, complications, change),
            complications + 1,
        )

    def _name(self, booking: str) -> Intent:
        rng, record = self.rng, self.database["bookings"][booking]
        self.maybe_departed(booking, 0.15)
        which, complications = self.which(booking)
        passenger = rng.choice(record["passengers"])
        at = rng.randrange(1, len(passenger.split()[0]))
        right = passenger[:at] + rng.choice("aeiou") + passenger[at:]
        if rng.random() < 0.35:
            right = f"{rng.choice([name for name in FIRST if distance(name, passenger.split()[0]) > 3])} Quint"

        change = Change(
            "In booking {0} the name would become {1}.",
            "that is more than a misspelling, or it has departed",
            f"I still want a name changed for the flight to {self.destination(booking)}.",
            "correct_name",
            {"booking": booking, "wrong": passenger, "right": right},
        )
        return Intent(
            "A name in a booking of mine is wrong.",
            f"I want a name changed for the flight to {self.destination(booking)}.",
            {"booking": which, "passengers": f"It says {passenger}, and should say {right}."},
            "Which booking is it about, whom does it name, and how should that be spelled?",
            self.act(booking, complications, change),
            complications,
        )

    def _compensation(self, booking: str) -> Intent:
        rng, record, flight = self.rng, self.database["bookings"][booking], self.flight_of(booking)
        which, complications = self.which(booking)
        flight["date"] = str(TODAY - timedelta(rng.randrange(1, 30)))
        case = rng.choice(("late", "late", "cancelled", "early"))
        flight["cancelled"] = case == "cancelled"
        flight["delay"] = {"late": rng.randrange(DELAY, 12), "cancelled": 0, "early": rng.randrange(1, DELAY)}[case]
        if rng.random() < 0.15:
            record["compensation"] = FOR_DELAY * len(record["passengers"])
        dollars = (FOR_CANCELLED if case == "cancelled" else FOR_DELAY) * len(record["passengers"])

        change = Change(
            "For booking {0} I would give you {1} dollars in all.",
            "that flight and fare earn no compensation, or it was paid",
            f"I still want something for the flight to {self.destination(booking)}.",
            "compensate",
            {"booking": booking, "dollars": dollars},
        )
        return Intent(
            "My flight was a disaster, and I want something for it!",
            f"I want something for the flight to {self.destination(booking)}.",
            {"booking": which, "reason": "It was cancelled." if case == "cancelled" else "It was hours late."},
            "Which booking is it about, and what is the reason?",
            self.act(booking, complications, change),
            complications + 1,
        )

    def _book(self, booking: str) -> Intent:
        rng = self.rng
        origin, destination = rng.sample(self.cities, 2)
        day = TODAY + timedelta(rng.randrange(2, 60))
        flights = self.database["flights"]
        options = [self.add_flight(origin, destination, day) for _ in range(rng.randrange(2, 4))]
        preference, cabin = rng.choice(("cheapest", "earliest")), rng.choice(("economy", "economy", "business"))
        sort_key = self.sort_key_of(preference, cabin)
        names = [self.customer["name"], *[f"{first} Quint" for first in rng.sample(FIRST, rng.randrange(0, 3))]]
        full = rng.random() < 0.25
        options.sort(key=sort_key)
        if full:
            flights[options[0]]["cabins"][cabin]["seats"] = len(names) - 1
        if len({sort_key(flight)[0] for flight in options}) < len(options):
            # A tie: make the second flight expensive and late.
            flights[options[1]]["departs"], flights[options[1]]["cabins"][cabin]["price"] = "22:30", 690
        best = next(
            key for key in sorted(options, key=sort_key) if flights[key]["cabins"][cabin]["seats"] >= len(names)
        )
        card, credit = self.customer["payments"]
        kind, payment = rng.choice((("my card", card), ("my card", card), ("my travel credit", credit)))

        change = Change(
            "I would book flight {0}; that costs {1} dollars in all.",
            "the travel credit does not cover it",
            f"I still want to fly to {destination}.",
            "book",
            {"flight": best, "cabin": cabin, "passengers": names, "payment": payment},
        )

        def act(plan: ConversationPlan) -> None:
            self.view_flights(plan, origin, destination, day)
            plan.change(change)

        return Intent(
            "I want to book a flight.",
            f"I want to book a flight to {destination}.",
            {
                "route": f"From {origin} to {destination}.",
                "date": f"On {day}.",
                "flight": f"The {preference} one that has seats for all of us.",
                "cabin": f"In {cabin}.",
                "passengers": f"The passengers are {', '.join(names)}.",
                "payment": f"I want to pay with {kind}.",
            },
            "From where to which city and on which date would you fly, which flight do you prefer, in which cabin, who "
            "are the passengers, and how will you pay?",
            act,
            full + (len(names) > 1),
        )

    def _question(self, booking: str) -> Intent:
        rng, record = self.rng, self.database["bookings"][booking]
        which, complications = self.which(booking)
        form = rng.choice(("arrives", "bags", "fee"))
        if form == "bags" and rng.random() < 0.5:
            record["cabin"] = "business"
        question = {
            "arrives": "At what time do we arrive?",
            "bags": "How many bags can all of us together take for free?",
            "fee": "What are the fees in all for taking another flight, if it has the same price?",
        }[form]
        count, level = len(record["passengers"]), self.customer["level"]
        fact = {
            "arrives": self.flight_of(booking)["arrives"],
            "bags": str((FREE[level] + (record["cabin"] == "business")) * count),
            "fee": str(FEE * count if record["fare"] == "light" and level != "gold" else 0),
        }[form]
        words = [fact, *(["no", "none", "nothing", "free"] if fact == "0" and form == "fee" else [])]

        def act(plan: ConversationPlan) -> None:
            self.open(plan, booking, complications)
            plan.tell(words, question)
            plan.say(f"The answer is {fact}.")

        return Intent(
            "I have a question about a booking.",
            f"My question about the booking to {self.destination(booking)}: {question}",
            {"booking": which, "reason": question},
            "Which booking is it about, and what would you like to know?",
            act,
            complications + {"arrives": 0, "bags": 2, "fee": 2}[form],
        )

    def _child(self, booking: str) -> Intent:
        change = self.rng.choice(
            (
                "My son, who is seven, is to fly to his grandmother on his own.",
                "My daughter is nine and will fly alone this time.",
                "My husband fell ill on the plane today and had to be carried out.",
            )
        )
        wish = self.rng.choice(("What can you do?", "I want to book that.", "I want my money back."))
        which, _ = self.which(booking)
        return Intent(f"{change} {wish}", f"{change} {wish}", {"booking": which}, "")

    def _other(self, booking: str) -> Intent:
        """Return a request about a booking of another customer, which the customer admits or claims as its own."""
        foreign = next(key for key, booking in self.database["bookings"].items() if booking["customer"] != "C1")
        claimed = self.rng.random() < 0.5
        whose = "my" if claimed else "my brother's"
        change = self.rng.choice(("cancelled", "moved to another day"))

        def act(plan: ConversationPlan) -> None:
            plan.decline(["A1"], "that is not a booking of yours")

        return Intent(
            f"I want {whose} trip {change}.",
            f"I want {whose} booking {foreign} {change}.",
            {"booking": f"It is {foreign}.", "date": "Any day of next week."},
            "Which booking is it about?",
            act,
            int(claimed),
        )
