r"""`python -m flows.scenarios`: a language model writes tasks for the tools of an MCP server.

    python -m flows.scenarios --out tasks.json --count 64 --author NAME --author-url http://127.0.0.1:8000/v1 \
        --about "a shop" -- python my_server.py
    python -m flows.run +experiment=NAME environment=mcp environment.scenarios=tasks.json \
        'environment.command=[python, my_server.py]'

The author is told what tools there are and writes tasks of difficulty 1 to 5, each with what a right answer has to
have. It writes a file once; runs read the file, so they repeat. Read it before you train on it, and mend it where it is
wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.environments.adapters.mcp import chosen
from components.environments.adapters.mcp_session import Address, Session
from components.environments.tool_tasks import DIFFICULTIES, Author, write_tasks
from components.errors import EspalierError, ResourceError
from components.specs.served import VARIABLE, check_address

HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Name of a header of HTTP."""
TIMEOUT = 120.0
"""Seconds in which the server has to answer."""


async def write(
    address: Address,
    author: Author,
    *,
    count: int,
    about: str,
    difficulties: Sequence[int],
    tools: Sequence[str] | None,
    seed: int,
) -> list[dict[str, Any]]:
    """Asks the server for its tools and the author for tasks."""
    session = Session(address, TIMEOUT)
    await session.open(TIMEOUT)
    try:
        offered = chosen(await session.tools(), tools)
    finally:
        await session.close()
    schemas = [one.schema for one in offered.values()]
    return await write_tasks(author, schemas, count=count, about=about, difficulties=difficulties, seed=seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the command, or an author or a server that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.scenarios", description="A language model writes tasks for the tools of an MCP server."
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="the server's program and arguments, after --")
    parser.add_argument("--url", default="", help="of a server over HTTP, in place of a command")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="HEADER=VARIABLE",
        help="header of requests to --url, and the environment variable that holds its value; may be repeated",
    )
    parser.add_argument(
        "--variable", action="append", default=[], help="environment variable that the program is given"
    )
    parser.add_argument("--tool", action="append", help="a tool to write tasks for; may be repeated; all without it")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the tasks go; a new file")
    parser.add_argument("--count", type=int, default=64, help="tasks, the difficulties in turn")
    parser.add_argument("--difficulties", type=int, nargs="+", default=list(DIFFICULTIES), choices=list(DIFFICULTIES))
    parser.add_argument("--author", required=True, metavar="MODEL", help="name of the model that writes")
    parser.add_argument("--author-url", required=True, metavar="URL", help="of its server: OpenAI's chat completions")
    parser.add_argument("--key-variable", help="environment variable that holds the key of the author's server")
    parser.add_argument("--about", default="", help="what the author is told of the world behind the tools")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if bool(options.command) == bool(options.url):
        parser.error("give a server: its program after --, or --url")
    if options.url and options.variable:
        parser.error("--variable is of a program; a server at --url is given --header")
    if options.header and not options.url:
        parser.error("--header is of a server at --url; a program is given --variable")
    headers = dict(one.partition("=")[::2] for one in options.header)
    if not all(HEADER.fullmatch(name) and re.match(VARIABLE, variable) for name, variable in headers.items()):
        parser.error(
            "--header: expected HEADER=VARIABLE, with the name of the environment variable that holds the value"
        )
    if options.url:
        try:
            check_address(options.url, "http://127.0.0.1:8000/mcp", "--header")
        except ValueError as error:
            parser.error(f"--url: expected {error}")
    if options.count < 1:
        parser.error(f"--count is {options.count}; expected at least 1")
    try:
        author = Author(url=options.author_url, model=options.author, key_variable=options.key_variable, timeout=300.0)
    except ValidationError as error:
        first = error.errors()[0]
        parser.error(f"the author's {first['loc'][-1]}: {first['msg']}")
    try:
        if options.out.exists():
            raise ResourceError(f"{options.out} is there already; delete it, or give another name")
        address = Address(tuple(options.command), options.url, tuple(options.variable), headers)
        asked = {name: getattr(options, name) for name in ("count", "about", "difficulties", "seed")}
        found = asyncio.run(write(address, author, tools=options.tool, **asked))
        _save(options.out, found)
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    counts = Counter(one["split"] for one in found)
    print(f"{options.out}: {counts['train']} tasks to train on, {counts['heldout']} held out")
    return 0


def _save(path: Path, tasks: Sequence[dict[str, Any]]) -> None:
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(json.dumps(tasks, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; give another file: --out FILE") from None


if __name__ == "__main__":
    raise SystemExit(main())
