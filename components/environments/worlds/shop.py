"""Customer service for a small shop: the environment of the quickstart.

A customer writes; the agent looks up the order, checks the policy for its item, takes the one right action (refund,
exchange, change of address, or declining) and answers. The tools read and change a database of orders. An episode
succeeds if, at its end, the database is in the expected state, with no other order changed, and the answer states the
relevant fact.

The right action depends on the request and on the shop's policy for the item, which differs between scenarios (an
address can be changed until the order is shipped), so memorization does not help. Scenarios are generated from a seed;
order numbers are unique over all splits, so splits share no scenario.
"""

from __future__ import annotations

import functools
import json
import random
import re
from copy import deepcopy
from typing import Any

from components.environments.protocol import Step
from components.environments.seeded import CountOrNone
from components.environments.tools import InvalidAction, ToolEnvironment, call
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = """You serve the customers of a shop. Find the order, check the policy for its item, and follow it. \
Decline what it does not allow. Then tell the customer."""

ITEMS = (
    "lamp", "kettle", "jacket", "chair", "radio", "clock", "carpet", "mirror", "bicycle", "camera", "blanket", "guitar",
    "toaster", "wallet", "helmet", "backpack", "speaker", "teapot", "sweater", "printer",
)  # fmt: skip
STREETS = (
    "Oak Street",
    "Mill Road",
    "Lake Avenue",
    "Park Lane",
    "Hill Street",
    "Station Road",
    "River Lane",
    "King Street",
)
WORDS = {
    "refund": (
        "The {item} from order {order} is broken. I want my money back.",
        "Please refund order {order}, the {item} does not work.",
        "I am not happy with the {item} (order {order}) and want my money back.",
        "Order {order}: I do not need the {item} any more. Can I get a refund?",
        "Can you refund my {item}? The order is {order}.",
    ),
    "exchange": (
        "The {item} from order {order} is broken. I want a new one.",
        "Please exchange the {item} of order {order}, it does not work.",
        "Order {order}: the {item} has a scratch. Can I get a new one?",
        "Can you exchange my {item}? The order is {order}.",
        "I am not happy with the {item} (order {order}) and want a new one.",
    ),
    "address": (
        "Please send order {order} to {address}.",
        "I have moved. Order {order} should go to {address}.",
        "Can you deliver the {item} of order {order} to {address}?",
        "Order {order}: the address is wrong, it is {address}.",
        "My new address is {address}. The order is {order}.",
    ),
}
ASIDES = (
    "",
    " My order {other} was fine.",
    " This is not about order {other}.",
)
POLICIES = {
    "refund": "{item}: refund or exchange",
    "exchange": "{item}: exchange only",
    "decline": "{item}: final sale, decline",
}
"""Policy text for a delivered item, by the allowed action."""
UNDELIVERED = {
    "packed": ("change_address", "{item}: change address"),
    "shipped": ("decline", "{item}: on its way, decline"),
}
"""Right action and policy text, by state of the order."""
REFUSALS = ("cannot", "can't", "can not", "not possible", "unable", "sorry")


def _tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# No two actions begin with the same token, and the argument that only one tool takes comes first. A small model must
# sample each action after a few demonstrations: reinforcement learning cannot reward actions that are never sampled.
TOOLS = [
    _tool("find_order", "item, price and state of an order", "order"),
    _tool("check_policy", "what may be done with an item", "item"),
    _tool("refund", "give the money back", "order"),
    _tool("exchange", "send a new item", "order"),
    _tool("change_address", "send it elsewhere", "address", "order"),
    _tool("decline", "close the request without action", "order"),
]
_ARGUMENTS = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}


@registered("environment.shop")
class Shop(ToolEnvironment):
    """seed: generator seed. train, heldout: scenarios of the two splits.

    Scenario types: refund, exchange, address. Difficulty: 1 change the address of a packed order; 2 the policy allows
    the requested action; 3 the request must be declined; 4 another action than the requested one is right. It is one
    higher if the customer also mentions another order.
    """

    system = SYSTEM

    def __init__(self, seed: int = 0, train: CountOrNone = 512, heldout: CountOrNone = 128):
        if train + heldout > 20_000:
            raise ValueError(
                f"train + heldout = {train + heldout}: expected at most 20000, because there are order numbers for "
                "20000 scenarios"
            )
        self._scenarios = _generate(seed, train, heldout)

    def tools(self) -> list[dict[str, Any]]:
        return TOOLS

    def begin(self, scenario: Scenario) -> str:
        self.orders = deepcopy(scenario.input["orders"])
        return str(scenario.input["request"])

    def step(self, action: dict[str, Any]) -> Step:
        step = super().step(action)
        step.info["invalid_actions"] = step.info.pop("invalid_actions")  # last, as in recorded outcomes
        return step

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return a right solution as assistant messages."""
        order, target = scenario.input["order"], scenario.input["orders"][scenario.input["order"]]
        calls = [("find_order", {"order": order}), ("check_policy", {"item": target["item"]})]
        action = scenario.input["right"]
        arguments = {"order": order}
        if action == "change_address":
            arguments = {"address": scenario.input["address"], "order": order}
        calls.append((action, arguments))
        answers = {
            "refund": f"I have refunded {target['price']} dollars.",
            "exchange": f"A new {target['item']} is on its way.",
            "change_address": f"It will go to {scenario.input['address']}.",
            "decline": "Sorry, that is not possible.",
        }
        messages = [call(name, call_arguments, turn) for turn, (name, call_arguments) in enumerate(calls)]
        return [*messages, {"role": "assistant", "content": answers[action]}]

    def _run_tool(self, name: str, arguments: Any) -> str:
        arguments = _parse_arguments(arguments)
        if name not in _ARGUMENTS:
            raise InvalidAction(f"no tool {name}")
        if set(arguments) != set(_ARGUMENTS[name]) or not all(isinstance(value, str) for value in arguments.values()):
            raise InvalidAction(f"{name} takes {', '.join(_ARGUMENTS[name])}")
        if name == "check_policy":
            if arguments["item"] not in self.scenario.input["policies"]:
                raise InvalidAction(f"no item {arguments['item']}")
            return str(self.scenario.input["policies"][arguments["item"]])
        order = self.orders.get(arguments["order"])
        if order is None:
            raise InvalidAction(f"no order {arguments['order']}")
        if name == "find_order":
            return f"{order['item']}, {order['price']} dollars, {order['state']}"
        if order["closed"]:
            raise InvalidAction(f"{arguments['order']} is closed")
        order["closed"] = name
        if name == "change_address":
            order["address"] = arguments["address"]
        return {
            "refund": f"{order['price']} dollars refunded",
            "exchange": f"new {order['item']} sent",
            "change_address": f"address is {order['address']}",
            "decline": "sorry, not possible",
        }[name]

    def outcome(self, answer: str) -> dict[str, Any]:
        task = self.scenario.input
        expected = deepcopy(task["orders"])
        order, right = expected[task["order"]], task["right"]
        order["closed"] = right
        fact = {"refund": str(order["price"]), "exchange": order["item"], "change_address": task["address"]}
        if right == "change_address":
            order["address"] = task["address"]
        stated = _mentions(answer, fact[right]) if right in fact else any(_mentions(answer, word) for word in REFUSALS)
        state = self.orders == expected
        return {"success": state and stated, "state": state, "told": stated}


@functools.lru_cache(maxsize=4)  # a collector creates many shops with the same scenarios
def _generate(seed: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    rng = random.Random(f"shop scenarios {seed}")
    numbers = rng.sample(
        [f"{letter}{n}" for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ" for n in range(1000, 10000)], 3 * (train + heldout)
    )
    return tuple(
        _scenario(rng, numbers[3 * index : 3 * index + 3], "train" if index < train else "heldout")
        for index in range(train + heldout)
    )


def _scenario(rng: random.Random, numbers: list[str], split: str) -> Scenario:
    kind = rng.choice(sorted(WORDS))
    items = rng.sample(ITEMS, len(numbers))
    order, other = numbers[0], numbers[1]
    orders = {
        number: {
            "item": item,
            "price": rng.randrange(10, 100),
            "state": "delivered",
            "address": _address(rng),
            "closed": "",
        }
        for number, item in zip(numbers, items, strict=True)
    }
    allowed_action = {item: rng.choice(sorted(POLICIES)) for item in items}
    policies = {item: POLICIES[allowed_action[item]].format(item=item) for item in items}
    address = ""
    if kind == "address":
        address = _address(rng)
        state = "shipped" if rng.random() < 1 / 3 else "packed"
        orders[order]["state"] = state
        action, policy = UNDELIVERED[state]
        policies[items[0]] = policy.format(item=items[0])
        difficulty = 1 if action == "change_address" else 3
    else:
        action = "exchange" if kind == "exchange" and allowed_action[items[0]] == "refund" else allowed_action[items[0]]
        difficulty = 2 if action == kind else 3 if action == "decline" else 4
    aside = rng.choice(ASIDES)
    words = rng.choice(WORDS[kind]) + aside
    return Scenario(
        id=f"shop-{order}",
        input={
            "request": words.format(order=order, other=other, item=items[0], address=address),
            "order": order,
            "orders": orders,
            "policies": policies,
            "address": address,
            "right": action,
        },
        split=split,
        type=kind,
        difficulty=difficulty + bool(aside),
    )


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; {}, which no tool accepts, if they are not a JSON object."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _mentions(answer: str, words: str) -> bool:
    """Return True if the answer contains the words, as whole words: `B4512` does not contain `45`."""
    return re.search(rf"\b{re.escape(words)}\b", answer, re.IGNORECASE) is not None


def _address(rng: random.Random) -> str:
    return f"{rng.randrange(1, 100)} {rng.choice(STREETS)}"
