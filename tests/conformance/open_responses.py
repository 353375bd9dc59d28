"""Open Responses: the compliance suite of the specification against our server.

    python -m tests.conformance.open_responses --suite FOLDER [--policy scripted|tiny|smollm2|DIR] [--json]

FOLDER is a checkout of github.com/openresponses/openresponses, with its packages: `bun install`, or `npm install` and
`npm install --no-save bun`. Its `bin/compliance-test.ts` runs by bun, as its authors run it, else by tsx, against a
server that this program starts on a policy:

    scripted    random weights whose logits are replaced by those of given answers: a text, or a call if there are tools
    tiny        the same random weights as they are
    smollm2     SmolLM2-135M-Instruct
    DIR         a model folder

A case that the server rejects with status 400 and the name of what it does not support is `refused`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conformance.report import Case, Report, show

CLI = Path("bin/compliance-test.ts")
POLICIES = {"tiny": ("tiny", "random"), "smollm2": ("smollm2-135m-instruct", "package")}
SCRIPTED = "scripted"
LENGTH = 2048
CACHE = Path(tempfile.gettempdir()) / "open_responses"
SECONDS = 900
"""Time limit of the suite on one policy."""
TEXT = "Ahoy! Your name is Alice: 1, 2, 3, 4, 5. \N{WAVING HAND SIGN}"
CALL = {"location": "San Francisco, CA"}


def main() -> int:
    options = arguments()
    return show(run(options.suite, options.policy, options.cache), options.json)


def run(suite: Path, policy: str = SCRIPTED, cache: Path = CACHE) -> Report:
    """Return the results of the suite in a folder on a policy. cache: folder of converted weights."""
    title = f"Open Responses ({policy if policy in (SCRIPTED, *POLICIES) else Path(policy).name})"
    shown = "python -m tests.conformance.open_responses --suite FOLDER"
    command, reason = suite_command(suite)
    if reason:
        return Report(title, "", shown, reason=reason)
    with served(policy, cache) as url:
        return Report(title, version_of(suite), shown, run_suite(command, suite, url))


def suite_command(suite: Path) -> tuple[list[str], str]:
    """Return the command that runs the suite, or the reason why nothing can."""
    if not (suite / CLI).is_file():
        return [], f"--suite={suite}: no {CLI} there; expected a checkout of github.com/openresponses/openresponses"
    installed = (suite / "node_modules" / ".bin").absolute()
    if bun := shutil.which("bun") or shutil.which("bun", path=str(installed)):
        return [bun, "run", str(CLI)], ""
    if not shutil.which("node"):
        return [], f"neither bun nor node is installed: npm install --no-save bun in {suite}"
    if not (installed / "tsx").is_file():
        return [], f"no bun, and no tsx in {suite}: npm install --no-save bun there"
    return [str(installed / "tsx"), str(CLI)], ""


def version_of(suite: Path) -> str:
    """Return the commit of the checkout; the version of its package if it is no repository."""
    if (suite / ".git").exists():
        head = subprocess.run(["git", "-C", suite, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        return head.stdout.strip()
    return f"version {json.loads((suite / 'package.json').read_text())['version']}"


def run_suite(command: list[str], suite: Path, url: str) -> list[Case]:
    """Return the cases in the order of the suite."""
    done = subprocess.run(
        [*command, "--base-url", url, "--api-key", "none", "--model", "policy", "--json"],
        cwd=suite,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    try:
        results = json.loads(done.stdout)["results"]
    except ValueError:
        raise SystemExit(f"the suite ended with exit status {done.returncode}: {done.stderr.strip()[-2000:]}") from None
    order = re.findall(r'^    id: "([\w-]+)"', (suite / "src/lib/compliance-tests.ts").read_text(), re.MULTILINE)
    cases = [case_of(result) for result in results]
    return sorted(cases, key=lambda case: order.index(case.name) if case.name in order else len(order))


def case_of(result: dict[str, Any]) -> Case:
    """Return a result of the suite, `refused` if the server rejected the request by the name of a parameter."""
    name, reason = result["id"], "; ".join(result.get("errors") or [])
    if refusal := re.fullmatch(r"HTTP 400: (\{.*\})", reason, re.DOTALL):
        error = json.loads(refusal[1])["error"]
        if error["param"]:
            return Case(name, "refused", error["message"])
    return Case(name, result["status"], reason or ("" if result["status"] == "passed" else "no reason is given"))


@contextlib.contextmanager
def served(policy: str, cache: Path) -> Iterator[str]:
    """Serve a policy within the block under the name `policy`; yield the URL."""
    from components.inference.app import AppOptions
    from components.inference.server import ModelServer
    from components.inference.transformers.engine import TransformersEngine
    from components.models.spec import ModelSpec
    from components.models.weights import prepare

    folder = Path(policy)
    if policy in (SCRIPTED, *POLICIES):
        name, source = POLICIES["tiny" if policy == SCRIPTED else policy]
        folder = prepare(ModelSpec(name=name, source=source, max_length=LENGTH), cache)
    engine = TransformersEngine(folder, max_length=LENGTH)
    if policy == SCRIPTED:
        follow_script(engine)
    try:
        with ModelServer(engine, "policy", AppOptions(decode=engine.tokenizer.decode)) as server:
            yield server.url
    finally:
        engine.close()


def follow_script(engine: Any) -> None:
    """Replace the engine's logits by those of the scripted answers, which are then sampled, parsed and streamed as any
    other."""
    decode_logits, chat = engine.batch._decode_logits, engine.format

    def answer(request: Any) -> list[int]:
        text = TEXT
        if request.tools:
            call = {"name": request.tools[0]["function"]["name"], "arguments": CALL}
            arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in CALL.items())
            pythonic = f"[{call['name']}({arguments})]"
            text = f"<tool_call>{json.dumps(call)}</tool_call>" if chat.native_tools else pythonic
        return [*chat.encode(text), chat.end_id]

    def scripted_logits() -> Any:
        rows, logits = list(engine.batch.active), decode_logits()
        logits.fill_(-1e9)
        for index, row in enumerate(rows):
            logits[index, answer(row.request)[len(row.sampled)]] = 0.0
        return logits

    engine.batch._decode_logits = scripted_logits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", type=Path, required=True, help="checkout of openresponses/openresponses")
    parser.add_argument("--policy", default=SCRIPTED, help=f"{SCRIPTED}, {', '.join(POLICIES)}, or a model folder")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of converted weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
