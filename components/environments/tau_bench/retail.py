"""Tools of the retail domain: orders, products and profiles of users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from components.environments.tau_bench.database import Record
from components.environments.tau_bench.toolset import Toolset, answer
from components.environments.tools import InvalidAction, tool

Order = Annotated[str, "order id with the hash sign, such as #W0000000"]
Items = Annotated[list[str], "item ids, each as often as it is meant"]
NewItems = Annotated[list[str], "item ids of the replacements, in the same order"]
Method = Annotated[str, "payment method id, such as gift_card_0000000 or credit_card_0000000"]


class RetailTools(Toolset):
    """Tools of the retail domain."""

    tables = {
        "orders": ("order_id", "user_id", "address", "items", "status", "payment_history"),
        "products": ("name", "product_id", "variants"),
        "users": ("name", "address", "email", "payment_methods", "orders"),
    }
    nouns = {"orders": "order", "products": "product", "users": "user"}
    changing = (
        "cancel_pending_order",
        "exchange_delivered_order_items",
        "modify_pending_order_address",
        "modify_pending_order_items",
        "modify_pending_order_payment",
        "modify_user_address",
        "return_delivered_order_items",
    )

    # Looking up

    @tool
    def find_user_id_by_email(self, email: Annotated[str, "such as someone@example.com"]) -> str:
        """User id of an email address."""
        for key, user in self.database.records("users"):
            if user["email"].lower() == email.lower():
                return key
        raise InvalidAction("user not found")

    @tool
    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: Annotated[str, "such as 12345"]) -> str:
        """User id of a name and zip code. Use it only if the user has no email address at hand."""
        names = [first_name.lower(), last_name.lower()]
        for key, user in self.database.records("users"):
            own = [user["name"]["first_name"].lower(), user["name"]["last_name"].lower()]
            if own == names and user["address"]["zip"] == zip:
                return key
        raise InvalidAction("user not found")

    @tool
    def get_order_details(self, order_id: Order) -> str:
        """Status, items, address, fulfillments and payments of an order."""
        return answer(self.find("orders", order_id))

    @tool
    def get_product_details(self, product_id: Annotated[str, "a product id, which is no item id"]) -> str:
        """Variants of a product with their options, price and availability."""
        return answer(self.find("products", product_id))

    @tool
    def get_user_details(self, user_id: Annotated[str, "such as sara_doe_496"]) -> str:
        """Profile of a user: name, address, email, payment methods, orders."""
        return answer(self.find("users", user_id))

    @tool
    def list_all_product_types(self) -> str:
        """Names and product ids of all products."""
        return answer(dict(sorted((record["name"], key) for key, record in self.database.records("products"))))

    # Changing

    @tool
    def cancel_pending_order(
        self,
        order_id: Order,
        reason: Literal["no longer needed", "ordered by mistake"],
    ) -> str:
        """Cancel a pending order and refund its payments. The user must have confirmed order and reason."""
        if self.find("orders", order_id)["status"] != "pending":
            raise InvalidAction("non-pending order cannot be cancelled")
        order = self.database.edit("orders", order_id)
        for method, amount in _paid(order).items():
            order["payment_history"].append(_transaction("refund", amount, method))
            self._credit(order["user_id"], method, amount)
        order |= {"status": "cancelled", "cancel_reason": reason}
        return answer(order)

    @tool
    def modify_pending_order_address(
        self, order_id: Order, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Change the shipping address of a pending order."""
        self._require_pending(order_id)
        order = self.database.edit("orders", order_id)
        order["address"] = _address(address1, address2, city, state, country, zip)
        return answer(order)

    @tool
    def modify_pending_order_items(
        self, order_id: Order, item_ids: Items, new_item_ids: NewItems, payment_method_id: Method
    ) -> str:
        """Replace items of a pending order by other variants of the same products. Possible once for an order."""
        if self.find("orders", order_id)["status"] != "pending":
            raise InvalidAction("non-pending order cannot be modified")
        difference = self._difference(order_id, item_ids, new_item_ids)
        self._require_balance(order_id, payment_method_id, difference)
        order = self.database.edit("orders", order_id)
        kind = "payment" if difference > 0 else "refund"
        order["payment_history"].append(_transaction(kind, abs(difference), payment_method_id))
        self._credit(order["user_id"], payment_method_id, -difference)
        for old, new in zip(item_ids, new_item_ids, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == old)
            variant = self._variant(item["product_id"], new)
            item |= {"item_id": new, "price": variant["price"], "options": variant["options"]}
        order["status"] = "pending (item modified)"
        return answer(order)

    @tool
    def modify_pending_order_payment(self, order_id: Order, payment_method_id: Method) -> str:
        """Pay a pending order with another payment method; the earlier one is refunded."""
        order = self._require_pending(order_id)
        method = self.payment_method(order["user_id"], payment_method_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise InvalidAction("there should be exactly one payment for a pending order")
        earlier, amount = history[0]["payment_method_id"], history[0]["amount"]
        if earlier == payment_method_id:
            raise InvalidAction("the new payment method should be different from the current one")
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise InvalidAction("insufficient gift card balance to pay for the order")
        order = self.database.edit("orders", order_id)
        order["payment_history"] += [
            _transaction("payment", amount, payment_method_id),
            _transaction("refund", amount, earlier),
        ]
        self._credit(order["user_id"], payment_method_id, -amount)
        self._credit(order["user_id"], earlier, amount)
        return answer(order)

    @tool
    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Change the default address of a user."""
        self.find("users", user_id)
        user = self.database.edit("users", user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return answer(user)

    @tool
    def return_delivered_order_items(self, order_id: Order, item_ids: Items, payment_method_id: Method) -> str:
        """Return items of a delivered order. The refund goes to the original payment method or a gift card."""
        order = self.find("orders", order_id)
        if order["status"] != "delivered":
            raise InvalidAction("non-delivered order cannot be returned")
        self.payment_method(order["user_id"], payment_method_id)
        original = order["payment_history"][0]["payment_method_id"]
        if "gift_card" not in payment_method_id and payment_method_id != original:
            raise InvalidAction("payment method should be either the original payment method or a gift card")
        self._require_items(order, item_ids)
        order = self.database.edit("orders", order_id)
        order |= {
            "status": "return requested",
            "return_items": sorted(item_ids),
            "return_payment_method_id": payment_method_id,
        }
        return answer(order)

    @tool
    def exchange_delivered_order_items(
        self, order_id: Order, item_ids: Items, new_item_ids: NewItems, payment_method_id: Method
    ) -> str:
        """Exchange items of a delivered order for other variants of the same products. Possible once for an order."""
        if self.find("orders", order_id)["status"] != "delivered":
            raise InvalidAction("non-delivered order cannot be exchanged")
        difference = round(self._difference(order_id, item_ids, new_item_ids), 2)
        self._require_balance(order_id, payment_method_id, difference)
        order = self.database.edit("orders", order_id)
        order |= {
            "status": "exchange requested",
            "exchange_items": sorted(item_ids),
            "exchange_new_items": sorted(new_item_ids),
            "exchange_payment_method_id": payment_method_id,
            "exchange_price_difference": difference,
        }
        return answer(order)

    # Shared by the tools

    def _require_pending(self, order_id: str) -> Record:
        """Return a pending order to read, also one with modified items. Raises InvalidAction for another status."""
        order = self.find("orders", order_id)
        if not order["status"].startswith("pending"):
            raise InvalidAction("non-pending order cannot be modified")
        return order

    def _require_items(self, order: Record, item_ids: Sequence[str]) -> None:
        """Raises InvalidAction if the order has an item less often than it is listed."""
        own = [item["item_id"] for item in order["items"]]
        for item in item_ids:
            if item_ids.count(item) > own.count(item):
                raise InvalidAction(f"number of {item} not found" if item in own else f"item {item} not found")

    def _difference(self, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> float:
        """Return the price of the replacements less that of the items. Raises InvalidAction if they do not match."""
        order = self.find("orders", order_id)
        self._require_items(order, item_ids)
        if len(item_ids) != len(new_item_ids):
            raise InvalidAction("the number of items to be exchanged should match")
        difference = 0.0
        for old, new in zip(item_ids, new_item_ids, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == old)
            difference += self._variant(item["product_id"], new)["price"] - item["price"]
        return difference

    def _variant(self, product_id: str, item_id: str) -> Record:
        """Return an available variant of a product. Raises InvalidAction if there is none."""
        variant: Record | None = self.find("products", product_id)["variants"].get(item_id)
        if variant is None or not variant["available"]:
            raise InvalidAction(f"new item {item_id} not found or available")
        return variant

    def _require_balance(self, order_id: str, payment_method_id: str, amount: float) -> None:
        """Raises InvalidAction if the user lacks the payment method, or its gift card does not cover the amount."""
        method = self.payment_method(self.find("orders", order_id)["user_id"], payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise InvalidAction("insufficient gift card balance to pay for the price difference")

    def _credit(self, user_id: str, payment_method_id: str, amount: float) -> None:
        """Add an amount to a gift card; other payment methods have no balance."""
        if self.payment_method(user_id, payment_method_id)["source"] == "gift_card":
            method = self.database.edit("users", user_id)["payment_methods"][payment_method_id]
            method["balance"] = round(method["balance"] + amount, 2)


def _transaction(kind: str, amount: float, method: str) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method}


def _paid(order: Record) -> dict[str, float]:
    """Return the amount that each payment method has paid for an order, less its refunds."""
    paid: dict[str, float] = {}
    for entry in order["payment_history"]:
        sign = 1 if entry["transaction_type"] == "payment" else -1
        method = entry["payment_method_id"]
        paid[method] = paid[method] + sign * entry["amount"] if method in paid else sign * entry["amount"]
    return {method: amount for method, amount in paid.items() if amount}


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Record:
    return {
        "address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip,
    }  # fmt: skip
