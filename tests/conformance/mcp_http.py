"""`flows.mcp_server` over streamable HTTP, the only transport that the MCP conformance suite has for servers.

    python -m tests.conformance.mcp_http PORT +experiment=smoke [overrides]

Tools, permissions and jobs are those of the command; only the transport differs. It ends when standard input ends.
"""

from __future__ import annotations

import os
import sys
import threading

from flows.mcp_server import offered


def main() -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()
    with offered(sys.argv[2:], None, limit=1) as server:
        server.run("streamable-http", port=int(sys.argv[1]))


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
