"""`python -m flows.server [root=DIR]`: shows the runs below a root in Prefect's user interface."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from components.errors import EspalierError
from flows.orchestration.server import PORT, start
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import told


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after Ctrl-C; 2 where the server cannot start, 1 where it ends by itself."""
    parser = RootParser(
        prog="python -m flows.server",
        description="Shows the runs below a root in Prefect's user interface, until it is interrupted.",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"{PORT} if not given")
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
        found = told(error)
        assert found is not None
        print(found[0], file=sys.stderr)
        return found[1]
    except KeyboardInterrupt:
        return 0
    print("the Prefect server has ended; its log is logs/prefect-server.log below the root", file=sys.stderr)
    return 1


if __name__ == "__main__":
    from flows.terminal.interrupt import leave

    leave(main)
