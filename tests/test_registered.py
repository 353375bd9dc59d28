"""Registered names: built-in components are hashed by name, so that moving a module changes no stage key."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from components.environments.worlds.shop import Shop
from components.specs import validate
from components.specs.component_path import key_name
from components.specs.registered import registered, registered_name
from components.specs.target import Target

ROOT = Path(__file__).parent.parent
SHOP = "components.environments.worlds.shop.Shop"


def targets(value) -> list[str]:
    """Return every `_target_` in plain data."""
    if isinstance(value, dict):
        own = [value["_target_"]] if "_target_" in value else []
        return own + [path for item in value.values() for path in targets(item)]
    return [path for item in value for path in targets(item)] if isinstance(value, list) else []


def configured() -> list[str]:
    """Return the paths of all built-in components that a file of conf/ names."""
    files = [path for path in (ROOT / "conf").rglob("*.yaml") if "hydra" not in path.parts]
    paths = {path for file in files for path in targets(yaml.safe_load(file.read_text()))}
    return sorted(path for path in paths if path.startswith("components."))


def test_every_component_of_the_configuration_has_a_registered_name_of_its_own():
    paths = configured()
    names = {path: key_name(path) for path in paths}
    assert len(paths) > 70
    assert [path for path in paths if names[path] == path] == []
    assert [name for name, count in Counter(names.values()).items() if count > 1] == []


def test_a_key_holds_the_name_and_a_spec_the_path():
    target = validate(Target, {"_target_": SHOP, "train": 8})
    assert target.resolved()["_target_"] == "environment.shop"
    assert target.model_dump(mode="json")["_target_"] == SHOP


def test_nested_targets_are_hashed_by_name_too():
    reward = {
        "_target_": "components.rewards.composition.clipped.Clipped",
        "reward": {"_target_": "components.rewards.rules.outcome.Outcome"},
    }
    assert "components." not in json.dumps(validate(Target, reward).resolved())


def test_a_subclass_does_not_inherit_the_name():
    class Other(Shop):
        pass

    assert registered_name(Shop) == "environment.shop"
    assert registered_name(Other) is None


def test_code_of_a_user_is_hashed_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "key_worlds.py").write_text("class World:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    resolved = validate(Target, {"_target_": "key_worlds.World"}, allow=["key_worlds"]).resolved()
    assert resolved["_target_"] == "key_worlds.World"
    assert len(resolved["source_sha256"]) == 64


@pytest.mark.parametrize("name", ["Shop", "shop", "environment.", "environment.Shop", "judge.shop", "environment.a b"])
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match=r"expected environment\.NAME"):
        registered(name)


def test_missing_path_is_hashed_as_itself():
    assert key_name("components.environments.shop.Shop") == "components.environments.shop.Shop"
    assert key_name("components.environments.worlds.shop.Nothing") == "components.environments.worlds.shop.Nothing"
