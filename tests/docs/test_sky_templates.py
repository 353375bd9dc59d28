"""What sky/run.yaml launches: its own commands and those of the docs name experiments and keys that exist."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise

import pytest
import yaml

from flows.config import check
from tests.docs.pages import PAGES, ROOT, commands, words

TEMPLATE = ROOT / "sky" / "run.yaml"
LINES = [
    line.removeprefix("#").strip()
    for line in [
        *TEMPLATE.read_text(encoding="utf-8").splitlines(),
        *(line for page in PAGES for line in commands(page)),
    ]
    if re.match(r"(#\s*)?sky (jobs )?launch .*sky/run\.yaml", line)
]


def test_commands_are_there():
    assert len(LINES) >= 3


@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_every_launch_composes(line):
    template = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    arguments = words(line)
    chosen = dict(value.split("=", 1) for option, value in pairwise(arguments) if option == "--env")
    assert chosen.keys() <= template["envs"].keys()
    shown = template["run"].replace(".venv/bin/python", "printf '%s\\n'")
    environment = {"HOME": "/home/somebody", **template["envs"], **chosen}
    run = subprocess.run(["bash", "-ec", shown], env=environment, capture_output=True, text=True, check=True)
    module, name, *overrides = run.stdout.splitlines()
    assert (module, name) == ("-m", "flows.run")
    assert overrides[0] == f"+experiment={chosen.get('EXPERIMENT', 'quickstart')}"
    check(overrides)
