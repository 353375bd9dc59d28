"""Qualification of environments: the built-in ones pass, and each check fails for an environment with the fault."""

from __future__ import annotations

import json

import pytest

from components.errors import SpecError
from components.evaluation.checks import FAILED, PASSED, SKIPPED
from components.specs import Target, validate
from flows.experiment.compose import compose
from flows.qualification.qualification import qualify as run_checks
from flows.qualify import main

BUILT_IN = [
    "airline",
    "arithmetic",
    "babyai",
    "calculator",
    "deduction",
    "email_search",
    "game2048",
    "guess",
    "gym",
    "maze",
    "memory",
    "mixture",
    "movie",
    "python_tool",
    "reasoning",
    "repair",
    "retail",
    "scienceworld",
    "shop",
    "sql",
    "tau_bench",
    "textcraft",
    "textarena",
    "textworld",
    "tictactoe",
    "todo",
    "weather",
    "webshop",
    "wordle",
]
SMALL = ["environment.train=24", "environment.heldout=12"]
SIZES = {
    "mixture": [],
    "scienceworld": [],
    "tau_bench": ["environment.data=tests/environments/tau_bench", "collect.scenarios=3", "evaluate.scenarios=3"],
    "game2048": [*SMALL, "environment.difficulties=[1,2]"],
    "webshop": [*SMALL, "environment.products=500"],
}
LONG = ["model=tiny", "model.max_length=65536", "agent.max_turns=200", "warmup=none"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_environment_that_runs_here_passes(name, cache):
    try:
        spec = compose([f"environment={name}", *SIZES.get(name, SMALL), *LONG])
    except SpecError as error:
        pytest.skip(str(error))
    checks = run_checks(spec, 4, cache)
    assert {check.name: check.reason for check in checks if check.status == FAILED} == {}
    assert sum(check.status == PASSED for check in checks) >= 6


def sums(cache, fault="", reward=None):
    target = {"_target_": "tests.flows.faulty_environment.Sums", "fault": fault}
    environment = validate(Target, target, allow=("tests",))
    changes = {"environment": environment}
    if reward is not None:
        target = {"_target_": f"tests.flows.preflight_rewards.{reward}"}
        changes["reward"] = validate(Target, target, allow=("tests",))
    spec = compose(["model=tiny", "warmup=none"]).model_copy(update=changes)
    return {check.name: check for check in run_checks(spec, 8, cache)}


def test_a_faultless_environment_passes_and_skips_only_what_it_does_not_implement(cache):
    checks = sums(cache)
    assert {name: check.reason for name, check in checks.items() if check.status == FAILED} == {}
    assert [name for name, check in checks.items() if check.status == SKIPPED] == ["restore"]


def test_a_fault_fails_its_check_with_a_reason(cache):
    for fault in ("solver", "chance", "replay", "isolation", "splits", "exploits", "length"):
        check = sums(cache, fault)[fault]
        assert check.status == FAILED, fault
        assert check.reason


def test_episodes_are_scored_by_the_reward_of_the_experiment(cache):
    checks = sums(cache, reward="divides")
    for name in ("solver", "chance"):
        assert "ZeroDivisionError: division by zero (tests/flows/preflight_rewards.py:" in checks[name].reason
    assert sums(cache, reward="success")["solver"].figures["reward"] == 1.0
    assert "earns a reward of 1" in sums(cache, reward="constant")["exploits"].reason


def test_the_command_writes_a_page_and_one_json_object_as_the_last_line(tmp_path, capsys):
    page = tmp_path / "page.html"
    line = ["environment=arithmetic", *SMALL, "model=tiny", "warmup=none", f"root={tmp_path}", "--scenarios", "4"]
    assert main([*line, "--json", "--html", str(page)]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data["passed"] is True
    assert [check["name"] for check in data["checks"]] == [
        *("solver", "chance", "replay", "isolation", "restore", "splits", "exploits", "agreement", "length")
    ]
    text = page.read_text()
    assert "http://" not in text
    assert all(check["name"] in text for check in data["checks"])


def test_a_failed_check_is_exit_code_1(tmp_path, capsys):
    line = ["environment=calculator", *SMALL, "model=tiny", "warmup=none", f"root={tmp_path}", "agent.max_turns=1"]
    assert main([*line, "--scenarios", "4"]) == 1
    assert "agent.max_turns is 1" in capsys.readouterr().out
