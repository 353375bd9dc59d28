"""A small real MCP server for tests: the shelf of a shop, and tools that fail.

python mcp_server.py stdio [broken]      broken: the schema of a tool is invalid
python mcp_server.py http PORT
"""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shelf", log_level="ERROR")
PRICES = {"lamp": 20, "kettle": 35, "chair": 50}
baskets: dict[object, list[str]] = {}


def basket(context: Context) -> list[str]:
    """Return the basket of the session; over stdio there is only one session."""
    headers = getattr(context, "headers", None) or {}
    return baskets.setdefault(headers.get("mcp-session-id"), [])


@server.tool()
def price(item: str) -> str:
    """price of an item in dollars"""
    if item not in PRICES:
        raise ToolError(f"no item {item}")
    return f"{item}: {PRICES[item]} dollars"


@server.tool()
def add(item: str, number: int, context: Context) -> str:
    """puts items into the basket"""
    basket(context).extend([item] * number)
    return f"{len(basket(context))} in the basket"


@server.tool()
def look(context: Context) -> list[str]:
    """what is in the basket"""
    return basket(context)


@server.tool()
def variable(name: str) -> str:
    """an environment variable of the server"""
    return os.environ.get(name, "not set")


@server.tool(name="shelf.stock/all")
def stock() -> str:
    """everything there is"""
    return ", ".join(PRICES)


@server.tool()
def huge(characters: int) -> str:
    """a long text"""
    return "x" * characters


@server.tool()
def slow(seconds: float) -> str:
    """waits"""
    time.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """ends the server"""
    print(f"out of paper, key {os.environ.get('SHELF_KEY', 'none')}", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if "broken" in sys.argv:
        server._tool_manager.get_tool("price").parameters["properties"]["item"]["type"] = "nonsense"
    if sys.argv[1] == "http":
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
