"""The reason of a failed episode stands in the console, the log and the report of a run."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CODE = Path(__file__).resolve().parents[2]
TOKEN = "ghp_" + "a1B2" * 9

AGENT = f"""
seen = []


async def agent(scenario, base_url, api_key):
    seen.append(scenario.id)
    if len(seen) % 4 == 2:
        raise KeyError("no such page")
    if len(seen) % 4 == 3:
        raise ValueError("status 401 for api_key={TOKEN}")
    return {{"success": True}}
"""
SHORT = ("rounds=0", "warmup=none", "deploy=none", "evaluate.scenarios=4", "evaluate.concurrency=1")


@pytest.fixture
def start(tmp_path):
    (tmp_path / "shop_agents.py").write_text(AGENT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW"))}
    environment = {**kept, "PYTHONPATH": f"{CODE}{os.pathsep}{tmp_path}"}

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        own = ("agent.function=shop_agents.agent", "allow=[shop_agents]", f"root={tmp_path}/runs")
        command = [sys.executable, "-m", "flows.run", "+experiment=smoke", *SHORT, *own, *overrides]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)

    return run


def test_the_reasons_are_named_everywhere(start, tmp_path):
    done = start("evaluate.max_failures=2")
    assert done.returncode == 0, done.stderr
    report = html.unescape(Path(json.loads(done.stdout)["report"]).read_text())
    (log,) = (tmp_path / "runs" / "logs").glob("smoke-*[0-9].log")
    reasons = ("KeyError: 'no such page'", "ValueError: status 401 for api_key=")
    for text in (done.stderr, log.read_text(), report):
        assert [reason in text for reason in reasons] == [True, True]
        assert TOKEN not in text
    assert re.search(r"evaluate\[start\] failed: 1 AgentError, KeyError \(agent\): \S+/0: KeyError", done.stderr)
    too_many = start("evaluate.max_failures=0", "seed=1")
    assert too_many.returncode == 1
    log = max((tmp_path / "runs" / "logs").glob("smoke-*[0-9].log"), key=os.path.getmtime)
    for text in (too_many.stderr, log.read_text()):
        assert "KeyError: 'no such page'" in text
    assert "Traceback" not in too_many.stderr
    assert too_many.stderr.splitlines()[-1].startswith("TooManyFailures: evaluate")
