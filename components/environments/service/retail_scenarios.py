"""Scenarios of the shop desk: a database, the requests of the customer, and the correct conversation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

from components.environments.service.plan import Change, ConversationPlan, Intent
from components.environments.service.retail_policy import LATE, TODAY, VOUCHER, WINDOW, order_total
from components.environments.service.scenarios import ScenarioWriter

PRODUCTS = (
    "lamp", "kettle", "armchair", "rug", "mirror", "bookcase", "curtain", "teapot", "clock", "vase", "stool", "blanket",
    "toaster", "basket", "candlestick", "tray",
)  # fmt: skip
FINISHES = ("black", "white", "brass", "green", "oak", "blue", "copper", "grey")
FIRST = ("Ada", "Bruno", "Carla", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Klara", "Lino")
LAST = ("Abel", "Brandt", "Corti", "Dahl", "Engel", "Falk", "Gruber", "Hansen", "Ivers", "Jansen", "Keller", "Lang")
STREETS = ("Mill Road", "Birch Lane", "Harbour Street", "Castle Hill", "Weaver Row", "Meadow Way")


class RetailScenario(ScenarioWriter):
    """Scenario of the shop desk; its records are orders."""

    letter = "W"
    first_names, last_names = FIRST, LAST
    kinds = (
        *("cancel", "address", "swap", "payment", "return", "exchange", "delay") * 2,
        *("question", "danger", "stranger", "other"),
    )
    second_kinds = ("cancel", "address", "payment", "return", "delay")
    colleague_kind = "danger"
    ask = "I will gladly help. May I have your full name and your postcode?"
    balances = range(300)
    identity = ("postcode", "postcode", "The postcode is {}.")
    suffix = " in it"

    def draw_database(self, numbers: Sequence[str]) -> dict[str, Any]:
        products = self.rng.sample(PRODUCTS, 8)
        return {"customers": {}, "products": {name: self._product(name) for name in products}, "orders": {}}

    def draw_profile(self) -> dict[str, Any]:
        postcode = str(self.rng.randrange(10_000, 99_999))
        return {"postcode": postcode, "tier": self.rng.choice(("plain", "plus")), "address": self._street()}

    def draw_records(self, customer: str, numbers: Sequence[str], card: str) -> None:
        rng, products = self.rng, self.database["products"]
        mixed = rng.sample(list(products), 4)
        for order, contents in zip(numbers, (mixed[:2], mixed[2:]), strict=True):
            lines = []
            for product in contents:
                variant = rng.choice(sorted(products[product]["variants"]))
                price = products[product]["variants"][variant]["price"]
                lines.append({"variant": variant, "price": price, "state": "kept"})
            placed = TODAY - timedelta(rng.randrange(3, 9))
            self.database["orders"][order] = {
                "customer": customer,
                "state": "open",
                "placed": str(placed),
                "promised": str(placed + timedelta(14)),
                "delivered": "",
                "address": self.database["customers"][customer]["address"],
                "payment": card,
                "voucher": 0,
                "lines": lines,
            }

    def _product(self, name: str) -> dict[str, Any]:
        base = self.rng.randrange(20, 90)
        variants = {
            f"{name}-{number + 1}": {
                "finish": finish,
                "price": base + self.rng.randrange(0, 40),
                "stock": self.rng.randrange(1, 9),
            }
            for number, finish in enumerate(self.rng.sample(FINISHES, 3))
        }
        return {"name": name, "clearance": False, "variants": variants}

    def _street(self) -> str:
        return f"{self.rng.randrange(1, 100)} {self.rng.choice(STREETS)}"

    def other_identity(self, identity: str) -> str:
        return str(int(identity) - 1)

    def describe(self, number: str) -> str:
        return f"the order with the {self._item(number)}"

    def view(self, plan: ConversationPlan, number: str) -> None:
        plan.do("view_order", order=number)

    def _item(self, order: str, line: int = 0) -> str:
        return str(self.database["orders"][order]["lines"][line]["variant"].rpartition("-")[0])

    def _deliver(self, order: str, days: int) -> None:
        """Mark an order as delivered the given number of days ago."""
        record = self.database["orders"][order]
        delivered = TODAY - timedelta(days)
        record |= {
            "state": "delivered",
            "delivered": str(delivered),
            "placed": str(delivered - timedelta(9)),
            "promised": str(delivered + timedelta(self.rng.randrange(-LATE, 4))),
        }

    def _deliver_recently(self, order: str) -> int:
        """Mark an order as delivered within the return window, after it, or between the windows of the two memberships.

        Return 1 in the last case, where the membership decides, otherwise 0.
        """
        timing = self.rng.choice(("within", "within", "after", "between"))
        low, high = {"within": (2, 29), "between": (32, 44), "after": (47, 80)}[timing]
        self._deliver(order, self.rng.randrange(low, high))
        return int(timing == "between")

    def _state(self, order: str) -> None:
        state = self.rng.choice(("open", "open", "packed", "shipped"))
        self.database["orders"][order]["state"] = state

    # Requests of customers

    def _cancel(self, order: str) -> Intent:
        self._state(order)
        which, complications = self.which(order)
        reason = self.rng.choice(("mistake", "not needed"))
        why = "I ordered it by mistake." if reason == "mistake" else "I do not need it any more."

        change = Change(
            "I would cancel order {0}; {1} dollars go back to where they came from.",
            "the order is no longer open",
            f"I still want {self.describe(order)} cancelled.",
            "cancel_order",
            {"order": order, "reason": reason},
        )
        return Intent(
            "I want to cancel an order.",
            f"I want my order with the {self._item(order)} cancelled.",
            {"order": which, "reason": why},
            "Which order should be cancelled, and what is the reason?",
            self.act(order, complications, change),
            complications,
        )

    def _payment(self, order: str) -> Intent:
        self._state(order)
        which, complications = self.which(order)
        record = self.database["orders"][order]
        new = next(key for key in self.customer["payments"] if key != record["payment"])

        change = Change(
            "Order {0} would be paid with your store credit, {1}.",
            "the order is no longer open, or the credit does not cover it",
            f"I still want {self.describe(order)} paid with my store credit.",
            "change_payment",
            {"order": order, "payment": new},
        )
        return Intent(
            "I want to pay for an order in another way.",
            f"I want to pay for {self.describe(order)} in another way.",
            {"order": which, "payment": "I want to use my store credit."},
            "Which order is it, and which payment should be used?",
            self.act(order, complications, change),
            complications,
        )

    def _swap(self, order: str) -> Intent:
        self._state(order)
        return self._other_variant(order, "swap_variant", "in another finish, before it is sent")

    def _exchange(self, order: str) -> Intent:
        complications = self._deliver_recently(order)
        intent = self._other_variant(order, "exchange_item", "exchanged for one in another finish")
        intent.complications += complications
        return intent

    def _other_variant(self, order: str, tool: str, request: str) -> Intent:
        rng, record = self.rng, self.database["orders"][order]
        which, complications = self.which(order)
        line, item = record["lines"][0], self._item(order)
        product = self.database["products"][item]
        others = [key for key in product["variants"] if key != line["variant"]]
        if rng.random() < 0.15:
            product["clearance"] = tool == "exchange_item"
        if rng.random() < 0.2:
            product["variants"][others[0]]["stock"] = 0
        limit = None
        if rng.random() < 0.4:  # a price limit of the customer; the second variant is within it
            limit = rng.randrange(3, 10)
            product["variants"][others[0]]["price"] = line["price"] + limit + rng.randrange(3, 20)
            product["variants"][others[1]]["price"] = line["price"] + rng.randrange(0, limit)
        finish, second = (product["variants"][key]["finish"] for key in others)
        changes = [
            Change(
                f"The {item} of order {{0}} would become {{1}}; the difference is {{2}} dollars.",
                "the time for it is over, or that variant cannot be had",
                f"I still want the other {item}.",
                tool,
                {"order": order, "variant": line["variant"], "new": new},
            )
            for new in others
        ]

        def act(plan: ConversationPlan) -> None:
            self.open(plan, order, complications)
            plan.do("view_product", product=item)
            rules, terms = plan.trial(changes[0])
            if limit is None or rules:
                return plan.change(changes[0])
            fallback = rng.random() < 0.6
            then = f"Then take the {second} one, if that is cheaper." if fallback else "Then leave it as it is."
            plan.reject(changes[0], terms, f"No, I will not pay more than {limit} dollars for that. {then}")
            if fallback:
                plan.complications += 1
                plan.change(changes[1])

        return Intent(
            f"I want something {request}.",
            f"I want my {item} {request}.",
            {"order": which, "item": f"It is the {item}.", "variant": f"I want the {item} in {finish}."},
            "Which order and which item is it, and which finish would you like instead?",
            act,
            complications,
        )

    def _address(self, order: str) -> Intent:
        self._state(order)
        which, complications = self.which(order)
        address = self._street()

        change = Change(
            "Order {0} would go to {1}.",
            "the order is no longer open",
            f"I still want {self.describe(order)} sent elsewhere.",
            "change_address",
            {"order": order, "address": address},
        )
        return Intent(
            "I have moved, and an order has to go to my new place.",
            f"I want {self.describe(order)} sent to my new place.",
            {"order": which, "address": f"The new address is {address}."},
            "Which order is it, and to which address should it go?",
            self.act(order, complications, change),
            complications,
        )

    def _return(self, order: str) -> Intent:
        rng, record = self.rng, self.database["orders"][order]
        complications = self._deliver_recently(order)
        which, vague = self.which(order)
        both, credit = rng.random() < 0.4, rng.random() < 0.4
        lines = record["lines"] if both else record["lines"][:1]
        items = " and the ".join(self._item(order, number) for number in range(len(lines)))
        if rng.random() < 0.15:
            self.database["products"][self._item(order)]["clearance"] = True
        payment = record["payment"]
        if credit:
            payment = next(key for key in self.customer["payments"] if key != payment)

        change = Change(
            f"I would take the {items} of order {{0}} back; {{1}} dollars go to {{2}}.",
            "the time for it is over, or it was on clearance",
            f"I still want to return the {items}.",
            "return_items",
            {"order": order, "variants": [line["variant"] for line in lines], "payment": payment},
        )

        def act(plan: ConversationPlan) -> None:
            self.open(plan, order, vague)
            if complications:
                plan.do("days_between", first=record["delivered"], last=str(TODAY))
            for number in range(len(lines)):
                plan.do("view_product", product=self._item(order, number))
            plan.change(change)

        where = "as store credit" if credit else "back to where it came from"
        return Intent(
            "I want to send something back.",
            f"I want to return the {items}.",
            {"order": which, "item": f"I want to return the {items}.", "payment": f"I want the money {where}."},
            "Which order and which items is it about, and where should the money go: the card or store credit?",
            act,
            complications + vague + both,
        )

    def _delay(self, order: str) -> Intent:
        rng, record = self.rng, self.database["orders"][order]
        which, complications = self.which(order)
        late = rng.choice((rng.randrange(8, 20), rng.randrange(8, 20), rng.randrange(1, 8)))
        self._deliver(order, rng.randrange(3, 60))
        record["promised"] = str(date.fromisoformat(record["delivered"]) - timedelta(late))
        record["placed"] = str(date.fromisoformat(record["promised"]) - timedelta(9))
        has_voucher = late > LATE and rng.random() < 0.2
        record["voucher"] = VOUCHER[self.customer["tier"]] if has_voucher else 0

        change = Change(
            "For the delay of order {0} I would give you a voucher of {1} dollars.",
            "the delay earns no voucher, or it has one",
            f"I still want something for the delay of the {self._item(order)}.",
            "give_voucher",
            {"order": order, "dollars": VOUCHER[self.customer["tier"]]},
        )

        def act(plan: ConversationPlan) -> None:
            self.open(plan, order, complications)
            plan.do("days_between", first=record["promised"], last=record["delivered"])
            plan.change(change)

        return Intent(
            "An order of mine came far too late!",
            f"I want something for the delay of {self.describe(order)}.",
            {"order": which},
            "Which order is it about?",
            act,
            complications + 1,
        )

    def _question(self, order: str) -> Intent:
        which, complications = self.which(order)
        form = self.rng.choice(("total", "deadline", "stock"))
        item, record = self._item(order), self.database["orders"][order]
        if form == "deadline":
            self._deliver(order, self.rng.randrange(2, 29))
        variants = self.database["products"][item]["variants"]
        wanted = self.rng.choice(sorted(variants))
        question = {
            "total": "How many dollars did that order come to?",
            "deadline": "What is the last day on which I can send something back?",
            "stock": f"How many of the {item} in {variants[wanted]['finish']} have you got?",
        }[form]

        def act(plan: ConversationPlan) -> None:
            if form == "stock":
                plan.do("view_product", product=item)
                fact = str(variants[wanted]["stock"])
            else:
                self.open(plan, order, complications)
                window = timedelta(WINDOW[self.customer["tier"]])
                last = date.fromisoformat(record["delivered"] or str(TODAY)) + window
                fact = str(order_total(record) if form == "total" else last)
            plan.tell([fact], question)
            plan.say(f"The answer is {fact}.")

        return Intent(
            "I have a question about an order.",
            f"My question about the order with the {item}: {question}",
            {"order": which, "item": f"It is about the {item}.", "reason": question},
            "Which order is it, which item, and what would you like to know (the reason that you write)?",
            act,
            {"total": 0, "deadline": 1, "stock": 0}[form] + (complications if form != "stock" else 0),
        )

    def _danger(self, order: str) -> Intent:
        item = self._item(order)
        change = self.rng.choice(
            (f"The {item} caught fire!", f"I cut my hand badly on the {item}.", f"My {item} burnt me.")
        )
        wish = self.rng.choice(("I want my money back.", "I want another one.", "I want to know what you will do."))

        which, _ = self.which(order)
        return Intent(f"{change} {wish}", f"{change} {wish}", {"order": which, "item": f"It is the {item}."}, "")

    def _other(self, order: str) -> Intent:
        """Return a request about an order of another customer, which the customer admits or claims as its own."""
        foreign = next(key for key, order in self.database["orders"].items() if order["customer"] != "C1")
        claimed = self.rng.random() < 0.5
        whose = "my" if claimed else "my neighbour's"
        tool = self.rng.choice(("cancel_order", "change_address"))
        change = "cancelled" if tool == "cancel_order" else "sent to another address"
        address = self._street()

        def act(plan: ConversationPlan) -> None:
            plan.decline(["R1"], "that is not an order of yours")

        return Intent(
            f"I want {whose} order {change}.",
            f"I want {whose} order {foreign} {change}.",
            {"order": f"It is {foreign}.", "reason": "It was a mistake.", "address": f"The new address is {address}."},
            "Which order is it?",
            act,
            int(claimed),
        )
