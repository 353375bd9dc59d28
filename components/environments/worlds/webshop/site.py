"""HTML pages of the shop. The site is stateless: an address contains everything that its page depends on.

    search                                    start page
    results?q=WORDS&page=2                    search results, best first
    item?id=P012345&q=…&page=…&o.color=navy   product, with the options chosen so far
    description?…   features?…                details of the product
    buy?…                                     action of the form on the item's page

Links are relative, so the site works below any prefix.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from components.environments.fulltext import Index
from components.environments.worlds.webshop.catalog import Product, catalog, description, features

FOUND = 50
"""Maximum number of products that a search finds."""
QUERY = 200
"""Maximum number of characters of a query."""
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
a { color: #0b57d0 } a[aria-current] { font-weight: bold; color: inherit } li { margin: .3rem 0 }
input, button { font: inherit; padding: .3rem .6rem } .goal { background: #f3f3f3; padding: .6rem 1rem }"""


class PageNotFound(Exception):
    """Missing page. The message states the reason."""


class Order(NamedTuple):
    """Product with chosen options."""

    product: Product
    chosen: dict[str, str]
    """Option values by label."""


class _View(NamedTuple):
    """Parsed parameters of an address."""

    query: str
    page: int
    product: Product | None
    chosen: dict[str, str]

    def link(self, name: str, **changed: str) -> str:
        """Return the address of page `name` with the same parameters, except the changed options."""
        parameters = {"q": self.query, "page": str(self.page)}
        if self.product:
            chosen = {**self.chosen, **changed}
            parameters |= {"id": self.product.code, **{f"o.{label}": value for label, value in chosen.items()}}
        return f"{name}?{urlencode(parameters)}"


class Site:
    """Site of the shop. seed, products: arguments of the catalog. per_page: products per page of results."""

    def __init__(self, seed: int, products: int, per_page: int):
        self.products = catalog(seed, products)
        self.per_page = per_page
        self._seed = seed
        self._by_code = {product.code: product for product in self.products}
        self._index = _index(seed, products)

    def page(self, address: str) -> str:
        """Return the HTML of a page. Raise PageNotFound if it does not exist."""
        name, _, query = address.partition("?")
        if name == "search":
            return document("Shop", [_form("")])
        view = self._view(query)
        if name == "results":
            return self._results(view)
        if view.product is None:
            raise PageNotFound("no such product")
        if name == "item":
            return self._item(view, view.product)
        if name == "description":
            return _subpage(view, view.product, f"<p>{escape(description(self._seed, view.product))}</p>")
        if name == "features":
            return _subpage(
                view, view.product, _list(escape(feature) for feature in features(self._seed, view.product))
            )
        raise PageNotFound(f"no page {name[:40]!r}")

    def order(self, address: str) -> Order:
        """Return the purchase made by submitting the form of an item's page. Raises PageNotFound for an unknown
        page."""
        name, _, query = address.partition("?")
        view = self._view(query)
        if name != "buy" or view.product is None:
            raise PageNotFound("no such product")
        return Order(view.product, view.chosen)

    def find(self, query: str) -> Sequence[Product]:
        """Return the products that match a query, best first."""
        return [self.products[number] for number, _ in self._index.search(query, FOUND)]

    def _view(self, query: str) -> _View:
        try:
            parameters = dict(parse_qsl(query[:4000], max_num_fields=20))
        except ValueError:
            raise PageNotFound("too many values in the address") from None
        page = parameters.get("page", "1")
        if not re.fullmatch(r"[0-9]{1,4}", page):
            raise PageNotFound("no such page of results")
        product = self._by_code.get(parameters.get("id", ""))
        chosen = {}
        for label, values in product.options if product else ():
            value = parameters.get(f"o.{label}")
            if value is not None:
                if value not in {option_value for option_value, _ in values}:
                    raise PageNotFound(f"no such {label}")
                chosen[label] = value
        return _View(parameters.get("q", "")[:QUERY], int(page), product, chosen)

    def _results(self, view: _View) -> str:
        products = self.find(view.query)
        pages = -(-len(products) // self.per_page)
        if products and not 1 <= view.page <= pages:
            raise PageNotFound("no such page of results")
        page_products = products[(view.page - 1) * self.per_page : view.page * self.per_page]
        page_links = []
        if view.page > 1:
            page_links.append(_link(view._replace(page=view.page - 1).link("results"), "< Prev"))
        if view.page < pages:
            page_links.append(_link(view._replace(page=view.page + 1).link("results"), "Next >"))
        head = f"Found: {len(products)} products. Page {view.page} of {pages}." if products else "Nothing found."
        rows = []
        for product in page_products:
            link = _link(view._replace(product=product).link("item"), product.code)
            rows.append(f"{link} {escape(product.title)}, {_range(product)}")
        return document(
            f"Results for {view.query}", [_form(view.query), f"<p>{head} {' '.join(page_links)}</p>", _list(rows)]
        )

    def _item(self, view: _View, product: Product) -> str:
        price = f"${product.price(view.chosen) / 100:.2f}"
        if len(view.chosen) < len(product.options):
            price = f"{_range(product)} (by options)"
        groups = []
        for label, values in product.options:
            choices = [
                f'<a href="{escape(view.link("item", **{label: value}))}"'
                f"{' aria-current=true' if view.chosen.get(label) == value else ''}>{escape(value)}</a>"
                for value, _ in values
            ]
            groups.append(f"<p>{escape(label)}: {' '.join(choices)}</p>")
        results = view._replace(product=None).link("results")
        body = [
            f"<p>{_link('search', 'Back to Search')} {_link(results, '< Prev')}</p>",
            f"<h1>{escape(product.title)}</h1>",
            f"<p>{escape(f'{product.department} > {product.section} > {product.kind}')}</p>",
            f"<p>Price: {price}</p>",
            *groups,
            f"<p>{_link(view.link('description'), 'Description')} {_link(view.link('features'), 'Features')}</p>",
            f'<form method="post" action="{escape(view.link("buy"))}"><button>Buy Now</button></form>',
        ]
        return document(product.title, body)


@functools.lru_cache(maxsize=4)
def _index(seed: int, products: int) -> Index:
    """Return the search index of a catalog, built once per process."""
    fields = {"title": 3.0, "category": 2.0, "features": 2.0, "description": 1.0}
    return Index(
        fields,
        (
            (
                product.number,
                (
                    product.title,
                    f"{product.department} {product.section} {product.kind}",
                    f"{'; '.join(product.synonyms)}; "
                    f"{' '.join(value for _, values in product.options for value, _ in values)}",
                    description(seed, product),
                ),
            )
            for product in catalog(seed, products)
        ),
    )


def _subpage(view: _View, product: Product, body: str) -> str:
    back = f"<p>{_link('search', 'Back to Search')} {_link(view.link('item'), '< Prev')}</p>"
    return document(product.title, [back, f"<h1>{escape(product.title)}</h1>", body])


def document(title: str, body: Iterable[str]) -> str:
    """Return an HTML page. body: parts of the body, as HTML."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{chr(10).join(body)}\n</body>\n</html>\n"
    )


def _form(query: str) -> str:
    return (
        f'<form action="results"><input type="search" name="q" value="{escape(query)}" maxlength="{QUERY}"> '
        "<button>Search</button></form>"
    )


def _link(address: str, label: str) -> str:
    return f'<a href="{escape(address)}">{escape(label)}</a>'


def _list(rows: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{row}</li>" for row in rows) + "\n</ul>"


def _range(product: Product) -> str:
    low, high = product.range
    return f"${low / 100:.2f}" if low == high else f"${low / 100:.2f} to ${high / 100:.2f}"
