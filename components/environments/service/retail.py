"""A shop's service desk: orders, variants of products, payments, returns.

Every scenario has a small database of its own: three customers, their orders, the products in them. The policy
is the system prompt. What a customer may have depends on the order's state, on the days since its delivery, on the
membership, on the product, and on whose order it is; so nearly every request has a form that must be declined.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal

from components.environments.service.desk import ServiceDesk, answer
from components.environments.service.retail_policy import LATE, SYSTEM, TODAY, VOUCHER, WINDOW, worth
from components.environments.service.retail_scenarios import generate
from components.environments.tools import Invalid, tool
from components.specs.registered import registered
from components.trajectories.schema import Scenario


@registered("environment.retail")
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
        return generate(type(self), seed, train, heldout)

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
        amount = worth(found)
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
        self._pay(found["customer"], found["payment"], -worth(found))
        self._pay(found["customer"], payment, worth(found))
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
