"""A policy for evaluation programs of other people: what `flows.evaluate` measured of it, and a server of it.

The policy is a packaged model without training, evaluated greedily on word problems. The server is
`python -m components.inference.server`, as users start it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.trajectories.store import read_trajectories
from tests.conformance.report import Unavailable

ROOT = Path(__file__).resolve().parents[2]
NAME = "policy"
"""Model name of the server."""
MAX_TOKENS = 32
MODELS = {"smollm2": "model=smollm2_135m", "tiny": "size=tiny"}
"""Overrides of the policies: real weights, and random ones for a quick check of the protocol."""
ENVIRONMENTS = {
    "arithmetic": ["environment.difficulties=[1,2]", "agent.max_turns=1"],
    "calculator": ["environment.difficulties=[1,2]", "agent.max_turns=3"],
}


@dataclass(frozen=True)
class Item:
    """An evaluated scenario. prompt: messages before the first answer. messages: those after it, with the answers."""

    id: str
    prompt: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    answer: str
    success: bool


@dataclass(frozen=True)
class Evaluation:
    """Items of an environment, and the folder of the model that played them."""

    model: Path
    items: list[Item]


def evaluate(root: Path, model: str, environment: str, items: int) -> Evaluation:
    """Return the greedy episodes of `flows.evaluate` on held-out scenarios. Raises Unavailable.

    root: folder of the run, in which an earlier evaluation is reused. model, environment: of MODELS and ENVIRONMENTS.
    """
    overrides = [
        *("+experiment=smoke", "policies=[base]", f"environment={environment}", *ENVIRONMENTS[environment]),
        *(MODELS[model], "model.max_length=1024", f"environment.heldout={items}", f"evaluate.scenarios={items}"),
        *("evaluate.temperature=0", f"agent.max_tokens={MAX_TOKENS}", f"root={root}", "--json"),
    ]
    if model != "tiny":
        overrides.append("size=full")
    ended = subprocess.run(
        [sys.executable, "-m", "flows.evaluate", *overrides], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise Unavailable(f"flows.evaluate ended with exit code {ended.returncode}: {ended.stderr[-500:].strip()}")
    key = json.loads(ended.stdout.splitlines()[-1])["policies"]["base"]["key"]
    episodes = read_trajectories(root / "artifacts" / key / "trajectories.parquet")
    folders = sorted(path.parent for path in (root / "models").glob("*/config.json"))
    folder = next(path for path in folders if (path.name.startswith("smollm2")) == (model == "smollm2"))
    return Evaluation(folder, [_item(episode) for episode in episodes])


def _item(episode: Any) -> Item:
    messages = [_message(message) for message in episode.histories[0].messages]
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    answer = str(episode.scenario.input["answer"])
    return Item(episode.scenario.id, messages[:first], messages[first:], answer, bool(episode.outcome["success"]))


def _message(message: Any) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, **({"calls": calls} if calls else {})}


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """Yield the base URL (`…/v1`) of a server of a model folder. Raises Unavailable."""
    command = [sys.executable, "-m", "components.inference.server", str(model), "--name", NAME, "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "ESPALIER_SERVER_KEY"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield f"{address[0]}/v1"
                return
        raise Unavailable(f"components.inference.server did not start: {''.join(lines)[-500:].strip()}")
    finally:
        process.terminate()
        process.communicate()
