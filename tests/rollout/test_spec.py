"""Tests of agent configuration: stage keys contain exactly the settings that determine an episode."""

from __future__ import annotations

from components.rollout.spec import AgentSpec, CodeSpec
from components.specs import validate


def test_the_key_holds_what_can_change_an_episode():
    native = AgentSpec()
    assert set(native.key_part()) == {"max_turns", "max_tokens", "format", "max_observation"}
    code = AgentSpec(format="code")
    assert code.key_part() == AgentSpec(format="code", code=CodeSpec()).key_part()
    assert code.key_part() != AgentSpec(format="code", code=CodeSpec(seconds=3)).key_part()
    own = validate(AgentSpec, {"function": "tests.flows.test_own_agent.agent"}, allow=["tests"])
    assert set(own.key_part()) == {"max_turns", "max_tokens", "function"}


def test_code_has_the_limits_that_are_given():
    assert AgentSpec().limits() is None
    assert AgentSpec(format="code").limits() == CodeSpec().limits()
    limits = AgentSpec(format="code", code=CodeSpec(seconds=3, calls=5)).limits()
    assert limits is not None
    assert (limits.seconds, limits.calls, limits.output_bytes) == (3, 5, 4000)
