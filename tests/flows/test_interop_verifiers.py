"""Served environments in verifiers: its own rollouts against a scripted policy.

The package cannot be installed beside Espalier: VERIFIERS_PYTHON names the interpreter of an environment that has it.
"""

from __future__ import annotations

import pytest

from tests.conformance.verifiers_environment import compare, episodes_of, evaluate, python

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def interpreter():
    found = python()
    if found is None:
        pytest.skip("verifiers is not installed; VERIFIERS_PYTHON may name an interpreter that has it")
    return found


@pytest.mark.parametrize("name", ["shop", "maze"])
def test_rollouts_of_verifiers_have_the_rewards_of_the_environment(interpreter, name):
    episodes = episodes_of(name)
    reports = evaluate(interpreter, name, episodes)
    assert [compare(episode, report) for episode, report in zip(episodes, reports, strict=True)] == ["", ""]
    assert [report["metrics"]["success"] for report in reports] == [1.0, 0.0]
