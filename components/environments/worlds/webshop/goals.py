"""What is to be bought, and how good a purchase is.

A purchase is scored as in WebShop (Yao et al. 2022, arXiv:2207.01206):

    r = r_type · (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + 1[price ≤ u]) / (|U_att| + |U_opt| + 1)

with the attributes U_att, options U_opt and highest price u that are asked for, and those of the product as it was
bought, Y. Options that were not chosen count as missing and at their cheapest. WebShop takes r_type from how alike two
titles are; here the tree of departments is known: 1 for a product of the kind that is asked for, 0.5 for another of its
section, 0.1 for another of its department, else 0. Success is r = 1, so any product that has it all will do.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from components.environments.worlds.webshop.catalog import NAMES, Product, catalog
from components.trajectories.schema import Scenario


class Level(NamedTuple):
    attributes: int
    options: int
    slack: float
    """What may be paid, as a multiple of what the product costs that the goal was made from."""
    renamed: int
    """Attributes that are called by another name than the product's texts use."""


LEVELS = {
    1: Level(1, 0, 1.6, 0),
    2: Level(1, 1, 1.4, 0),
    3: Level(2, 1, 1.2, 1),
    4: Level(2, 2, 1.1, 2),
    5: Level(3, 2, 1.0, 3),
}
"""By difficulty."""
WORDS = (
    "I am looking for this: {kind}, {attributes}{options}. It may cost {limit} dollars at most.",
    "Please buy me this: {kind}, {attributes}{options}, for no more than {limit} dollars.",
    "Find {kind} for up to {limit} dollars. It should be: {attributes}{options}.",
    "I need {kind} ({attributes}{options}). My limit is {limit} dollars.",
)


class Verdict(NamedTuple):
    score: float
    type: float
    attributes: int
    """Of those asked for, how many the product has; the same for options."""
    options: int
    price: bool
    """Within the limit."""

    @property
    def success(self) -> bool:
        return self.score == 1.0


def judge(goal: Mapping[str, Any], product: Product, chosen: Mapping[str, str]) -> Verdict:
    """goal: of a scenario. chosen: the options, by label."""
    if product.kind == goal["kind"]:
        kind = 1.0
    elif product.section == goal["section"] and product.department == goal["department"]:
        kind = 0.5
    else:
        kind = 0.1 if product.department == goal["department"] else 0.0
    attributes = len(set(goal["attributes"]) & set(product.attributes))
    options = sum(chosen.get(label) == value for label, value in goal["options"].items())
    price = product.price(dict(chosen)) <= 100 * goal["limit"]
    asked = len(goal["attributes"]) + len(goal["options"]) + 1
    return Verdict(kind * (attributes + options + price) / asked, kind, attributes, options, price)


def fits(goal: Mapping[str, Any], product: Product) -> bool:
    """Whether there is a choice of options with which it scores 1."""
    if product.kind != goal["kind"]:
        return False
    offered = {label: {value for value, _ in values} for label, values in product.options}
    if any(value not in offered.get(label, ()) for label, value in goal["options"].items()):
        return False
    return judge(goal, product, goal["options"]).success


@functools.lru_cache(maxsize=4)
def scenarios(seed: int, products: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    """Each goal is made from a product of its own, and no two ask for the same; difficulties take turns."""
    rng = random.Random(f"webshop goals {seed}")
    shelf = catalog(seed, products)
    order = rng.sample(shelf, len(shelf))
    found: list[Scenario] = []
    seen = set()
    while len(found) < train + heldout:
        if not order:
            raise ValueError(
                f"{products} products are too few for {train} + {heldout} goals that all differ; "
                "take more products or fewer scenarios"
            )
        product, difficulty = order.pop(), 1 + len(found) % len(LEVELS)
        goal = _goal(rng, product, LEVELS[difficulty])
        key = (goal["kind"], frozenset(goal["attributes"]), frozenset(goal["options"].items()))
        if key in seen:
            continue
        seen.add(key)
        split = "train" if len(found) < train else "heldout"
        name = f"webshop-{seed}-{product.code}"
        found.append(Scenario(name, goal, split=split, type=product.department, difficulty=difficulty))
    return tuple(found)


def _goal(rng: random.Random, product: Product, level: Level) -> dict[str, Any]:
    picked = rng.sample(range(len(product.attributes)), level.attributes)
    groups = sorted(rng.sample(range(len(product.options)), level.options))
    options = {label: rng.choice(values)[0] for label, values in (product.options[at] for at in groups)}
    limit = -(-int(product.price(options) * level.slack) // 100)
    said = []
    for number, at in enumerate(picked):
        name, shown = product.attributes[at], product.said[at]
        said.append(rng.choice([one for one in NAMES[name] if one != shown]) if number < level.renamed else shown)
    request = rng.choice(WORDS).format(
        kind=product.kind,
        attributes=", ".join(said),
        options="".join(f", {label} {value}" for label, value in options.items()),
        limit=limit,
    )
    return {
        "request": request,
        "department": product.department,
        "section": product.section,
        "kind": product.kind,
        "attributes": [product.attributes[at] for at in picked],
        "said": said,
        "options": options,
        "limit": limit,
        "product": product.code,
    }
