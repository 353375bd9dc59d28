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

pytestmark = pytest.mark.security


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def permitted(root) -> Permissions:
    return Permissions([ServedExperiment("smoke", "smoke", (ALLOWED, f"root={root}"))])


@pytest.mark.parametrize("line", TRICKS, ids=lambda line: line[:40])
def test_what_a_served_run_may_not_set_an_agent_may_not_set(permitted, line):
    with pytest.raises(SpecError):
        permitted.arguments("smoke", [line])


@pytest.mark.parametrize(
    "value",
    [
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
    ],
)
def test_an_allowed_key_gets_no_path_outside_of_the_root(permitted, value):
    with pytest.raises(SpecError, match="no URL and no path outside"):
        permitted.arguments("smoke", [f"name={value}"])


def test_a_link_out_of_the_root_is_no_path_below_it(permitted, root):
    (root / "link").symlink_to("/etc")
    with pytest.raises(SpecError, match="no URL and no path outside"):
        permitted.arguments("smoke", [f"name={root}/link/passwd"])


def test_allowed_values_pass(permitted, root):
    lines = ["rounds=2", "model=tiny", "algorithm.learning_rate=1e-5", "name=a-b"]
    arguments = permitted.arguments("smoke", lines)
    assert arguments == ["+experiment=smoke", ALLOWED, f"root={root}", *lines]


JUDGE = ("reward=ruler", "reward.model.url=http://h/v1", "reward.model.model=m")


@pytest.mark.parametrize(
    "key",
    ["allow", "root", "store", "tracking.uri", "environment._target_", "agent.function", "notify.url_variable",
     "reward.model.url", "reward.model.key_variable"],
)  # fmt: skip
def test_an_operator_cannot_offer_what_reaches_out_of_a_run(key):
    with pytest.raises(SpecError, match="which an agent must not choose"):
        Permissions([ServedExperiment("smoke", "smoke", (f"serve.overrides=[{key}]", *JUDGE))])


@pytest.mark.parametrize(
    "name", ["", "--html", "-m", "a b", "a=b", "../x", "a/b", "$(id)", "a\n", "a,b", "[a]", "{a: 1}"]
)
def test_a_run_is_named_by_a_word(name):
    with pytest.raises(SpecError):
        permissions.run_name(name)
    with pytest.raises(SpecError):
        permissions.policy_name(name)


@pytest.mark.parametrize("name", ["base@", "base@x", "a@1@2", "{model: openai/x}", "openai/gpt-5-mini", "a@1]", "'a'"])
def test_policies_of_providers_are_refused(name):
    with pytest.raises(SpecError):
        permissions.policy_name(name)


def test_runs_and_steps_are_policies():
    assert permissions.policy_name("base") == ("base", "")
    assert permissions.policy_name("0e12@12") == ("0e12", "@12")
    assert permissions.run_name("tic_tac_toe") == "tic_tac_toe"


@pytest.mark.parametrize(
    "values",
    [
        {"teacher": "/etc"},
        {"teacher": "../x"},
        {"teacher": "~/x"},
        {"environment": "../../etc"},
        {"environment": "--data=/etc/passwd"},
        {"judge": "-x"},
        {"data": "/etc/passwd"},
        {"labels": -1},
        {"config_dir": "/tmp"},
    ],
)
def test_advice_reads_no_files_of_the_agents_choice(values):
    with pytest.raises(ValidationError):
        Circumstances(**values)


def test_a_secret_is_refused_and_not_repeated(permitted):
    secret = "sk-" + "a1B2" * 12
    with pytest.raises(SpecError) as error:
        permitted.arguments("smoke", [f"name={secret}"])
    assert secret not in str(error.value)
    with pytest.raises(SpecError) as error:
        permitted.arguments(secret)
    assert secret not in str(error.value)


def test_a_planted_variable_is_not_read(permitted, monkeypatch):
    monkeypatch.setitem(os.environ, "PLANTED", "planted-secret")
    with pytest.raises(SpecError) as error:
        permitted.arguments("smoke", ["name=${oc.env:PLANTED}"])
    assert "planted-secret" not in str(error.value)
