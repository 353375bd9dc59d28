"""`python -m flows.environment serve environment=NAME --as PROTOCOL`: serve an environment to other programs.

    python -m flows.environment serve environment=shop --as openenv --port 8000
    python -m flows.environment serve environment=maze agent.max_turns=72 --as mcp --stdio
    python -m flows.environment serve +experiment=NAME --as openenv --split heldout

`openenv` is OpenEnv's HTTP and WebSocket protocol, `mcp` the Model Context Protocol over streamable HTTP at /mcp, or on
standard input and output. The server listens on 127.0.0.1 only. Each session has its own instance of the environment.
Rewards are those that `reward` of the configuration defines. docs/guides/environments_outward.md describes the
protocols, and the use from Gymnasium and verifiers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import with_exit_codes

if TYPE_CHECKING:
    from flows.interop.source import EpisodeSource

PROTOCOLS = ("openenv", "mcp")
PORT = 8000


def serve(source: EpisodeSource, options: argparse.Namespace) -> None:
    """Serve a source until it is interrupted, or until standard input ends. Raises ResourceError."""
    from components.environments.optional_packages import import_optional
    from flows.interop.listening import listen
    from flows.interop.listening import serve as serve_app
    from flows.interop.sessions import SessionLimits

    limits = SessionLimits(options.sessions, options.idle_timeout)
    name = f"{source.name} ({source.split}, {len(source.scenarios)} scenarios)"
    if options.stdio:
        from flows.interop.mcp import serve_stdio

        print(f"serves {name} as mcp on standard input and output", file=sys.stderr, flush=True)
        serve_stdio(source)
        return
    listener = listen(options.port)
    if options.protocol == "openenv":
        from flows.interop.openenv import create_app

        import_optional("websockets", "openenv", "--as openenv")
        app, path = create_app(source, limits), ""
    else:
        from flows.interop.mcp import PATH, create_mcp_app

        app, path = create_mcp_app(source, limits), PATH

    def ready(url: str) -> None:
        data = {"environment": source.name, "protocol": options.protocol, "url": url + path, "split": source.split,
                "scenarios": len(source.scenarios)}  # fmt: skip
        print(json.dumps(data) if options.json else f"serves {name} as {options.protocol} at {url}{path}", flush=True)

    serve_app(app, listener, ready)


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for a user error; 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.environment serve", description="Serves an environment to programs of others."
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: environment=NAME, +experiment=NAME, key=value")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--as", choices=PROTOCOLS, required=True, dest="protocol", help="protocol")
    parser.add_argument("--port", type=int, default=PORT, help=f"port on 127.0.0.1; 0: any free one (default: {PORT})")
    parser.add_argument("--stdio", action="store_true", help="mcp on standard input and output, in place of a port")
    parser.add_argument("--split", default="train", help="split of the scenarios (default: train)")
    parser.add_argument(
        "--sessions", type=int, default=16, metavar="N", help="maximum number of sessions (default: 16)"
    )
    parser.add_argument("--idle-timeout", type=float, default=600.0, metavar="SECONDS",
                        help="close a session after this time without a request (default: 600)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the address as one JSON object")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    if options.stdio and options.protocol != "mcp":
        parser.error(f"--stdio requires --as mcp; {options.protocol} has no such transport")
    if options.sessions < 1:
        parser.error(f"--sessions {options.sessions}: expected at least 1")
    if not 0 < options.idle_timeout < float("inf"):
        parser.error(f"--idle-timeout {options.idle_timeout:g}: expected a positive number of seconds")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port}: expected 0 to 65535")
    from flows.interop.source import load
    from flows.terminal.console import hush

    hush()
    serve(load(options.overrides, options.split, options.config_dir), options)
    return 0
