"""Digests of the project's code: the imports that the parser sees, and what changes them."""

import shutil
from pathlib import Path

import pytest

from components.specs import code
from components.specs.code import code_digest, imported_names, modules_of
from components.specs.source import _imports
from flows.stages import STAGES
from flows.stages.base import Context, Request
from flows.stages.code import stage_code
from flows.stages.execute import run_stage, stage_and_spec
from tests.flows.pretend import spec_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the project's code, which the digests are computed from."""
    for package in ("components", "flows"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code, "PROJECT", tmp_path)
    return tmp_path


def modules(root, algorithm="grpo"):
    spec = spec_of(root, algorithm={"name": algorithm})
    part = {"model": spec.model.model_dump(mode="json"), "algorithm": spec.algorithm.model_dump(mode="json")}
    return stage_code(*stage_and_spec(Request("train", part)))


def test_the_imports_of_every_module_are_those_of_the_parser():
    """The expression may see more, in texts, and never less."""
    missing = {}
    for path in sorted([*(ROOT / "components").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]):
        is_package = path.name == "__init__.py"
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        parsed = {name for name in _imports(module, path) if not name.endswith(".*")}
        if lost := parsed - set(imported_names(module, path.read_text(), is_package=is_package)):
            missing[module] = lost
    assert missing == {}


def test_import_statements():
    expected = {
        "from a.b import c, d as e": ["a.b", "a.b.c", "a.b.d"],
        "from a import (  # why\n    b,  # and c\n    d as e,\n)": ["a", "a.b", "a.d"],
        "    import a.b as c, d": ["a.b", "d"],
        "from . import x": ["p.q", "p.q.x"],
        "from ..r import x": ["p.r", "p.r.x"],
    }
    assert {line: list(imported_names("p.q.m", f"y = 1\n{line}\n", is_package=False)) for line in expected} == expected


def test_an_edited_module_changes_the_stages_that_import_it_and_no_other(copy):
    before = {algorithm: modules(copy, algorithm) for algorithm in ("grpo", "kto")}
    path = copy / "components" / "algorithms" / "preference" / "kto_trainer.py"
    path.write_text(path.read_text() + "\nEDITED = True\n")
    after = {algorithm: modules(copy, algorithm) for algorithm in ("grpo", "kto")}
    assert before["grpo"] == after["grpo"]
    changed = [name for name in after["kto"] if after["kto"][name] != before["kto"][name]]
    assert changed == ["components.algorithms.preference.kto_trainer"]
    assert code_digest(before["kto"]) != code_digest(after["kto"])


def test_the_class_of_a_target_belongs_to_the_code():
    assert "components.filters.signal" not in modules_of([STAGES["filter"].function.__module__])
    request = Request("filter", {"filter": {"_target_": "components.filters.signal.Signal"}})
    assert "components.filters.signal" in stage_code(*stage_and_spec(request))


def test_code_that_only_places_and_tracks_stages_does_not_count(tmp_path):
    assert not [name for name in modules(tmp_path) if name.startswith(("components.compute", "components.tracking"))]


def test_the_code_is_in_the_manifest_and_not_in_the_key(tmp_path, tiny_stages, monkeypatch):
    monkeypatch.setattr("flows.stages.execute.stage_code", lambda stage, spec: {"components.x": "1" * 16})
    first, _ = run_stage(Request("add", {"amount": 1.0}), Context.at(tmp_path / "a"))
    monkeypatch.setattr("flows.stages.execute.stage_code", lambda stage, spec: {"components.x": "2" * 16})
    second, _ = run_stage(Request("add", {"amount": 1.0}), Context.at(tmp_path / "b"))
    assert (first.key, first.digest) == (second.key, second.digest)
    assert first.code == code_digest({"components.x": "1" * 16}) != second.code
