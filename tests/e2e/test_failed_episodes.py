"""The reason of a failed episode stands in the console, the log and the report of a run."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

import pytest

from tests.e2e.test_smoke import Place

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


@pytest.mark.timeout(1800)
def test_the_reasons_are_named_everywhere(tmp_path, monkeypatch, command, finished):
    place = Place(tmp_path)
    (tmp_path / "shop_agents.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    line = (*SHORT, "agent.function=shop_agents.agent", "allow=[shop_agents]")
    done = finished(place, *line, "evaluate.max_failures=2")
    report = html.unescape(Path(done.result["report"]).read_text())
    (log,) = (place.root / "logs").glob("smoke-*[0-9].log")
    reasons = ("KeyError: 'no such page'", "ValueError: status 401 for api_key=")
    for text in (done.errors, log.read_text(), report):
        assert [reason in text for reason in reasons] == [True, True]
        assert TOKEN not in text
    assert re.search(r"evaluate\[start\] failed: 1 AgentError, KeyError \(agent\): \S+/0: KeyError", done.errors)
    code, _, errors = command(*place.overrides(*line, "evaluate.max_failures=0", "seed=1"))
    assert code == 1
    log = max((place.root / "logs").glob("smoke-*[0-9].log"), key=os.path.getmtime)
    for text in (errors, log.read_text()):
        assert "KeyError: 'no such page'" in text
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("TooManyFailures: evaluate")
