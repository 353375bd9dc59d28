"""docs/guides/adaptation.md: its commands with the tiny model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands

PAGE = ROOT / "docs" / "guides" / "adaptation.md"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forks_of_one_policy_adapt_to_a_person_a_domain_and_new_tools(tmp_path):
    rated = [{"prompt": f"Order {n}?", "completion": "It is on its way.", "label": n % 2 == 0} for n in range(8)]
    said = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]} for n in "abcd"
    ]
    for name, rows in (("ada", rated), ("returns", said)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    general, *adapted, compared = commands(PAGE)
    assert len(adapted) == 3
    first = tiny(general, tmp_path)
    for command in adapted:
        fork = tiny(command, tmp_path)
        assert fork["policy_digest"] != first["policy_digest"]
        assert "train[sft]" not in fork["stages"]
    policies = tiny(compared, tmp_path, "--json")["policies"]
    assert len(policies) == 4


def tiny(command: str, root: Path, *more: str) -> dict:
    """Run a command of the page with the tiny model and its files below `root`. Return its result line."""
    command = command.replace("data.path=", f"data.path={root}/").replace("rounds=12", "rounds=2")
    words = [*shlex.split(command)[1:], "size=tiny", f"root={root}/runs", *more]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
