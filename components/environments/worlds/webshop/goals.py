"""Shopping goals, and the score of a purchase.

A purchase is scored as in WebShop (Yao et al. 2022, arXiv:2207.01206):

    r = r_type · (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + 1[price ≤ u]) / (|U_att| + |U_opt| + 1)

with the requested attributes U_att, options U_opt and maximum price u, and the attributes Y_att and options Y_opt of
the purchase. Options that were not chosen count as missing, with their cheapest price. WebShop derives r_type from the
similarity of titles; here the tree of departments is known: 1 for a product of the requested kind, 0.5 for another one
of its section, 0.1 for another one of its department, else 0. Success is r = 1, so any product that meets all
requirements succeeds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from components.environments.worlds.webshop.catalog import NAMES, Product, catalog
from components.trajectories.schema import Scenario


class Level(NamedTuple):
    """Parameters of a difficulty."""

    attributes: int
    options: int
    slack: float
    """Price limit as a multiple of the price of the product from which the goal is generated."""
    renamed: int
    """Number of attributes named by another synonym than in the product's texts."""


LEVELS = {
    1: Level(1, 0, 1.6, 0),
    2: Level(1, 1, 1.4, 0),
    3: Level(2, 1, 1.2, 1),
    4: Level(2, 2, 1.1, 2),
    5: Level(3, 2, 1.0, 3),
}
"""Parameters by difficulty."""
WORDS = (
    "I am looking for this: {kind}, {attributes}{options}. It may cost {limit} dollars at most.",
    "Please buy me this: {kind}, {attributes}{options}, for no more than {limit} dollars.",
    "Find {kind} for up to {limit} dollars. It should be: {attributes}{options}.",
    "I need {kind} ({attributes}{options}). My limit is {limit} dollars.",
)


class PurchaseVerdict(NamedTuple):
    """Score of a purchase with its parts."""

    score: float
    type: float
    attributes: int
    """Number of requested attributes that the product has."""
    options: int
    """Number of requested options that were chosen."""
    price: bool
    """True: the price is within the limit."""

    @property
    def success(self) -> bool:
        return self.score == 1.0


def judge(goal: Mapping[str, Any], product: Product, chosen: Mapping[str, str]) -> PurchaseVerdict:
    """Score a purchase. goal: input of the scenario. chosen: option values by label."""
    if product.kind == goal["kind"]:
        kind = 1.0
    elif product.section == goal["section"] and product.department == goal["department"]:
        kind = 0.5
    else:
        kind = 0.1 if product.department == goal["department"] else 0.0
    attributes = len(set(goal["attributes"]) & set(product.attributes))
    options = sum(chosen.get(label) == value for label, value in goal["options"].items())
    price = product.price(dict(chosen)) <= 100 * goal["limit"]
    total = len(goal["attributes"]) + len(goal["options"]) + 1
    return PurchaseVerdict(kind * (attributes + options + price) / total, kind, attributes, options, price)


def fits(goal: Mapping[str, Any], product: Product) -> bool:
    """Return True if the product scores 1 with some choice of options."""
    if product.kind != goal["kind"]:
        return False
    offered = {label: {value for value, _ in values} for label, values in product.options}
    if any(value not in offered.get(label, ()) for label, value in goal["options"].items()):
        return False
    return judge(goal, product, goal["options"]).success


@functools.lru_cache(maxsize=4)
def scenarios(seed: int, products: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    """Return the scenarios of both splits, each generated from its own product, with difficulties in rotation.

    Raises ValueError if there are too few products for different goals.
    """
    rng = random.Random(f"webshop goals {seed}")
    shelf = catalog(seed, products)
    order = rng.sample(shelf, len(shelf))
    generated: list[Scenario] = []
    seen_keys = set()
    while len(generated) < train + heldout:
        if not order:
            raise ValueError(
                f"{products} products are too few for {train} + {heldout} different goals; raise products or lower "
                "train and heldout"
            )
        product, difficulty = order.pop(), 1 + len(generated) % len(LEVELS)
        goal = _goal(rng, product, LEVELS[difficulty])
        key = (goal["kind"], frozenset(goal["attributes"]), frozenset(goal["options"].items()))
        if key in seen_keys:
            continue
        seen_keys.add(key)
        split = "train" if len(generated) < train else "heldout"
        name = f"webshop-{seed}-{product.code}"
        generated.append(Scenario(name, goal, split=split, type=product.department, difficulty=difficulty))
    return tuple(generated)


def _goal(rng: random.Random, product: Product, level: Level) -> dict[str, Any]:
    picked = rng.sample(range(len(product.attributes)), level.attributes)
    groups = sorted(rng.sample(range(len(product.options)), level.options))
    options = {label: rng.choice(values)[0] for label, values in (product.options[index] for index in groups)}
    limit = -(-int(product.price(options) * level.slack) // 100)
    names_in_request = []
    for number, index in enumerate(picked):
        name, synonym = product.attributes[index], product.synonyms[index]
        names_in_request.append(
            rng.choice([candidate for candidate in NAMES[name] if candidate != synonym])
            if number < level.renamed
            else synonym
        )
    request = rng.choice(WORDS).format(
        kind=product.kind,
        attributes=", ".join(names_in_request),
        options="".join(f", {label} {value}" for label, value in options.items()),
        limit=limit,
    )
    return {
        "request": request,
        "department": product.department,
        "section": product.section,
        "kind": product.kind,
        "attributes": [product.attributes[index] for index in picked],
        "said": names_in_request,
        "options": options,
        "limit": limit,
        "product": product.code,
    }
