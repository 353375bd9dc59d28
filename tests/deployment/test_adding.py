"""A new deployment target is a module and a config file; nothing else changes."""

from __future__ import annotations

import json

import pytest

from components.deployment.targets.spec import TARGETS
from tests.scratch_copy import Checkout

MODULE = '''
"""Target of a test."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from components.deployment.targets.base import Deployment, DeploymentTarget, Release


class PierTarget(DeploymentTarget):
    """Pier of a harbour."""

    name: Literal["pier"] = "pier"
    berth: int = Field(ge=1)
    """Number of the berth."""

    on_this_machine: ClassVar[bool] = True

    def check(self, name: str, active: Deployment | None = None) -> None:
        print("checked", name, self.berth)

    def deploy(self, release: Release, root: Path) -> Deployment:
        return Deployment(self.name, release.version, release.digest, None, release.name)

    def alive(self, deployment: Deployment) -> bool:
        return True

    def take_back(self, deployment: Deployment) -> None:
        return None
'''

CONFIG = """
# Moor a champion at a pier.
defaults:
  - export
  - _self_
target:
  name: pier
  berth: 3
"""

USE = """
import json
from components.deployment.targets.base import Deployment
from components.errors import SpecError
from flows.runs.deployments import state
from flows.experiment.compose import compose
from flows.release.deployment import check
from flows.release.deployment_ledger import ActiveRelease

def problems(*overrides):
    try:
        compose(["+experiment=quickstart", *overrides])
    except SpecError as error:
        return [str(problem) for problem in error.problems]

spec = compose(["+experiment=quickstart", "deploy=pier", "deploy.target.berth=7"])
check(spec)
print(json.dumps({
    "dump": spec.model_dump(mode="json")["deploy"]["target"],
    "name": problems("deploy=pier", "deploy.target.name=peer"),
    "bound": problems("deploy=pier", "deploy.target.berth=0"),
    "key": problems("deploy=pier", "+deploy.target.birth=1"),
    "state": state(ActiveRelease(None, Deployment("pier", "1", "d", None, "m", details={"spec": '{"berth": 1}'}))),
}))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    files = {"components/deployment/targets/pier.py": MODULE, "conf/deploy/pier.yaml": CONFIG}
    checkout = Checkout(tmp_path_factory.mktemp("copy"))
    checkout.add(files)
    checked, data = checkout.output(USE).splitlines()
    return {"checked": checked, **json.loads(data)}


def test_it_is_composed_checked_and_dumped_like_any_other(outcome):
    assert outcome["dump"] == {"name": "pier", "berth": 7}
    assert outcome["checked"].startswith("checked ")
    assert outcome["checked"].endswith(" 7")
    assert outcome["state"] == "up"


def test_its_mistakes_are_reported_like_those_of_any_other(outcome):
    names = ", ".join(sorted([*TARGETS, "pier"]))
    expected = f"'peer': expected one of {names}. Did you mean 'pier'?"
    assert outcome["name"] == [f"deploy.target.name: {expected}"]
    assert outcome["bound"] == ["deploy.target.berth: 0: expected at least 1"]
    (misspelt,) = outcome["key"]
    assert "expected one of name, berth" in misspelt
