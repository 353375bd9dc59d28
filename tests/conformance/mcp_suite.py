"""The conformance suite of the Model Context Protocol: `environment=mcp` as a client, `flows.mcp_server` as a server.

    python -m tests.conformance.mcp_suite client --suite FOLDER [--json]
    python -m tests.conformance.mcp_suite server --suite FOLDER [--json]

FOLDER is where `npm install @modelcontextprotocol/conformance` installed the suite; without it, `conformance` on the
PATH. The suite needs Node 22 or later, which `npm install node@22` adds to FOLDER. Scenarios that the project refuses
are listed with the reason and not executed: some of them pass with any answer. `--all` executes them too and reports
what the suite says. The exit code is 0 if no scenario failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conformance.report import Case, Report, Unavailable, show

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "@modelcontextprotocol/conformance"
DEFAULT_FOLDER = ROOT / ".conformance"
NODE = 22
"""Lowest major version of Node on which the suite starts."""
TIMEOUT = 120.0
"""Time limit of a scenario, in seconds; the suite's own is 30."""
START = 120.0
"""Time limit for the start of our server, in seconds."""

OAUTH = (
    "no OAuth: a run has no user who could log in; environment.headers sends the token of an environment variable, "
    "and HTTP 401 ends the run with an error that names this key"
)
ELICITATION = (
    "no elicitation: an episode has no user who could answer; the client does not declare the capability and answers "
    "-32600, so that no invented answer enters a reward"
)
FIXTURES = "requires the tool {} of the suite's own example server; flows.mcp_server offers its own tools only"
NO_LOGGING = "flows.mcp_server does not declare the capability logging: progress is returned by the tool status"
NO_RESOURCES = "flows.mcp_server declares tools only; it lists no resources"
NO_PROMPTS = "flows.mcp_server declares tools only; it lists no prompts"
CLIENT_REFUSED = {"auth/": OAUTH, "elicitation-": ELICITATION}
"""Reasons by the beginning of the scenario's name."""
SERVER_REFUSED = {
    "logging-set-level": NO_LOGGING,
    "completion-complete": "flows.mcp_server has no prompts or resource templates whose arguments could be completed",
    "tools-call-simple-text": FIXTURES.format("test_simple_text"),
    "tools-call-image": FIXTURES.format("test_image_content"),
    "tools-call-audio": FIXTURES.format("test_audio_content"),
    "tools-call-embedded-resource": FIXTURES.format("test_embedded_resource"),
    "tools-call-mixed-content": FIXTURES.format("test_multiple_content_types"),
    "tools-call-with-logging": FIXTURES.format("test_tool_with_logging"),
    "tools-call-error": FIXTURES.format("test_error_handling"),
    "tools-call-with-progress": FIXTURES.format("test_tool_with_progress"),
    "tools-call-sampling": FIXTURES.format("test_sampling"),
    "tools-call-elicitation": FIXTURES.format("test_elicitation"),
    "json-schema-2020-12": FIXTURES.format("json_schema_2020_12_tool"),
    "elicitation-": FIXTURES.format("test_elicitation_sep…"),
    "server-sse-polling": FIXTURES.format("test_reconnection"),
    "resources-read-": NO_RESOURCES,
    "resources-templates-": NO_RESOURCES,
    "resources-subscribe": NO_RESOURCES,
    "resources-unsubscribe": NO_RESOURCES,
    "prompts-get-": NO_PROMPTS,
}
REFUSED = {"client": CLIENT_REFUSED, "server": SERVER_REFUSED}


class Suite:
    """The installed suite. Raises Unavailable."""

    def __init__(self, folder: Path | None):
        self.program = _program(folder)
        self.node = _node(self.program)
        self.version = json.loads((self.program.parents[1] / "package.json").read_text())["version"]

    def scenarios(self, side: str) -> list[str]:
        """Return the names of the scenarios of a side, `client` or `server`."""
        output = self._run("list", f"--{side}").stdout
        return re.findall(r"^\s*- (\S+)", output, re.MULTILINE)

    def case(self, side: str, scenario: str, *arguments: str) -> Case:
        """Run one scenario."""
        with tempfile.TemporaryDirectory() as folder:
            ended = self._run(side, *arguments, "--scenario", scenario, "-o", folder)
            checks = [check for path in Path(folder).rglob("checks.json") for check in json.loads(path.read_text())]
        failures = [_message(check) for check in checks if check["status"] == "FAILURE"]
        if ended.returncode == 0 and not failures:
            return Case(
                scenario, "passed", "; ".join(_message(check) for check in checks if check["status"] == "WARNING")
            )
        return Case(scenario, "failed", "; ".join(failures) or ended.stderr[-1000:] or ended.stdout[-1000:])

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self.node, str(self.program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT, check=False)


def _message(check: dict[str, str]) -> str:
    return f"{check['id']}: {check.get('errorMessage') or check['description']}"


def _program(folder: Path | None) -> Path:
    for path in [folder] if folder else [DEFAULT_FOLDER]:
        program = path / "node_modules" / PACKAGE / "dist" / "index.js"
        if program.is_file():
            return program
    on_path = shutil.which("conformance")
    if folder is None and on_path and PACKAGE in str(Path(on_path).resolve()):
        return Path(on_path).resolve()
    where = folder or DEFAULT_FOLDER.name
    raise Unavailable(f"{PACKAGE} is not installed: npm install --prefix {where} {PACKAGE}@0.1.16 node@{NODE}")


def _node(program: Path) -> str:
    installed = next((parent for parent in program.parents if parent.name == "node_modules"), program)
    for node in (str(installed / ".bin" / "node"), shutil.which("node")):
        if node and Path(node).exists():
            version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
            if version and int(version.lstrip("v").split(".")[0]) >= NODE:
                return node
    raise Unavailable(f"the suite needs Node {NODE} or later: npm install --prefix FOLDER node@{NODE}")


def cases(suite: Suite, side: str, refused: dict[str, str]) -> list[Case]:
    """Return the cases of a side. refused: reasons by the beginning of the names of scenarios that are not executed."""
    with contextlib.ExitStack() as stack:
        if side == "client":
            under_test = ("--command", f"{sys.executable} -m tests.conformance.mcp_client")
        else:
            under_test = ("--url", stack.enter_context(served()))
        results = []
        for name in suite.scenarios(side):
            reason = next((text for start, text in refused.items() if name.startswith(start)), "")
            results.append(Case(name, "refused", reason) if reason else suite.case(side, name, *under_test))
        return results


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Yield the URL of `flows.mcp_server` over HTTP, as a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        command = [sys.executable, "-m", "tests.conformance.mcp_http", str(port), "+experiment=smoke", f"root={folder}"]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ)
        try:
            _wait(process, port, Path(log.name))
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.communicate()  # closes its standard input


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise Unavailable(f"flows.mcp_server did not start: {log.read_text()[-500:].strip()}")


def report(side: str, folder: Path | None = None, execute_all: bool = False) -> Report:
    """Return the result of a side, `client` or `server`. execute_all: execute refused scenarios too."""
    command = f"python -m tests.conformance.mcp_suite {side}" + (" --all" if execute_all else "")
    try:
        suite = Suite(folder)
        results = cases(suite, side, {} if execute_all else REFUSED[side])
    except Unavailable as error:
        return Report(f"MCP {side}", "", command, reason=str(error))
    return Report(f"MCP {side}", suite.version, command, results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.mcp_suite", description=__doc__)
    parser.add_argument("side", choices=tuple(REFUSED))
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="folder with node_modules of the suite")
    parser.add_argument("--all", action="store_true", help="execute the refused scenarios too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    return show(report(options.side, options.suite, options.all), options.json)


if __name__ == "__main__":
    sys.exit(main())
