"""A new place is its package, its file in conf/compute and its test: added to a copy of the repository."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from components.compute.spec import PLACES
from flows.experiment.config_loader import CONF
from tests.flows.test_together import train_request, training_root
from tests.scratch_copy import Checkout

ROOT = Path(__file__).parent.parent.parent

SPEC = '''
from typing import Literal

from pydantic import Field

from components.compute.place import Place
from components.compute.runners import ProcessRunner, RunnerContext


class NicePlace(Place):
    """Subprocess that leaves the processor to others."""

    name: Literal["nice"] = "nice"
    niceness: int = Field(10, ge=0, le=19)
    """Niceness of the process."""

    def describe(self) -> str:
        return f"niceness {self.niceness}"

    def refusal(self, name: str, stage: str, distributed) -> str | None:
        return f"is too slow for {stage}" if stage == "deploy" else None

    def runner(self, name: str, context: RunnerContext) -> ProcessRunner:
        command = ["nice", "-n", str(self.niceness), *context.process.command]
        return ProcessRunner(context.process, command)
'''
YAML = """\
# Training in a process that leaves the processor to others.
defaults:
  - local
  - _self_

places:
  nice:
    name: nice
    niceness: 7        # niceness of the process
stages:
  train: nice
"""
PROGRAM = """
import contextlib, json, os, sys
from pathlib import Path
import psutil
from docs import reference
from components.errors import SpecError
from flows.execution.executor import Execution
from flows.experiment.compose import compose
from flows.planning.plan import plan
from flows.stages.base import Context, Request
from flows.terminal.console import Console

root = Path(sys.argv[1])
options = ["+experiment=smoke", f"root={root}", "compute=nice"]

def problems(*more):
    try:
        compose([*options, *more])
    except SpecError as error:
        return [str(problem) for problem in error.problems]

niceness = set()
def show(done, total, values=None):
    niceness.update(child.nice() - os.nice(0) for child in psutil.Process().children())

spec = compose(options)
execution = Execution(spec, Context.at(root), Console(), None, root / "log")
execution.watchers.append(lambda label, unit: contextlib.nullcontext(show))
done = execution.stage("train[1]", 1, Request.from_json(json.loads(sys.argv[2])))
execution.close()
print(json.dumps({
    "where": {stage.label: stage.where for stage in plan(spec).stages},
    "unknown": problems("+compute.places.other.name=nise"),
    "refused": problems("compute.stages.deploy=nice"),
    "status": done.status,
    "kind": done.artifact.kind,
    "niceness": sorted(niceness),
    "documented": "`compute.places.NAME.niceness`" in reference.generated(),
}))
"""


@pytest.mark.timeout(1800)
def test_package_and_yaml_file_add_a_place(tmp_path):
    """The experiment composes, the plan and the reference show the place, and a stage runs there."""
    checkout = Checkout(tmp_path / "repository")
    package = "components/compute/nice"
    checkout.add({f"{package}/__init__.py": "", f"{package}/spec.py": SPEC, "conf/compute/nice.yaml": YAML})
    root = training_root(tmp_path / "root")
    result = checkout.run(PROGRAM, str(root), json.dumps(train_request().to_json()))
    assert result.pop("where")["train[1]"] == "nice: niceness 7"
    assert result == {
        "unknown": [
            "compute.places.other.name: 'nise': expected one of accelerate, dask, local, nice, process, ray, sky, "
            "torchrun. Did you mean 'nice'?"
        ],
        "refused": ["compute.stages.deploy: 'nice' is too slow for deploy"],
        "status": "ran",
        "kind": "checkpoint",
        "niceness": [7],
        "documented": True,
    }


def test_every_place_has_its_yaml_file():
    assert set(PLACES) >= {"local", "process", "sky", "torchrun"}
    assert {name for name in PLACES if not (CONF / "compute" / f"{name}.yaml").is_file()} == set()


def test_no_code_outside_asks_for_the_class_of_a_place():
    classes = {"Place", *(place.__name__ for place in PLACES.values())}
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("components", "flows", "hydra_plugins", "docs")
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ROOT / "components" / "compute")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "issubclass")
        and classes & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    ]
    assert calls == []
