"""Attacks on the operator by an agent whose text is untrusted: overrides, paths, options, policies."""

from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from components.errors import SpecError
from flows.agent_tools import permissions
from flows.agent_tools.permissions import Permissions
from flows.agent_tools.tools import Circumstances
from flows.scheduling.parameters import ServedExperiment
from tests.flows.test_serve_attacks import ALLOWED, TRICKS
from tests.refusals import wrong_refusals

pytestmark = pytest.mark.security


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def permitted(root) -> Permissions:
    return Permissions([ServedExperiment("smoke", "smoke", (ALLOWED, f"root={root}"))])


def test_what_a_served_run_may_not_set_an_agent_may_not_set(permitted):
    assert wrong_refusals(((line, "") for line in TRICKS), lambda line: permitted.arguments("smoke", [line])) == []


PATHS = [
    "/etc",
    "/etc/passwd",
    "'~'",
    "'~root/x'",
    "../x",
    "a/../../../x",
    "'/etc'",
    "file:///etc",
    "https://evil.test/model",
    "s3://evil/x",
    "README.md",
    "conf/experiment",
]


def test_an_allowed_key_gets_no_path_outside_of_the_root(permitted, root):
    (root / "link").symlink_to("/etc")
    cases = [(value, "no URL and no path outside") for value in [*PATHS, f"{root}/link/passwd"]]
    assert wrong_refusals(cases, lambda value: permitted.arguments("smoke", [f"name={value}"])) == []


def test_allowed_values_pass(permitted, root):
    lines = ["rounds=2", "model=tiny", "algorithm.learning_rate=1e-5", "name=a-b"]
    arguments = permitted.arguments("smoke", lines)
    assert arguments == ["+experiment=smoke", ALLOWED, f"root={root}", *lines]


JUDGE = ("reward=ruler", "reward.model.url=http://h/v1", "reward.model.model=m")


KEYS = ["allow", "root", "store", "tracking.uri", "environment._target_", "agent.function", "notify.url_variable",
     "reward.model.url", "reward.model.key_variable"]  # fmt: skip


def test_an_operator_cannot_offer_what_reaches_out_of_a_run():
    def offer(key: str) -> None:
        Permissions([ServedExperiment("smoke", "smoke", (f"serve.overrides=[{key}]", *JUDGE))])

    assert wrong_refusals(((key, "which an agent must not choose") for key in KEYS), offer) == []


NAMES = ["", "--html", "-m", "a b", "a=b", "../x", "a/b", "$(id)", "a\n", "a,b", "[a]", "{a: 1}"]


PROVIDERS = ["base@", "base@x", "a@1@2", "{model: openai/x}", "openai/gpt-5-mini", "a@1]", "'a'"]


def test_a_run_is_named_by_a_word_and_a_policy_is_no_model_of_a_provider():
    assert wrong_refusals(((name, "") for name in NAMES), permissions.run_name) == []
    assert wrong_refusals(((name, "") for name in [*NAMES, *PROVIDERS]), permissions.policy_name) == []


def test_runs_and_steps_are_policies():
    assert permissions.policy_name("base") == ("base", "")
    assert permissions.policy_name("0e12@12") == ("0e12", "@12")
    assert permissions.run_name("tic_tac_toe") == "tic_tac_toe"


CHOICES = [
    {"teacher": "/etc"},
    {"teacher": "../x"},
    {"teacher": "~/x"},
    {"environment": "../../etc"},
    {"environment": "--data=/etc/passwd"},
    {"judge": "-x"},
    {"data": "/etc/passwd"},
    {"labels": -1},
    {"config_dir": "/tmp"},
]


def test_advice_reads_no_files_of_the_agents_choice():
    cases = ((values, "") for values in CHOICES)
    assert wrong_refusals(cases, lambda values: Circumstances(**values), ValidationError) == []


def test_a_secret_is_refused_and_not_repeated_and_a_variable_is_not_read(permitted, monkeypatch):
    monkeypatch.setitem(os.environ, "PLANTED", "planted-secret")
    secret = "sk-" + "a1B2" * 12
    for arguments in (("smoke", [f"name={secret}"]), (secret,), ("smoke", ["name=${oc.env:PLANTED}"])):
        with pytest.raises(SpecError) as error:
            permitted.arguments(*arguments)
        assert secret not in str(error.value)
        assert "planted-secret" not in str(error.value)
