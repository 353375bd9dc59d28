"""`python -m flows.runs ui [root=DIR]`: Prefect server and user interface for the runs below a root."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from components.errors import EspalierError
from flows.orchestration.server import PORT, start
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import print_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until Ctrl-C. Return exit code 0; 2 if it cannot start, 1 if it stops by itself."""
    parser = RootParser(
        prog="python -m flows.runs ui",
        description="Serves Prefect's user interface for the runs below a root, until interrupted.",
    )
    parser.add_argument("--port", type=int, default=PORT, help="port of the server (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.port < 2**16:
        parser.error(f"--port {arguments.port}: expected 1 to 65535")
    try:
        server = start(arguments.root.absolute(), arguments.port)
        try:
            print(server.login(show=sys.stderr.isatty()), file=sys.stderr, flush=True)
            server.wait()
        finally:
            server.stop()
    except EspalierError as error:
        return print_error(error)
    except KeyboardInterrupt:
        return 0
    print("the Prefect server stopped; see its log, logs/prefect-server.log below the root", file=sys.stderr)
    return 1
