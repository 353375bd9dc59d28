"""Inspect evaluates a served policy, and agrees with `flows.evaluate` scenario by scenario.

    python -m tests.conformance.inspect_ai --python PYTHON [--model tiny] [--items 4] [--root FOLDER] [--json]

PYTHON is the interpreter of an environment with `inspect-ai` and `openai`; it is not Espalier's. `flows.evaluate` plays
held-out scenarios greedily; `inspect eval` asks a server of the same model through its provider `openai-api`, in two
epochs: word problems that are answered in one message, and word problems with two tools, whose calls Inspect executes.
A case passes if every epoch has the same messages, calls, results of tools and score as the episode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conformance import policy
from tests.conformance.report import Case, Report, Unavailable, show

SUITE = "Inspect"
COMMAND = "python -m tests.conformance.inspect_ai --python PYTHON"
TASKS = Path(__file__).with_name("inspect_tasks.py")
EPOCHS = 2
TIMEOUT = 1800.0
"""Time limit of an evaluation, in seconds."""


def version_of(python: Path, package: str) -> str:
    """Return the version of a package in an environment. Raises Unavailable."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    try:
        ended = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"--python {python}: {error.strerror}; expected the Python of an environment") from None
    if ended.returncode:
        raise Unavailable(f"--python {python}: its environment has no package {package}; install it there")
    return ended.stdout.strip()


def run_inspect(python: Path, task: str, items: Sequence[policy.Item], url: str) -> list[dict[str, Any]]:
    """Return the samples of Inspect's log. Raises Unavailable if it does not complete."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "items.json"
        file.write_text(json.dumps([{"id": item.id, "prompt": item.prompt, "answer": item.answer} for item in items]))
        command = [
            *(python, "-m", "inspect_ai", "eval", f"{TASKS}@{task}", "-T", f"items={file}"),
            *("--model", f"openai-api/espalier/{policy.NAME}", "--model-base-url", url, "--temperature", "0"),
            *(
                "--max-tokens",
                str(policy.MAX_TOKENS),
                "--epochs",
                str(EPOCHS),
                "--max-retries",
                "0",
                "-M",
                "strict_tools=false",
            ),
            *("--log-format", "json", "--log-dir", str(Path(folder) / "logs"), "--display", "plain"),
        ]
        environment = {
            **os.environ,
            "ESPALIER_API_KEY": "none",
            "PYTHONPATH": str(policy.ROOT),
            "INSPECT_TELEMETRY": "",
            "XDG_DATA_HOME": folder,
        }
        ended = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        logs = list((Path(folder) / "logs").glob("*.json"))
        if ended.returncode or not logs:
            raise Unavailable(f"inspect eval ended with exit code {ended.returncode}: {ended.stderr[-800:].strip()}")
        log = json.loads(logs[0].read_text())
    if log["status"] != "success":
        raise Unavailable(f"inspect eval: {log['status']}: {(log.get('error') or {}).get('message', '')[-800:]}")
    samples: list[dict[str, Any]] = log["samples"]
    return samples


def compare(item: policy.Item, samples: Sequence[dict[str, Any]]) -> str:
    """Return the first difference between an episode and the samples of its scenario; empty if there is none."""
    if len(samples) != EPOCHS:
        return f"{len(samples)} epochs; expected {EPOCHS}"
    for sample in samples:
        messages = [_message(message) for message in sample["messages"][len(item.prompt) :]]
        for index, (ours, theirs) in enumerate(zip(item.messages, messages, strict=False)):
            if ours != theirs:
                return f"epoch {sample['epoch']}, message {index}: evaluate {ours!r}, Inspect {theirs!r}"
        if len(item.messages) != len(messages):
            return f"epoch {sample['epoch']}: evaluate has {len(item.messages)} messages, Inspect {len(messages)}"
        success = next(iter(sample["scores"].values()))["value"] == "C"
        if success != item.success:
            return f"epoch {sample['epoch']}: evaluate success = {item.success}, Inspect {success}"
    return ""


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    calls = [{"name": call["function"], "arguments": call["arguments"]} for call in message.get("tool_calls") or []]
    return {"role": message["role"], "content": text, **({"calls": calls} if calls else {})}


def cases(python: Path, root: Path, model: str, items: int) -> list[Case]:
    """Return a case for each scenario. Raises Unavailable."""
    results = []
    for environment in policy.ENVIRONMENTS:
        evaluation = policy.evaluate(root, model, environment, items)
        with policy.served(evaluation.model) as url:
            samples = run_inspect(python, environment, evaluation.items, url)
            strict = strict_tools(url)
        for item in evaluation.items:
            difference = compare(item, [sample for sample in samples if sample["id"] == item.id])
            results.append(Case(item.id, "failed" if difference else "passed", difference))
    return [*results, strict]


def strict_tools(url: str) -> Case:
    """Return the case of Inspect's default, tools with `strict: true`. The tasks run with `-M strict_tools=false`,
    because the policy that is compared is not constrained."""
    function = {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}
    body = {
        "model": policy.NAME,
        "messages": [{"role": "user", "content": "Look."}],
        "tools": [{"type": "function", "function": {**function, "strict": True}}],
        "max_tokens": 1,
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    name = "strict tools"
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError as error:
        message = str(json.load(error)["error"]["message"])
        return Case(name, "failed", f"HTTP {error.code}: {message}")
    return Case(name, "passed")


def report(python: Path, root: Path | None = None, model: str = "smollm2", items: int = 4) -> Report:
    """Return the comparison of all scenarios."""
    try:
        version = version_of(python, "inspect-ai")
        with tempfile.TemporaryDirectory() as folder:
            return Report(SUITE, version, COMMAND, cases(python, root or Path(folder), model, items))
    except Unavailable as error:
        return Report(SUITE, "", COMMAND, reason=str(error))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the comparisons with evaluation programs share."""
    parser.add_argument("--python", type=Path, required=True, help="interpreter of an environment with the program")
    parser.add_argument("--model", choices=tuple(policy.MODELS), default="smollm2", help="tiny: random weights")
    parser.add_argument("--items", type=int, default=4, help="scenarios of each environment (default: 4)")
    parser.add_argument("--root", type=Path, help="folder of the evaluations, which are reused; none: a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.inspect_ai", description=__doc__)
    add_options(parser)
    options = parser.parse_args(arguments)
    root = options.root.absolute() if options.root else None
    return show(report(options.python, root, options.model, options.items), options.json)


if __name__ == "__main__":
    sys.exit(main())
