"""Web server of the shop for browsers on this machine:

    python -m components.environments.worlds.webshop [--port 8008] [--seed 0] [--products 10000]

`/` lists goals; `/GOAL/search` is the shop with that goal on top of every page, and buying shows the score. The server
is stateless: the URL contains the whole state.
"""

from __future__ import annotations

import argparse
import logging
import sys
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from components.environments.worlds.webshop.environment import Webshop
from components.environments.worlds.webshop.goals import judge
from components.environments.worlds.webshop.site import PageNotFound, document

logger = logging.getLogger(__name__)
LISTED = 60
"""Number of goals on the first page."""


class ShopServer(ThreadingHTTPServer):
    """HTTP server of a shop's pages on 127.0.0.1. port: 0 selects a free port."""

    daemon_threads = True

    def __init__(self, shop: Webshop, port: int):
        self.site = shop.site
        self.goals = {scenario.id: scenario for split in ("train", "heldout") for scenario in shop.scenarios(split)}
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def answer(self, method: str, path: str) -> tuple[int, str]:
        """Return status and HTML of the response to a request."""
        goal, _, address = path.removeprefix("/").partition("/")
        if not goal and method == "GET":
            rows = [
                f'<li><a href="{escape(scenario.id)}/search">{escape(scenario.input["request"])}</a> '
                f"({scenario.type}, difficulty {scenario.difficulty})</li>"
                for scenario in list(self.goals.values())[:LISTED]
            ]
            return 200, document("Goals", ["<h1>What to buy</h1>", f"<ul>{''.join(rows)}</ul>"])
        scenario = self.goals.get(goal)
        if scenario is None:
            return 404, document("Not found", ['<p>No such goal. <a href="/">All goals</a></p>'])
        try:
            if method == "POST":
                product, chosen = self.site.order(address)
                verdict = judge(scenario.input, product, chosen)
                parts = ", ".join(f"{name} {value}" for name, value in verdict._asdict().items() if name != "score")
                body = [
                    f"<h1>Score: {verdict.score:.2f}</h1>",
                    f"<p>{escape(parts)}</p>",
                    '<p><a href="/">All goals</a></p>',
                ]
                html = document("Thank you", body)
            else:
                html = self.site.page(address or "search")
        except PageNotFound as error:
            back = f'<p>{escape(str(error))}. <a href="/{escape(goal)}/search">Back to Search</a></p>'
            return 404, document("Not found", [back])
        return 200, html.replace("<body>", f'<body>\n<p class="goal">{escape(scenario.input["request"])}</p>', 1)


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # the body follows the headers at once
    server: ShopServer
    timeout = 10

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        status, html = self.server.answer(method, self.path)
        data = html.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m components.environments.worlds.webshop",
        description="Serves the web shop to browsers on this machine.",
    )
    parser.add_argument("--port", type=int, default=8008, help="port; 0 selects a free one (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of products and goals (default: %(default)s)")
    parser.add_argument("--products", type=int, default=10_000, help="number of products (default: %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with ShopServer(Webshop(options.seed, options.products), options.port) as server:
            logger.info("serving the shop on %s (Ctrl-C stops)", server.url)
            server.serve_forever()
    except (OSError, OverflowError, ValueError) as error:
        logger.error("%s", error)
        return 2
    except KeyboardInterrupt:
        logger.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
