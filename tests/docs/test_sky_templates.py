"""The task templates in sky/ name experiments, overrides and modules that exist; and so do the commands for them.

The `run` part is executed by a shell, with a Python that writes its arguments down: these are composed and checked.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.experiment.compose import check
from tests.docs.pages import PAGES, ROOT, blocks

TEMPLATES = sorted((ROOT / "sky").glob("*.yaml"))
RUN = ROOT / "sky" / "run.yaml"


def commands() -> list[list[str]]:
    """Calls of SkyPilot for the template of a run: in the comments of the templates, and in the documents."""
    comments = [line.lstrip("# ") for path in TEMPLATES for line in path.read_text().splitlines() if line[:1] == "#"]
    shown = [line for page in PAGES for block in blocks(page) for line in block.text.splitlines()]
    return [shlex.split(line) for line in [*comments, *shown] if re.match(r"sky (jobs )?launch .*sky/run\.yaml", line)]


def given(command: list[str]) -> dict[str, str]:
    """The variables that a command sets."""
    pairs = itertools.pairwise(command)
    return dict(value.split("=", 1) for option, value in pairs if option == "--env")


def run_by(template: dict[str, Any], variables: dict[str, str], folder: Path) -> list[str]:
    """The arguments of the module that the template runs."""
    node = folder / "requirements" / "node.sh"
    node.parent.mkdir()
    node.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; printf "%s\\n" "$@"\n')
    node.chmod(0o755)
    environment = {**os.environ, "HOME": str(folder), **template["envs"], **variables}
    done = subprocess.run(
        ["bash", "-c", template["run"]], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    arguments = done.stdout.splitlines()
    assert arguments[:2] == ["-m", "flows.run"]
    return arguments[2:]


def test_all_templates_are_checked():
    assert [path.name for path in TEMPLATES] == ["run.yaml", "serve.yaml"]
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", [[], *commands()], ids=" ".join)
def test_a_run_of_the_template_is_valid(command, tmp_path):
    template = yaml.safe_load(RUN.read_text())
    variables = given(command)
    assert set(variables) <= set(template["envs"]), "SkyPilot refuses others"
    overrides = run_by(template, variables, tmp_path)
    assert f"root={tmp_path}/espalier/runs" in overrides
    (spec,) = check(overrides, named=True)
    assert spec.store == (variables.get("STORE") or None)
    for line in shlex.split(variables.get("OVERRIDES", "")):
        assert line in overrides


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_modules_that_a_template_names_exist(path):
    """Those of this repository; vLLM is installed by the template itself."""
    for module in re.findall(r"python -m ((?:flows|components)[\w.]+)", path.read_text()):
        assert importlib.util.find_spec(module) is not None, module
