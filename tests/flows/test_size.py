"""`size=tiny` with every experiment: it plans and runs, and a key=value and a chosen option come after it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from components.errors import SpecError
from flows.experiment.compose import check, compose
from flows.planning.plan import plan
from flows.release import registration
from tests.test_configs import EXPERIMENTS, OFFLINE, PACKAGES, needed, skip_without_package

OWN = {"continual": ["rounds=2"], "multi_agent": ["rounds=3"], "mcp_rl": needed("experiment", "mcp_rl")}
NEEDED = {**{name: [f"data.path={path}"] for name, path in OFFLINE.items()}, **OWN}
"""Overrides that an experiment needs with size=tiny."""


PACKAGED = [name for name in EXPERIMENTS if name in PACKAGES]
"""Experiments whose environment needs a package: each is skipped alone where that is missing."""


@pytest.mark.parametrize(
    "names", [[name for name in EXPERIMENTS if name not in PACKAGED], *([name] for name in PACKAGED)]
)
def test_every_experiment_is_planned_as_a_tiny_one(names, tmp_path):
    for name in names:
        skip_without_package(name)
        spec = check([f"+experiment={name}", "size=tiny", *NEEDED.get(name, []), f"root={tmp_path}"])[0]
        assert (spec.name, spec.model.name, spec.model.source) == (name, "tiny", "random")
        assert spec.evaluate.scenarios == 8, name
        assert spec.rounds <= 3, name
        if spec.rounds:
            assert spec.collect.scenarios == 2, name
            assert spec.collect.group_size == (1 if name == "on_policy_distill" else 2), name
        if spec.warmup is not None:
            assert spec.warmup.demonstrations == 8, name
        planned = plan(spec.model_copy(update={"feedback": None}))  # there are no answers of people
        assert planned.count("run") == len(planned.stages) >= 6, name


def test_a_full_size_changes_nothing():
    for name in ("quickstart", "tic_tac_toe"):
        assert compose([f"+experiment={name}", "size=full"]) == compose([f"+experiment={name}"])


def test_what_an_experiment_does_not_have_stays_away():
    spec = compose(["+experiment=behaviour_cloning", "size=tiny"])
    assert (spec.rounds, spec.model.lora, spec.collect.continuations) == (0, None, 0)
    assert spec.warmup is not None
    assert spec.warmup.teacher is None
    assert spec.reward_model is None
    assert compose(["+experiment=tic_tac_toe", "warmup=none", "size=tiny"]).warmup is None
    steps = compose(["+experiment=reward_hacking", "size=tiny"])
    assert "repetition_cost" not in steps.reward.resolved()


def test_settings_of_the_user_come_after_the_size():
    spec = compose(["+experiment=tic_tac_toe", "size=tiny", "rounds=3", "collect.group_size=4", "algorithm=ppo"])
    assert (spec.rounds, spec.collect.group_size, spec.collect.scenarios) == (3, 4, 2)
    assert spec.algorithm.name == "ppo"


def test_a_model_chosen_on_the_command_line_is_not_replaced():
    for lines in (["model=small", "size=tiny"], ["size=tiny", "model=small"]):
        spec = compose(["+experiment=tic_tac_toe", *lines])
        assert (spec.model.name, spec.model.max_length) == ("small", 384), lines


def test_the_smoke_experiment_is_the_tiny_default_with_a_reward_that_differs_between_random_episodes():
    smoke = compose(["+experiment=smoke"])
    assert smoke == compose(["size=tiny", "name=smoke"])
    assert smoke.reward.resolved()["repetition_cost"] == 0.5


def test_a_misspelt_size_is_refused():
    with pytest.raises(SpecError, match="size: 'tinny': expected one of full, tiny"):
        compose(["+experiment=quickstart", "size=tinny"])


def test_a_size_of_the_user_is_applied_in_the_same_way(tmp_path):
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "short.yaml").write_text("# @package _global_\n# Short rounds.\nrounds: 1\nabsent: 3\n")
    spec = compose(["+experiment=tic_tac_toe", "size=short"], config_dir=tmp_path)
    assert (spec.rounds, spec.model.name, spec.collect.scenarios) == (1, "small", 64)


@pytest.mark.parametrize("name", ["on_policy_distill", "continuation"])
def test_a_tiny_experiment_runs(name, tmp_path, run):
    result = run(compose([f"+experiment={name}", "size=tiny", f"root={tmp_path}", "deploy=none"]))
    assert result["rounds"] == 1
    assert result["stages"]["train[1]"] == "ran"


def test_a_test_run_registers_nothing_and_deploys_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("components.algorithms.train.policy_digest", lambda path: "digest")
    outcome = Mock(export=tmp_path)
    cases = {
        "": True,
        "size=tiny": False,
        "size=tiny deploy=serve": False,
        "size=tiny model=small": False,
        "model=tiny": False,
        "model=tiny deploy=serve": False,
        "model=tiny deploy.register_model=true": True,
    }
    for line, registers in cases.items():
        tracker, lines = Mock(), line.split()
        spec = compose(["+experiment=tic_tac_toe", *lines])
        execution = Mock(spec=None)
        execution.spec, execution.tracker = spec, tracker
        with monkeypatch.context() as patch:
            patch.setattr(registration.champion, "tags", lambda *_: {})
            patch.setattr(registration.champion, "decide", Mock())
            result, error = registration.register(execution, outcome)
        assert tracker.register_model.called == registers, line
        assert (registration.NOT_REGISTERED in result.notices) != registers
        assert (result.policy_digest, error) == ("digest", None)
    for line in ("deploy.register_model=false", "size=tiny", "model=tiny"):
        with pytest.raises(SpecError, match=r"deploy\.register_model: .*only a champion is deployed"):
            compose(["+experiment=tic_tac_toe", "deploy=local", line])
