"""The conformance suites: what each needs, the command that runs it, and its output as a report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.conformance.report import Case, Report, Unavailable

ROOT = Path(__file__).resolve().parents[2]
NPM = ROOT / ".conformance"
"""Folder of the npm packages."""
RUNS = NPM / "runs"
"""Folder of the evaluations with which suites are compared."""
PYTHONS = ROOT / ".venv-conformance"
"""Folder of the Python environments, one for each requirements file."""
NPM_PACKAGES = ("@modelcontextprotocol/conformance@0.1.16", "node@22")
REQUIREMENTS = {
    "inspect": ROOT / "requirements" / "conformance-inspect.txt",
    "lm-eval": ROOT / "requirements" / "conformance-lm-eval.txt",
    "llama": ROOT / "requirements" / "conformance-llama.txt",
}
TIMEOUT = 3600.0
"""Time limit of a suite, in seconds."""
SHOWN_ERROR = 400
"""Number of characters that a reason has of an error message."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """A suite. arguments: those of its runner; they raise Unavailable if what it needs is missing."""

    name: str
    module: str
    arguments: Callable[[], list[str]]
    convert: Callable[[str, Values], Report] = lambda command, value: Report.from_json(value)

    @property
    def installs(self) -> str:
        """Name of what `install` installs for it: `npm`, a name of REQUIREMENTS, or nothing."""
        return {
            "MCP client": "npm",
            "MCP server": "npm",
            "Inspect": "inspect",
            "lm-eval": "lm-eval",
            "exports": "llama",
        }.get(self.name, "")


def install(name: str) -> None:
    """Install what a suite needs into a folder of its own; do nothing if it is there. Raises Unavailable."""
    if name == "npm":
        if all((NPM / "node_modules" / package.rpartition("@")[0]).is_dir() for package in NPM_PACKAGES):
            return
        if not shutil.which("npm"):
            raise Unavailable("npm is not installed")
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(NPM), *NPM_PACKAGES])
    elif name:
        python = PYTHONS / name / "bin" / "python"
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(PYTHONS / name)])
        uv = [str(ROOT / "requirements" / "uv.sh"), sys.executable, "pip", "install", "--quiet"]
        _run([*uv, "--python", str(python), "-r", str(REQUIREMENTS[name])])


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Unavailable(f"{' '.join(command[:3])}: {(ended.stderr or ended.stdout).strip()[-SHOWN_ERROR:]}")


def run(suite: Suite) -> Report:
    """Run a suite as a process of its own; a suite that cannot run gives a report with the reason."""
    command = f"python -m tests.conformance.{suite.module}"
    try:
        arguments = suite.arguments()
        command = " ".join([command, *(_shown(argument) for argument in arguments)])
        ended = subprocess.run(
            [sys.executable, "-m", f"tests.conformance.{suite.module}", *arguments, "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        report = suite.convert(command, json.loads(ended.stdout.strip().splitlines()[-1]))
        return replace(report, suite=suite.name, command=command) if suite in LISTED else report
    except Unavailable as error:
        return Report(suite.name, "", command, reason=str(error))
    except subprocess.TimeoutExpired:
        return Report(suite.name, "", command, [Case("all", "failed", f"did not end within {TIMEOUT:g} s")])
    except (ValueError, LookupError):
        return Report(
            suite.name, "", command, [Case("all", "failed", ended.stderr.strip()[-SHOWN_ERROR:] or "no output")]
        )


def _shown(argument: str) -> str:
    """Return an argument as the table shows it: paths in the checkout are relative, others are FOLDER."""
    if argument.startswith(f"{ROOT}/"):
        return str(Path(argument).relative_to(ROOT))
    return "FOLDER" if os.path.isabs(argument) else argument


def folder(variable: str, content: str) -> str:
    """Return the folder that an environment variable names. Raises Unavailable."""
    value = os.environ.get(variable, "")
    if not value:
        raise Unavailable(f"{variable} is not set; expected {content}")
    if not Path(value).is_dir():
        raise Unavailable(f"{variable} = {value}: no such folder; expected {content}")
    return str(Path(value).absolute())


def python_of(name: str) -> str:
    """Return the interpreter of an installed environment. Raises Unavailable."""
    python = PYTHONS / name / "bin" / "python"
    if not python.exists():
        raise Unavailable(
            f"{REQUIREMENTS[name].relative_to(ROOT)} is not installed: python -m tests.conformance --install"
        )
    return str(python)


def rl_libraries() -> list[str]:
    """Return the arguments of the comparison with verl and torchrl. Raises Unavailable."""
    python = os.environ.get("RL_LIBRARIES", "")
    if not python:
        raise Unavailable("RL_LIBRARIES is not set; expected the Python of an environment with verl and torchrl")
    return ["--python", python]


def tau_report(command: str, value: Values) -> Report:
    """Return the report of tau-bench; a case is one comparison with the published data."""
    cases = [
        _equal(f"gold actions, {row['domain']} {row['split']}", row["tasks"] - row["reward_1"], row["tasks"])
        for row in value["gold"]
    ]
    for name in ("recorded", "displayed"):
        cases.append(_equal(f"{name} conversations", len(value[name]["differences"]), None))
    return Report("tau-bench", "published data", command, cases)


def _equal(name: str, differences: int, total: int | None) -> Case:
    if not differences:
        return Case(name, "passed")
    return Case(name, "failed", f"{differences}{f' of {total}' if total else ''} differ")


def discovered(listed: list[Suite]) -> list[Suite]:
    """Return the listed suites whose runner exists, then those of other runners of this folder, without arguments.

    A runner is a program that ends with `show(report, …)`.
    """
    folder_of_runners = Path(__file__).parent
    runners = [
        path.stem
        for path in sorted(folder_of_runners.glob("*.py"))
        if '\nif __name__ == "__main__":' in (text := path.read_text()) and "show(" in text
    ]
    listed = [suite for suite in listed if (folder_of_runners / f"{suite.module}.py").exists()]
    modules = {suite.module for suite in listed}
    others = [Suite(name.replace("_", " "), name, list) for name in runners if name not in modules]
    return listed + others


def exports() -> list[str]:
    """Return the arguments of the readers of exports, with llama.cpp if it is installed."""
    try:
        return ["--llama-python", python_of("llama")]
    except Unavailable:
        return []


LISTED = [
    Suite("MCP client", "mcp_suite", lambda: ["client"]),
    Suite("MCP server", "mcp_suite", lambda: ["server"]),
    Suite("Inspect", "inspect_ai", lambda: ["--python", python_of("inspect"), "--root", str(RUNS)]),
    Suite("lm-eval", "lm_eval", lambda: ["--python", python_of("lm-eval"), "--root", str(RUNS)]),
    Suite(
        "Open Responses",
        "open_responses",
        lambda: ["--suite", folder("OPEN_RESPONSES", "a checkout of openresponses/openresponses")],
    ),
    Suite("tau-bench", "tau_bench", lambda: ["--data", folder("TAU_BENCH", "the data of tau-bench")], tau_report),
    Suite("RL libraries", "algorithms", rl_libraries),
    Suite("exports", "exports", exports),
]
SUITES = discovered(LISTED)
