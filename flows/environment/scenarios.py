r"""`python -m flows.environment scenarios`: write tasks for the tools of an MCP server with a language model.

    python -m flows.environment scenarios --out tasks.json --count 64 --author NAME \
        --author-url http://127.0.0.1:8000/v1 --about "a shop" -- python my_server.py
    python -m flows.run +experiment=NAME environment=mcp environment.scenarios=tasks.json \
        'environment.command=[python, my_server.py]'

The author model gets the tools' schemas and writes tasks of difficulty 1 to 5, each with the criteria of a correct
answer. The file is written once and runs read it, so runs stay reproducible. Review and correct it before training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.environments.adapters.mcp_session import Address, McpSession
from components.environments.adapters.mcp_tools import chosen
from components.environments.tool_tasks import DIFFICULTIES, Author, write_tasks
from components.errors import EspalierError, ResourceError
from components.specs.served import VARIABLE, check_address
from components.specs.wording import first_problem
from flows.terminal.exit_codes import print_message

HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Valid name of an HTTP header."""
TIMEOUT = 120.0
"""Time limit for each answer of the server, in seconds."""


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
    """Query the server for its tools and return the tasks that the author writes for them."""
    session = McpSession(address, TIMEOUT)
    await session.open(TIMEOUT)
    try:
        selected = chosen(await session.tools(), tools)
    finally:
        await session.close()
    schemas = [tool.schema for tool in selected.values()]
    return await write_tasks(author, schemas, count=count, about=about, difficulties=difficulties, seed=seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command or a failure of the author or the server."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.environment scenarios",
        description="Writes tasks for the tools of an MCP server with a language model.",
    )
    parser.add_argument(
        "command", nargs="*", metavar="COMMAND", help="program and arguments of the MCP server, after --"
    )
    parser.add_argument("--url", default="", help="URL of an MCP server over HTTP, instead of COMMAND")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="HEADER=VARIABLE",
        help="header of requests to --url, and the environment variable with its value; may be repeated",
    )
    parser.add_argument(
        "--variable", action="append", default=[], help="environment variable to pass to COMMAND; may be repeated"
    )
    parser.add_argument("--tool", action="append", help="tool to write tasks for; may be repeated (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="new file for the tasks")
    parser.add_argument("--count", type=int, default=64, help="number of tasks, which cycle through the difficulties")
    parser.add_argument("--difficulties", type=int, nargs="+", default=list(DIFFICULTIES), choices=list(DIFFICULTIES))
    parser.add_argument("--author", required=True, metavar="MODEL", help="name of the model that writes the tasks")
    parser.add_argument("--author-url", required=True, metavar="URL", help="its OpenAI-compatible chat API")
    parser.add_argument("--key-variable", help="environment variable with the API key of the author's server")
    parser.add_argument("--about", default="", help="description of the tools' world, added to the author's prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if bool(options.command) == bool(options.url):
        parser.error("expected exactly one server: COMMAND after --, or --url URL")
    if options.url and options.variable:
        parser.error("--variable requires a COMMAND; for a server at --url use --header")
    if options.header and not options.url:
        parser.error("--header requires --url; for a COMMAND use --variable")
    headers = dict(header.partition("=")[::2] for header in options.header)
    if not all(HEADER.fullmatch(name) and re.match(VARIABLE, variable) for name, variable in headers.items()):
        parser.error("--header: expected HEADER=VARIABLE, where VARIABLE names the environment variable with the value")
    if options.url:
        try:
            check_address(options.url, "http://127.0.0.1:8000/mcp", "--header")
        except ValueError as error:
            parser.error(f"--url: expected {error}")
    if options.count < 1:
        parser.error(f"--count {options.count}: expected at least 1")
    try:
        author = Author(url=options.author_url, model=options.author, key_variable=options.key_variable, timeout=300.0)
    except ValidationError as error:
        parser.error(f"author's {first_problem(error)}")
    try:
        if options.out.exists():
            raise ResourceError(f"--out {options.out}: the file exists; delete it or give another name")
        address = Address(tuple(options.command), options.url, tuple(options.variable), headers)
        arguments = {name: getattr(options, name) for name in ("count", "about", "difficulties", "seed")}
        tasks = asyncio.run(write(address, author, tools=options.tool, **arguments))
        _save(options.out, tasks)
    except EspalierError as error:
        print_message(error)
        return 2
    counts = Counter(task["split"] for task in tasks)
    print(f"{options.out}: {counts['train']} training tasks, {counts['heldout']} held-out tasks")
    return 0


def _save(path: Path, tasks: Sequence[dict[str, Any]]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(tasks, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; give another file: --out FILE") from None
