"""Unions of specs that are derived from the modules of a package."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from components.deployment.targets.spec import TARGETS
from components.inference.spec import ENGINES
from components.rewards.llm.spec import JUDGE_MODELS
from components.specs import Spec
from components.specs.declared import discover, union_of
from flows.experiment.config_loader import CONF

BASE = """
from abc import abstractmethod
from typing import Literal
from components.specs import Spec

class Shape(Spec):
    name: str
    @abstractmethod
    def area(self) -> float: ...
"""
MEMBER = """
from typing import Literal
from {package}.base import Shape

class {name}(Shape):
    name: Literal["{label}"] = "{label}"
    size: int = 1
    def area(self) -> float:
        return self.size
"""


def write(folder, package: str, **members: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    (folder / package / "base.py").write_text(BASE)
    for name, label in members.items():
        (folder / package / f"{name.lower()}.py").write_text(MEMBER.format(package=package, name=name, label=label))


def test_every_concrete_spec_of_a_package_is_a_member(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "shapes_of_a_test", Square="square", Circle="circle")
    from shapes_of_a_test.base import Shape

    members: dict[str, type[Spec]] = discover("shapes_of_a_test", Shape)
    assert list(members) == ["circle", "square"]
    adapter: TypeAdapter[Any] = TypeAdapter(union_of(members.values()))
    assert type(adapter.validate_python({"name": "square", "size": 3})) is members["square"]
    with pytest.raises(ValueError, match="'circle', 'square'"):
        adapter.validate_python({"name": "triangle"})


def test_a_name_that_is_used_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "doubled_shapes_of_a_test", Square="square", Quadrat="square")
    from doubled_shapes_of_a_test.base import Shape

    with pytest.raises(AssertionError, match="'square' is the name of"):
        discover("doubled_shapes_of_a_test", Shape)


@pytest.mark.parametrize(
    ("group", "members", "count"), [("inference", ENGINES, 3), ("judge_model", JUDGE_MODELS, 4), ("deploy", TARGETS, 3)]
)
def test_every_member_has_a_config_file_that_names_it(group, members, count):
    files = [yaml.safe_load(path.read_text()) for path in (CONF / group).glob("*.yaml")]
    named = {(data.get("target") or {} if group == "deploy" else data).get("name") for data in files} - {None}
    assert named == set(members)
    assert len(members) >= count
