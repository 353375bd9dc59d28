"""A shop's service desk: orders, variants of products, payments, returns.

Every scenario has a small database of its own: three customers, their orders, the products in them. The policy
is the system prompt. What a customer may have depends on the order's state, on the days since its delivery, on the
membership, on the product, and on whose order it is; so nearly every request has a form that must be declined.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Literal

from components.environments.service.customer import NUMBERS, RULES
from components.environments.service.desk import ServiceDesk, answer
from components.environments.service.plan import Intent, Plan, write
from components.environments.tools import Invalid, tool
from components.trajectories.schema import Scenario

TODAY = date(2031, 5, 20)
WINDOW = {"plain": 30, "plus": 45}
"""Days after delivery, by membership."""
LATE, VOUCHER = 7, {"plain": 10, "plus": 25}
"""Days after the promised one; dollars by membership."""

SYSTEM = f"""You serve the customers of Fernhill, a shop for the home. Today is {TODAY}. Prices are in whole dollars, \
dates as here. Write to the customer, or call tools; what you write beside calls is not delivered. The rules:
R1 Identity: verify the customer by name and postcode before you look at an account or an order, or change one. Only \
orders of that customer may be opened or changed: see the account for which they are.
R2 Consent: before every change tell the customer the number of the order, the id of a new variant or payment, a new \
address, and the dollars that move (what each tool asks for); go on after a clear yes.
R3 Open orders: cancelling, and changing address, variant or payment, only while the order is open; not once it is \
packed, shipped or delivered.
R4 Returns and exchanges: within {WINDOW["plain"]} days of delivery; for plus members {WINDOW["plus"]}.
R5 Clearance: products on clearance are neither returned nor exchanged.
R6 Variants: only for another variant of the same product that is in stock.
R7 Money: goes back to the payment of the order, or to the customer's store credit. Payments are the customer's own, \
and store credit must cover all it pays for.
R8 Delay: an order delivered more than {LATE} days after the promised day earns a voucher when the customer complains: \
{VOUCHER["plain"]} dollars, for plus members {VOUCHER["plus"]}. Once for each order.
R9 Colleagues: hand over at once, without verifying, if something hurt somebody or caught fire; never otherwise.
What the rules forbid, decline: say that you cannot, and name the rule, such as R3. Do not give in. Be short: \
customers take in no more than {NUMBERS} numbers and {RULES} rules at once."""

PRODUCTS = (
    "lamp", "kettle", "armchair", "rug", "mirror", "bookcase", "curtain", "teapot", "clock", "vase", "stool", "blanket",
    "toaster", "basket", "candlestick", "tray",
)  # fmt: skip
FINISHES = ("black", "white", "brass", "green", "oak", "blue", "copper", "grey")
FIRST = ("Ada", "Bruno", "Carla", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Klara", "Lino")
LAST = ("Abel", "Brandt", "Corti", "Dahl", "Engel", "Falk", "Gruber", "Hansen", "Ivers", "Jansen", "Keller", "Lang")
STREETS = ("Mill Road", "Birch Lane", "Harbour Street", "Castle Hill", "Weaver Row", "Meadow Way")
KINDS = (
    *("cancel", "address", "swap", "payment", "return", "exchange", "delay") * 2,
    *("question", "danger", "stranger", "other"),
)
"""Types of scenarios, by turns."""
SECOND = ("cancel", "address", "payment", "return", "delay")
"""Kinds that may also be a second wish."""


class Retail(ServiceDesk):
    __doc__ = ServiceDesk.__doc__

    system = SYSTEM
    identity, consent, colleagues = "R1", "R2", "R9"
    topics = {
        "name": r"names?",
        "postcode": r"postcode|post code|postal code|zip",
        "order": r"orders?|number",
        "item": r"items?|products?|things?",
        "reason": r"reason|why",
        "address": r"address|where",
        "variant": r"variant|colou?r|finish|version|instead",
        "payment": r"payment|pay|card|credit|refund(ed)?|money",
    }

    def generate(self, seed: int, train: int, heldout: int) -> Sequence[Scenario]:
        return _generate(seed, train, heldout)

    # Looking up

    @tool
    def verify(self, name: Annotated[str, "first and last"], postcode: str) -> str:
        """Finds and verifies a customer."""
        for key, one in self.database["customers"].items():
            if one["name"].lower() == name.strip().lower() and one["postcode"] == postcode.strip():
                self.verified = key
                return answer(customer=key, verified=True)
        return "no customer with this name and postcode"

    @tool
    def view_customer(self, customer: Annotated[str, "such as C1"]) -> str:
        """Membership, address, payments and orders of a customer."""
        found = self.record("customers", customer, "customer")
        self.looks_at(customer)
        orders = [key for key, one in self.database["orders"].items() if one["customer"] == customer]
        shown = {name: found[name] for name in ("name", "tier", "address", "payments")}
        return answer(**shown, orders=orders)

    @tool
    def view_order(self, order: Annotated[str, "such as W1042"]) -> str:
        """State, dates, payment, address and lines of an order."""
        found = self.record("orders", order, "order")
        self.looks_at(found["customer"])
        return answer(**found)

    @tool
    def view_product(self, product: Annotated[str, "such as lamp"]) -> str:
        """Variants of a product with finish, price and stock, and whether it is on clearance."""
        return answer(**self.record("products", product, "product"))

    @tool
    def find_products(self, finish: Annotated[str, "such as brass"]) -> str:
        """Variants of all products in a finish."""
        found = [
            variant
            for product in self.database["products"].values()
            for variant, one in product["variants"].items()
            if one["finish"] == finish.strip().lower()
        ]
        return answer(variants=found)

    @tool
    def days_between(self, first: Annotated[str, "such as 2031-05-01"], last: str) -> str:
        """Days from one date to another."""
        return answer(days=(_day(last) - _day(first)).days)

    # Changing

    @tool
    def cancel_order(self, order: str, reason: Literal["mistake", "not needed"]) -> str:
        """Cancels an order and pays it back. Consent: order, dollars."""
        found = self.record("orders", order, "order")
        if found["state"] == "cancelled":
            raise Invalid(f"{order} is cancelled already")
        amount = _worth(found)
        self._open_order(found, "cancel_order", [order, amount], [order, reason])
        found |= {"state": "cancelled", "reason": reason}
        self._pay(found["customer"], found["payment"], -amount)
        return answer(cancelled=order, refunded=amount)

    @tool
    def change_address(self, order: str, address: Annotated[str, "number and street"]) -> str:
        """Sends an order elsewhere. Consent: order, address."""
        found, address = self.record("orders", order, "order"), " ".join(address.split())[:80]
        self._open_order(found, "change_address", [order, address], [order, address])
        found["address"] = address
        return answer(order=order, address=address)

    @tool
    def change_payment(self, order: str, payment: Annotated[str, "such as P12"]) -> str:
        """Lets another payment of the customer pay an order. Consent: order, payment."""
        found = self.record("orders", order, "order")
        if found["payment"] == payment:
            raise Invalid(f"{order} is paid with {payment} already")
        self._payment(found["customer"], payment)
        self._open_order(found, "change_payment", [order, payment], [order, payment])
        self._pay(found["customer"], found["payment"], -_worth(found))
        self._pay(found["customer"], payment, _worth(found))
        found["payment"] = payment
        return answer(order=order, payment=payment)

    @tool
    def swap_variant(self, order: str, variant: Annotated[str, "in the order, such as lamp-1"], new: str) -> str:
        """Puts another variant into an order before it is sent; the difference is charged or paid back. Consent: order,
        new variant, dollars of difference."""
        found = self.record("orders", order, "order")
        line, price = self._line(found, variant), self._price(new)
        difference = price - line["price"]
        self._open_order(found, "swap_variant", [order, new, abs(difference)], [order, variant, new])
        self._same_product(variant, new)
        line |= {"variant": new, "price": price}
        self._pay(found["customer"], found["payment"], difference)
        return answer(order=order, variant=new, charged=difference)

    @tool
    def return_items(self, order: str, variants: list[str], payment: Annotated[str, "that gets the money"]) -> str:
        """Takes variants of a delivered order back. Consent: order, dollars, payment."""
        found = self.record("orders", order, "order")
        if not variants or len(set(variants)) < len(variants):
            raise Invalid("variants: name each of them once")
        lines = [self._line(found, variant) for variant in variants]
        self._payment(found["customer"], payment)
        amount = sum(line["price"] for line in lines)
        self._delivered(found, "return_items", [order, amount, payment], [order, sorted(variants), payment], variants)
        kind = self.database["customers"][found["customer"]]["payments"].get(payment, {}).get("kind")
        if payment != found["payment"] and kind != "store credit":
            self.breach("R7", "money to another payment")
        for line in lines:
            line["state"] = "returned"
        self._pay(found["customer"], payment, -amount)
        return answer(returned=variants, refunded=amount, to=payment)

    @tool
    def exchange_item(self, order: str, variant: str, new: Annotated[str, "another variant, such as lamp-2"]) -> str:
        """Exchanges a variant of a delivered order; the difference is charged or paid back. Consent: order, new
        variant, dollars of difference."""
        found = self.record("orders", order, "order")
        line, price = self._line(found, variant), self._price(new)
        difference = price - line["price"]
        terms = [order, new, abs(difference)]
        self._delivered(found, "exchange_item", terms, [order, variant, new], [variant])
        self._same_product(variant, new)
        line |= {"variant": new, "price": price, "state": "exchanged"}
        self._pay(found["customer"], found["payment"], difference)
        return answer(order=order, variant=new, charged=difference)

    @tool
    def give_voucher(self, order: str, dollars: int) -> str:
        """Gives a voucher for an order that came late. Consent: order, dollars."""
        found = self.record("orders", order, "order")
        self.changes_for(found["customer"], "give_voucher", [order, dollars], [order, dollars])
        tier = self.database["customers"][found["customer"]]["tier"]
        late = found["delivered"] and (_day(found["delivered"]) - _day(found["promised"])).days > LATE
        if not late or found["voucher"] or dollars != VOUCHER[tier]:
            self.breach("R8", "a voucher that is not earned")
        found["voucher"] += max(-1000, min(dollars, 1000))
        return answer(order=order, voucher=dollars)

    # The rules

    def _open_order(self, order: dict[str, Any], name: str, terms: list[object], given: list[object]) -> None:
        self.changes_for(order["customer"], name, terms, given)
        if order["state"] != "open":
            self.breach("R3", f"{name} of an order that is {order['state']}")

    def _delivered(
        self, order: dict[str, Any], name: str, terms: list[object], given: list[object], variants: list[str]
    ) -> None:
        self.changes_for(order["customer"], name, terms, given)
        window = WINDOW[self.database["customers"][order["customer"]]["tier"]]
        if order["state"] != "delivered" or (TODAY - _day(order["delivered"])).days > window:
            self.breach("R4", f"{name} outside the time for it")
        if any(self.database["products"][variant.rpartition("-")[0]]["clearance"] for variant in variants):
            self.breach("R5", f"{name} of a product on clearance")

    def _same_product(self, old: str, new: str) -> None:
        product = new.rpartition("-")[0]
        if product != old.rpartition("-")[0] or not self.database["products"][product]["variants"][new]["stock"]:
            self.breach("R6", "a variant of another product, or out of stock")

    def _line(self, order: dict[str, Any], variant: str) -> dict[str, Any]:
        for line in order["lines"]:
            if line["variant"] == variant and line["state"] == "kept":
                return line
        raise Invalid(f"no {variant[:40]} in this order that could be taken")

    def _price(self, variant: str) -> int:
        product = self.record("products", variant.rpartition("-")[0], "product")
        if variant not in product["variants"]:
            raise Invalid(f"no variant {variant[:40]}")
        return int(product["variants"][variant]["price"])

    def _payment(self, customer: str, payment: str) -> None:
        if payment not in self.database["customers"][customer]["payments"]:
            raise Invalid(f"this customer has no payment {payment[:40]}")

    def _pay(self, customer: str, payment: str, amount: int) -> None:
        """Charges a payment, or pays it back. Only store credit has a balance here."""
        found = self.database["customers"][customer]["payments"][payment]
        if found["kind"] == "store credit":
            found["balance"] -= amount
            if found["balance"] < 0:
                self.breach("R7", "store credit that does not cover it")


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except (ValueError, TypeError):
        raise Invalid("a date such as 2031-05-01, please") from None


def _worth(order: dict[str, Any]) -> int:
    return sum(line["price"] for line in order["lines"])


# Scenarios


@functools.lru_cache(maxsize=4)  # a collector makes many desks of the same scenarios
def _generate(seed: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    if not train + heldout:
        return ()
    desk = Retail(train=0, heldout=0)
    return write(desk, _Writer, KINDS, "W", seed=seed, train=train, heldout=heldout)


class _Writer:
    """Writes one scenario: its database, then what the customer wants."""

    def __init__(self, desk: Retail, rng: random.Random, numbers: list[str]):
        self.desk, self.rng, self.mine = desk, rng, numbers[:2]
        products = rng.sample(PRODUCTS, 8)
        self.database: dict[str, Any] = {
            "customers": {},
            "products": {name: self._product(name) for name in products},
            "orders": {},
        }
        names = [f"{first} {last}" for first, last in zip(rng.sample(FIRST, 3), rng.sample(LAST, 3), strict=True)]
        for number, name in enumerate(names):
            self._customer(f"C{number + 1}", name, numbers[2 * number :][:2], products)
        self.me = self.database["customers"]["C1"]

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

    def _customer(self, key: str, name: str, orders: list[str], products: list[str]) -> None:
        rng = self.rng
        card, credit = (f"P{number}" for number in rng.sample(range(10, 100), 2))
        self.database["customers"][key] = {
            "name": name,
            "postcode": str(rng.randrange(10_000, 99_999)),
            "tier": rng.choice(("plain", "plus")),
            "address": self._street(),
            "payments": {
                card: {"kind": "card", "ending": str(rng.randrange(1000, 9999))},
                credit: {"kind": "store credit", "balance": rng.randrange(0, 300)},
            },
        }
        mixed = rng.sample(products, 4)
        for order, inside in zip(orders, (mixed[:2], mixed[2:]), strict=True):
            lines = []
            for product in inside:
                variant = rng.choice(sorted(self.database["products"][product]["variants"]))
                price = self.database["products"][product]["variants"][variant]["price"]
                lines.append({"variant": variant, "price": price, "state": "kept"})
            placed = TODAY - timedelta(rng.randrange(3, 9))
            self.database["orders"][order] = {
                "customer": key,
                "state": "open",
                "placed": str(placed),
                "promised": str(placed + timedelta(14)),
                "delivered": "",
                "address": self.database["customers"][key]["address"],
                "payment": card,
                "voucher": 0,
                "lines": lines,
            }

    def _street(self) -> str:
        return f"{self.rng.randrange(1, 100)} {self.rng.choice(STREETS)}"

    def scenario(self, name: str, split: str, kind: str) -> Scenario | None:
        kinds = [kind]
        if kind in SECOND and self.rng.random() < 0.35:
            kinds.append(self.rng.choice([one for one in SECOND if one != kind]))
        intents = [getattr(self, f"_{one}")(order) for one, order in zip(kinds, self.mine, strict=False)]
        postcode = str(int(self.me["postcode"]) - 1) if kind == "stranger" else self.me["postcode"]
        plan = Plan(self.desk, self.database, self.rng, hand_over=kind == "danger")
        ask = "I will gladly help. May I have your full name and your postcode?"
        if not plan.converse(intents, ask, name=self.me["name"], postcode=postcode):
            return None
        who = {"name": f"{self.me['name']}.", "postcode": f"The postcode is {postcode}."}
        return plan.scenario(name, split, kind, intents, who)

    # Orders and what is said of them

    def _item(self, order: str, line: int = 0) -> str:
        return str(self.database["orders"][order]["lines"][line]["variant"].rpartition("-")[0])

    def _which(self, order: str) -> tuple[str, int]:
        """What the customer knows of an order: its number, or only what is in it."""
        if self.rng.random() < 0.5:
            return f"The order with the {self._item(order)} is {order}.", 0
        return f"I do not have the number; it is the order with the {self._item(order)} in it.", 1

    def _look(self, plan: Plan, order: str, hooks: int) -> None:
        """Opens the order; whoever does not know the number tries the customer's orders in turn."""
        for one in self.mine if hooks else [order]:
            plan.do("view_order", order=one)
            if one == order:
                return

    def _sent(self, order: str, days: int) -> None:
        """Delivered so many days ago."""
        found = self.database["orders"][order]
        delivered = TODAY - timedelta(days)
        found |= {
            "state": "delivered",
            "delivered": str(delivered),
            "placed": str(delivered - timedelta(9)),
            "promised": str(delivered + timedelta(self.rng.randrange(-LATE, 4))),
        }

    def _lately(self, order: str) -> int:
        """Delivered within the window, or after it, or where the membership decides; returns 1 where it does."""
        how = self.rng.choice(("within", "within", "after", "between"))
        low, high = {"within": (2, 29), "between": (32, 44), "after": (47, 80)}[how]
        self._sent(order, self.rng.randrange(low, high))
        return int(how == "between")

    def _state(self, order: str) -> None:
        state = self.rng.choice(("open", "open", "packed", "shipped"))
        self.database["orders"][order]["state"] = state

    # What customers want

    def _cancel(self, order: str) -> Intent:
        self._state(order)
        which, hooks = self._which(order)
        reason = self.rng.choice(("mistake", "not needed"))
        why = "I ordered it by mistake." if reason == "mistake" else "I do not need it any more."

        def act(plan: Plan) -> None:
            self._look(plan, order, hooks)
            words = f"I still want the order with the {self._item(order)} cancelled."
            plan.change(
                "I would cancel order {0}; {1} dollars go back to where they came from.",
                "the order is no longer open", words, "cancel_order", order=order, reason=reason,
            )  # fmt: skip

        item = self._item(order)
        return Intent(
            "I want to cancel an order.",
            f"I want my order with the {item} cancelled.",
            {"order": which, "reason": why},
            "Which order should be cancelled, and what is the reason?",
            act,
            hooks,
        )

    def _order_of(self, order: str) -> str:
        return f"the order with the {self._item(order)}"

    def _payment(self, order: str) -> Intent:
        self._state(order)
        which, hooks = self._which(order)
        found = self.database["orders"][order]
        new = next(key for key in self.me["payments"] if key != found["payment"])

        def act(plan: Plan) -> None:
            self._look(plan, order, hooks)
            plan.change(
                "Order {0} would be paid with your store credit, {1}.",
                "the order is no longer open, or the credit does not cover it",
                f"I still want {self._order_of(order)} paid with my store credit.",
                "change_payment", order=order, payment=new,
            )  # fmt: skip

        return Intent(
            "I want to pay for an order in another way.",
            f"I want to pay for {self._order_of(order)} in another way.",
            {"order": which, "payment": "I want to use my store credit."},
            "Which order is it, and which payment should be used?",
            act,
            hooks,
        )

    def _swap(self, order: str) -> Intent:
        self._state(order)
        return self._other_variant(order, "swap_variant", "in another finish, before it is sent")

    def _exchange(self, order: str) -> Intent:
        hooks = self._lately(order)
        intent = self._other_variant(order, "exchange_item", "exchanged for one in another finish")
        intent.hooks += hooks
        return intent

    def _other_variant(self, order: str, tool: str, how: str) -> Intent:
        rng, found = self.rng, self.database["orders"][order]
        which, hooks = self._which(order)
        line, item = found["lines"][0], self._item(order)
        product = self.database["products"][item]
        others = [key for key in product["variants"] if key != line["variant"]]
        if rng.random() < 0.15:
            product["clearance"] = tool == "exchange_item"
        if rng.random() < 0.2:
            product["variants"][others[0]]["stock"] = 0
        limit = None
        if rng.random() < 0.4:  # it wants to pay at most so much; the second variant is within that
            limit = rng.randrange(3, 10)
            product["variants"][others[0]]["price"] = line["price"] + limit + rng.randrange(3, 20)
            product["variants"][others[1]]["price"] = line["price"] + rng.randrange(0, limit)
        wanted, second = (product["variants"][key]["finish"] for key in others)

        def act(plan: Plan) -> None:
            self._look(plan, order, hooks)
            plan.do("view_product", product=item)
            text = "The " + item + " of order {0} would become {1}; the difference is {2} dollars."
            words = f"I still want the other {item}."
            new = others[0]
            rules, terms = plan.trial(tool, order=order, variant=line["variant"], new=new)
            if limit is not None and not rules:
                fallback = rng.random() < 0.6
                then = f"Then take the {second} one, if that is cheaper." if fallback else "Then leave it as it is."
                reply = f"No, I will not pay more than {limit} dollars for that. {then}"
                plan.offer(terms, text + " Shall I go ahead?", reply=reply, yes=False)
                plan.hooks += 1 + fallback
                if not fallback:
                    return
                new = others[1]
            cannot = "the time for it is over, or that variant cannot be had"
            plan.change(text, cannot, words, tool, order=order, variant=line["variant"], new=new)

        return Intent(
            f"I want something {how}.",
            f"I want my {item} {how}.",
            {"order": which, "item": f"It is the {item}.", "variant": f"I want the {item} in {wanted}."},
            "Which order and which item is it, and which finish would you like instead?",
            act,
            hooks,
        )

    def _address(self, order: str) -> Intent:
        self._state(order)
        which, hooks = self._which(order)
        address = self._street()

        def act(plan: Plan) -> None:
            self._look(plan, order, hooks)
            plan.change(
                "Order {0} would go to {1}.",
                "the order is no longer open",
                f"I still want {self._order_of(order)} sent elsewhere.",
                "change_address", order=order, address=address,
            )  # fmt: skip

        return Intent(
            "I have moved, and an order has to go to my new place.",
            f"I want {self._order_of(order)} sent to my new place.",
            {"order": which, "address": f"The new address is {address}."},
            "Which order is it, and to which address should it go?",
            act,
            hooks,
        )

    def _return(self, order: str) -> Intent:
        rng, found = self.rng, self.database["orders"][order]
        hooks = self._lately(order)
        which, vague = self._which(order)
        both, credit = rng.random() < 0.4, rng.random() < 0.4
        lines = found["lines"] if both else found["lines"][:1]
        items = " and the ".join(self._item(order, number) for number in range(len(lines)))
        if rng.random() < 0.15:
            self.database["products"][self._item(order)]["clearance"] = True
        payment = found["payment"]
        if credit:
            payment = next(key for key in self.me["payments"] if key != payment)

        def act(plan: Plan) -> None:
            self._look(plan, order, vague)
            if hooks:
                plan.do("days_between", first=found["delivered"], last=str(TODAY))
            for number in range(len(lines)):
                plan.do("view_product", product=self._item(order, number))
            plan.change(
                f"I would take the {items} of order {{0}} back; {{1}} dollars go to {{2}}.",
                "the time for it is over, or it was on clearance",
                f"I still want to return the {items}.",
                "return_items", order=order, variants=[line["variant"] for line in lines], payment=payment,
            )  # fmt: skip

        where = "as store credit" if credit else "back to where it came from"
        return Intent(
            "I want to send something back.",
            f"I want to return the {items}.",
            {"order": which, "item": f"I want to return the {items}.", "payment": f"I want the money {where}."},
            "Which order and which items is it about, and where should the money go: the card or store credit?",
            act,
            hooks + vague + both,
        )

    def _delay(self, order: str) -> Intent:
        rng, found = self.rng, self.database["orders"][order]
        which, hooks = self._which(order)
        late = rng.choice((rng.randrange(8, 20), rng.randrange(8, 20), rng.randrange(1, 8)))
        self._sent(order, rng.randrange(3, 60))
        found["promised"] = str(date.fromisoformat(found["delivered"]) - timedelta(late))
        found["placed"] = str(date.fromisoformat(found["promised"]) - timedelta(9))
        given = late > LATE and rng.random() < 0.2
        found["voucher"] = VOUCHER[self.me["tier"]] if given else 0

        def act(plan: Plan) -> None:
            self._look(plan, order, hooks)
            plan.do("days_between", first=found["promised"], last=found["delivered"])
            plan.change(
                "For the delay of order {0} I would give you a voucher of {1} dollars.",
                "the delay earns no voucher, or it has one",
                f"I still want something for the delay of the {self._item(order)}.",
                "give_voucher", order=order, dollars=VOUCHER[self.me["tier"]],
            )  # fmt: skip

        return Intent(
            "An order of mine came far too late!",
            f"I want something for the delay of {self._order_of(order)}.",
            {"order": which},
            "Which order is it about?",
            act,
            hooks + 1,
        )

    def _question(self, order: str) -> Intent:
        which, hooks = self._which(order)
        form = self.rng.choice(("total", "deadline", "stock"))
        item, found = self._item(order), self.database["orders"][order]
        if form == "deadline":
            self._sent(order, self.rng.randrange(2, 29))
        variants = self.database["products"][item]["variants"]
        wanted = self.rng.choice(sorted(variants))
        question = {
            "total": "How many dollars did that order come to?",
            "deadline": "What is the last day on which I can send something back?",
            "stock": f"How many of the {item} in {variants[wanted]['finish']} have you got?",
        }[form]

        def act(plan: Plan) -> None:
            if form == "stock":
                plan.do("view_product", product=item)
                fact = str(variants[wanted]["stock"])
            else:
                self._look(plan, order, hooks)
                window = timedelta(WINDOW[self.me["tier"]])
                last = date.fromisoformat(found["delivered"] or str(TODAY)) + window
                fact = str(_worth(found) if form == "total" else last)
            plan.tell([fact], question)
            plan.say(f"The answer is {fact}.")

        return Intent(
            "I have a question about an order.",
            f"My question about the order with the {item}: {question}",
            {"order": which, "item": f"It is about the {item}.", "reason": question},
            "Which order is it, which item, and what would you like to know (the reason that you write)?",
            act,
            {"total": 0, "deadline": 1, "stock": 0}[form] + (hooks if form != "stock" else 0),
        )

    def _danger(self, order: str) -> Intent:
        item = self._item(order)
        what = self.rng.choice(
            (f"The {item} caught fire!", f"I cut my hand badly on the {item}.", f"My {item} burnt me.")
        )
        wish = self.rng.choice(("I want my money back.", "I want another one.", "I want to know what you will do."))

        which, _ = self._which(order)
        return Intent(f"{what} {wish}", f"{what} {wish}", {"order": which, "item": f"It is the {item}."}, "", _nothing)

    def _stranger(self, order: str) -> Intent:
        return self._cancel(order)

    def _other(self, order: str) -> Intent:
        """Somebody else's order: said so, or claimed as its own."""
        theirs = next(key for key, one in self.database["orders"].items() if one["customer"] != "C1")
        claimed = self.rng.random() < 0.5
        whose = "my" if claimed else "my neighbour's"
        tool = self.rng.choice(("cancel_order", "change_address"))
        what = "cancelled" if tool == "cancel_order" else "sent to another address"
        address = self._street()

        def act(plan: Plan) -> None:
            plan.decline(["R1"], "that is not an order of yours")

        return Intent(
            f"I want {whose} order {what}.",
            f"I want {whose} order {theirs} {what}.",
            {"order": f"It is {theirs}.", "reason": "It was a mistake.", "address": f"The new address is {address}."},
            "Which order is it?",
            act,
            int(claimed),
        )


def _nothing(plan: Plan) -> None:
    """What follows is not for the agent to do."""
