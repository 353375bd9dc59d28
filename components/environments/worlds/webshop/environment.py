"""Shopping on a web site: read the request, search, inspect products, choose options, buy.

The site has real HTML pages (`site.py`). The agent sees them through a text browser (`browser.py`) and acts by
searching and by clicking labels in brackets, with two tools or with lines of text. Products, goals and pages are
generated from a seed. Buying ends the episode; the purchase is scored as in WebShop:

    r = r_type · (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + 1[price ≤ u]) / (|U_att| + |U_opt| + 1)

(terms: `goals.py`). The reward of the step that buys is r; success is r = 1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from pydantic import Field

from components.environments.protocol import Messages
from components.environments.seeded import CountOrNone
from components.environments.tools import InvalidAction, ToolEnvironment, call, tool
from components.environments.worlds.webshop.browser import Page
from components.environments.worlds.webshop.goals import PurchaseVerdict, fits, judge, scenarios
from components.environments.worlds.webshop.site import QUERY, Site
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = """You shop on a web site for a user. Find a product that has all that is asked for; it may be called by \
other words. Open it, check its features, choose each option asked for, then click Buy Now. Click only what is shown \
in brackets. Buying ends the task."""
LINES = """
Answer with one action: search[words] or click[label], such as search[red kettle] or click[Buy Now]."""


@registered("environment.webshop")
class Webshop(ToolEnvironment):
    """seed: seed of products and goals. products: number of products. train, heldout: goals of the two splits.
    results_per_page: products per page of results (a search finds at most 50). actions: `tools` offers search and click
    as tools; `text` offers no tools. Both accept `search[words]` and `click[label]` in messages.

    Scenario types: the departments (beauty, clothing, electronics, kitchen, furniture, outdoor). Difficulty 1 to 5:
    requested attributes 1, 1, 2, 2, 3; of them named by other synonyms than on the product's pages 0, 0, 1, 2, 3;
    options 0, 1, 1, 2, 2; and decreasing price limits.

    Outcome: `success`; `progress` and `score`, both r; its parts `type`, `attributes`, `options` (numbers of matches)
    and `price`; `bought`, True after a purchase.
    """

    def __init__(
        self,
        seed: int = 0,
        products: Annotated[int, Field(ge=100, le=100_000)] = 10_000,
        train: CountOrNone = 512,
        heldout: CountOrNone = 128,
        results_per_page: Annotated[int, Field(ge=1, le=50)] = 10,
        actions: Literal["tools", "text"] = "tools",
    ):
        if actions not in ("tools", "text"):
            raise ValueError(f"actions = {actions!r}: expected 'tools' or 'text'")
        self.system = SYSTEM if actions == "tools" else SYSTEM + LINES
        self._actions = actions
        self._scenarios = scenarios(seed, products, train, heldout)
        self._site_arguments = (seed, products, results_per_page)

    @property
    def site(self) -> Site:
        """Site, shared by all instances with the same products; its search index is built on first use."""
        return _site(*self._site_arguments)

    def tools(self) -> list[dict[str, Any]]:
        return super().tools() if self._actions == "tools" else []

    def begin(self, scenario: Scenario) -> str:
        self.verdict: PurchaseVerdict | None = None
        self._open("search")
        return f"{scenario.input['request']}\n\n{self.page.text}"

    @tool
    def search(self, query: Annotated[str, "a few words"]) -> str:
        """searches the shop; only on a page with a field for words"""
        if not query.strip():
            raise InvalidAction("no words to search for")
        address = self.page.search(query.strip()[:QUERY])
        if address is None:
            raise InvalidAction("this page has no field for words; click [Back to Search] first")
        return self._open(address)

    @tool
    def click(self, label: Annotated[str, "as shown in brackets, without them"]) -> str:
        """follows a link, chooses an option or presses a button of the page"""
        normalized = " ".join(label[:200].strip().strip("[]").lower().split())
        if (target := self.page.links.get(normalized)) is not None:
            return self._open(target)
        if (target := self.page.buttons.get(normalized)) is None:
            label_text = label[:60].encode("utf-8", "replace").decode()
            raise InvalidAction(f"no [{label_text}] on this page; there is {_labels(self.page)}")
        product, chosen = self.site.order(target)
        self.verdict = judge(self.scenario.input, product, chosen)
        self.reward += self.verdict.score
        self.done = True
        return f"Bought: {product.title}, {_chosen_text(chosen)}${product.price(chosen) / 100:.2f}"

    def on_message(self, text: str) -> Messages:
        return [{"role": "user", "content": self._attempt(self._line, text)}]

    def outcome(self, answer: str) -> dict[str, Any]:
        if self.verdict is None:
            parts: dict[str, Any] = {"type": 0.0, "attributes": 0, "options": 0, "price": False}
            return {"success": False, "progress": 0.0, "score": 0.0, "bought": False, **parts}
        verdict = self.verdict._asdict()
        return {"success": self.verdict.success, "progress": self.verdict.score, "bought": True, **verdict}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return actions that find and buy a fitting product.

        Queries, each over all pages of results: the words of the request, then fewer words, and finally the title of
        the product from which the goal was generated.
        """
        goal = scenario.input
        for words in _queries(goal, self.site):
            clicks = self._walk(words, goal)
            if clicks is None:
                continue
            if self._actions == "text":
                lines = [f"search[{words}]", *(f"click[{label}]" for label in clicks)]
                return [{"role": "assistant", "content": line} for line in lines]
            steps = [("search", {"query": words}), *(("click", {"label": label}) for label in clicks)]
            return [call(name, arguments, number) for number, (name, arguments) in enumerate(steps)]
        raise AssertionError(f"{scenario.id}: the search by title does not find the product of the goal")

    def save(self) -> dict[str, Any]:
        verdict = self.verdict and list(self.verdict)
        return {"address": self.address, "verdict": verdict, "done": self.done, "invalid": self.invalid_actions}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        self.reset(scenario)
        self._open(state["address"])
        self.verdict = PurchaseVerdict(*state["verdict"]) if state["verdict"] else None
        self.done, self.invalid_actions = state["done"], state["invalid"]

    def _open(self, address: str) -> str:
        self.page = Page(self.site.page(address))
        self.address = address
        return self.page.text

    def _line(self, text: str) -> str:
        """Execute the last action in a text."""
        if self.done:
            raise InvalidAction("the episode is over")
        matches = re.findall(r"\b(search|click)\[([^\[\]\n]*)\]", text[-2000:], re.IGNORECASE)
        if not matches:
            raise InvalidAction("no action; say search[words] or click[label]")
        name, argument = matches[-1]
        return self.search(argument) if name.lower() == "search" else self.click(argument)

    def _walk(self, words: str, goal: dict[str, Any]) -> list[str] | None:
        """Return the labels to click after a search, or None if it finds no fitting product."""
        fitting = {product.code.lower() for product in self.site.find(words) if fits(goal, product)}
        if not fitting:
            return None
        clicks: list[str] = []
        page = Page(self.site.page(f"results?{urlencode({'q': words})}"))
        while not (fitting_labels := [label for label in page.links if label in fitting]):
            page = Page(self.site.page(page.links["next >"]))
            clicks.append("Next >")
        clicks.append(fitting_labels[0].upper())
        page = Page(self.site.page(page.links[fitting_labels[0]]))
        # Check the features if the page does not name all attributes.
        if not all(name in page.text for name in goal["said"]):
            clicks += ["Features", "< Prev"]
        return [*clicks, *goal["options"].values(), "Buy Now"]


@functools.lru_cache(maxsize=4)
def _site(seed: int, products: int, per_page: int) -> Site:
    return Site(seed, products, per_page)


def _queries(goal: dict[str, Any], site: Site) -> Iterator[str]:
    kind, names, options = goal["kind"], goal["said"], list(goal["options"].values())
    yield " ".join([kind, *names])
    yield " ".join([kind, *names, *options])
    for name in names:
        yield f"{kind} {name}"
    yield kind
    yield next(product.title for product in site.products if product.code == goal["product"])


def _labels(page: Page) -> str:
    """Return the labels that can be clicked, at most 25."""
    labels = [*page.links, *page.buttons]
    return ", ".join(f"[{label}]" for label in labels[:25]) or "nothing to click"


def _chosen_text(chosen: dict[str, str]) -> str:
    return "".join(f"{label} {value}, " for label, value in chosen.items())
