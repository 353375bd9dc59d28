"""Service desk of a shop: orders, variants of products, payments, returns.

Every scenario has its own small database: three customers, their orders, and products. The policy is the system prompt.
The permitted requests depend on the state of the order, the days since its delivery, the membership, the product, and
the owner of the order. Nearly every kind of request therefore has cases that must be declined.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal

from components.environments.service.desk import ServiceDesk
from components.environments.service.retail_policy import LATE, SYSTEM, TODAY, VOUCHER, WINDOW, order_total
from components.environments.service.retail_scenarios import RetailScenario
from components.environments.service.scenarios import generate
from components.environments.tools import InvalidAction, to_json, tool
from components.specs.registered import registered
from components.trajectories.schema import Scenario


@registered("environment.retail")
class Retail(ServiceDesk):
    __doc__ = ServiceDesk.__doc__

    system = SYSTEM
    identity, consent, colleagues = "R1", "R2", "R9"
    credit, credit_rule = "store credit", "R7"
    basics = ("R1 R2", "verify view_customer view_order")
    requests = {
        "cancel": ("R3", "cancel_order"),
        "address": ("R3", "change_address"),
        "swap": ("R3 R6 R7", "view_product swap_variant"),
        "payment": ("R3 R7", "change_payment"),
        "return": ("R4 R5 R7", "view_product days_between return_items"),
        "exchange": ("R4 R5 R6 R7", "view_product days_between exchange_item"),
        "delay": ("R8", "days_between give_voucher"),
        "question": ("R4", "view_product find_products"),
        "danger": ("R9", "hand_over"),
        "stranger": ("R3", "cancel_order"),
        "other": ("R3", "cancel_order change_address"),
    }
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

    def generate(self, seed: int, train: int, heldout: int, kinds: tuple[str, ...]) -> Sequence[Scenario]:
        return generate(type(self), RetailScenario, seed, train, heldout, kinds)

    # Looking up

    @tool
    def verify(self, name: Annotated[str, "first and last"], postcode: str) -> str:
        """Finds and verifies a customer."""
        return self.verify_customer(name, "postcode", postcode, "postcode")

    @tool
    def view_customer(self, customer: Annotated[str, "such as C1"]) -> str:
        """Membership, address, payments and orders of a customer."""
        record = self.record("customers", customer, "customer")
        self.check_access(customer)
        orders = [key for key, order in self.database["orders"].items() if order["customer"] == customer]
        profile = {name: record[name] for name in ("name", "tier", "address", "payments")}
        return to_json(**profile, orders=orders)

    @tool
    def view_order(self, order: Annotated[str, "such as W1042"]) -> str:
        """State, dates, payment, address and lines of an order."""
        record = self.record("orders", order, "order")
        self.check_access(record["customer"])
        return to_json(**record)

    @tool
    def view_product(self, product: Annotated[str, "such as lamp"]) -> str:
        """Variants of a product with finish, price and stock, and whether it is on clearance."""
        return to_json(**self.record("products", product, "product"))

    @tool
    def find_products(self, finish: Annotated[str, "such as brass"]) -> str:
        """Variants of all products in a finish."""
        variants = [
            variant
            for product in self.database["products"].values()
            for variant, record in product["variants"].items()
            if record["finish"] == finish.strip().lower()
        ]
        return to_json(variants=variants)

    @tool
    def days_between(self, first: Annotated[str, "such as 2031-05-01"], last: str) -> str:
        """Days from one date to another."""
        return to_json(days=(_day(last) - _day(first)).days)

    # Changing

    @tool
    def cancel_order(self, order: str, reason: Literal["mistake", "not needed"]) -> str:
        """Cancels an order and pays it back. Consent: order, dollars."""
        record = self.record("orders", order, "order")
        if record["state"] == "cancelled":
            raise InvalidAction(f"{order} is cancelled already")
        amount = order_total(record)
        self._change_open(record, "cancel_order", [order, amount], [order, reason])
        record |= {"state": "cancelled", "reason": reason}
        self.pay(record["customer"], record["payment"], -amount)
        return to_json(cancelled=order, refunded=amount)

    @tool
    def change_address(self, order: str, address: Annotated[str, "number and street"]) -> str:
        """Sends an order elsewhere. Consent: order, address."""
        record, address = self.record("orders", order, "order"), " ".join(address.split())[:80]
        self._change_open(record, "change_address", [order, address], [order, address])
        record["address"] = address
        return to_json(order=order, address=address)

    @tool
    def change_payment(self, order: str, payment: Annotated[str, "such as P12"]) -> str:
        """Lets another payment of the customer pay an order. Consent: order, payment."""
        record = self.record("orders", order, "order")
        if record["payment"] == payment:
            raise InvalidAction(f"{order} is paid with {payment} already")
        self.require_payment(record["customer"], payment)
        self._change_open(record, "change_payment", [order, payment], [order, payment])
        self.pay(record["customer"], record["payment"], -order_total(record))
        self.pay(record["customer"], payment, order_total(record))
        record["payment"] = payment
        return to_json(order=order, payment=payment)

    @tool
    def swap_variant(self, order: str, variant: Annotated[str, "in the order, such as lamp-1"], new: str) -> str:
        """Puts another variant into an order before it is sent; the difference is charged or paid back. Consent: order,
        new variant, dollars of difference."""
        record = self.record("orders", order, "order")
        line, price = self._line(record, variant), self._price(new)
        difference = price - line["price"]
        self._change_open(record, "swap_variant", [order, new, abs(difference)], [order, variant, new])
        self._same_product(variant, new)
        line |= {"variant": new, "price": price}
        self.pay(record["customer"], record["payment"], difference)
        return to_json(order=order, variant=new, charged=difference)

    @tool
    def return_items(self, order: str, variants: list[str], payment: Annotated[str, "that gets the money"]) -> str:
        """Takes variants of a delivered order back. Consent: order, dollars, payment."""
        record = self.record("orders", order, "order")
        if not variants or len(set(variants)) < len(variants):
            raise InvalidAction("variants: name each of them once")
        lines = [self._line(record, variant) for variant in variants]
        self.require_payment(record["customer"], payment)
        amount = sum(line["price"] for line in lines)
        self._change_delivered(
            record, "return_items", [order, amount, payment], [order, sorted(variants), payment], variants
        )
        kind = self.database["customers"][record["customer"]]["payments"].get(payment, {}).get("kind")
        if payment != record["payment"] and kind != "store credit":
            self.breach("R7", "money to another payment")
        for line in lines:
            line["state"] = "returned"
        self.pay(record["customer"], payment, -amount)
        return to_json(returned=variants, refunded=amount, to=payment)

    @tool
    def exchange_item(self, order: str, variant: str, new: Annotated[str, "another variant, such as lamp-2"]) -> str:
        """Exchanges a variant of a delivered order; the difference is charged or paid back. Consent: order, new
        variant, dollars of difference."""
        record = self.record("orders", order, "order")
        line, price = self._line(record, variant), self._price(new)
        difference = price - line["price"]
        terms = [order, new, abs(difference)]
        self._change_delivered(record, "exchange_item", terms, [order, variant, new], [variant])
        self._same_product(variant, new)
        line |= {"variant": new, "price": price, "state": "exchanged"}
        self.pay(record["customer"], record["payment"], difference)
        return to_json(order=order, variant=new, charged=difference)

    @tool
    def give_voucher(self, order: str, dollars: int) -> str:
        """Gives a voucher for an order that came late. Consent: order, dollars."""
        record = self.record("orders", order, "order")
        self.record_change(record["customer"], "give_voucher", [order, dollars], [order, dollars])
        tier = self.database["customers"][record["customer"]]["tier"]
        late = record["delivered"] and (_day(record["delivered"]) - _day(record["promised"])).days > LATE
        if not late or record["voucher"] or dollars != VOUCHER[tier]:
            self.breach("R8", "a voucher that is not earned")
        record["voucher"] += max(-1000, min(dollars, 1000))
        return to_json(order=order, voucher=dollars)

    # The rules

    def _change_open(self, order: dict[str, Any], name: str, terms: list[object], arguments: list[object]) -> None:
        self.record_change(order["customer"], name, terms, arguments)
        if order["state"] != "open":
            self.breach("R3", f"{name} of an order that is {order['state']}")

    def _change_delivered(
        self, order: dict[str, Any], name: str, terms: list[object], arguments: list[object], variants: list[str]
    ) -> None:
        self.record_change(order["customer"], name, terms, arguments)
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
        raise InvalidAction(f"no {variant[:40]} in this order that could be taken")

    def _price(self, variant: str) -> int:
        product = self.record("products", variant.rpartition("-")[0], "product")
        if variant not in product["variants"]:
            raise InvalidAction(f"no variant {variant[:40]}")
        return int(product["variants"][variant]["price"])


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except (ValueError, TypeError):
        raise InvalidAction("a date such as 2031-05-01, please") from None
