"""Tests of agent configuration: stage keys contain exactly the settings that determine an episode."""

from __future__ import annotations

from components.evaluation.spec import EvaluateSpec
from components.inference.protocol import Sampling
from components.rollout.collect_spec import CollectSpec
from components.rollout.request import episode_requests
from components.rollout.spec import PATIENCE, AgentSpec, CodeSpec, EpisodeLimits
from components.specs import validate
from components.trajectories.schema import Scenario


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


def test_collect_and_evaluate_have_the_same_limits_and_no_key_depends_on_their_patience():
    patience = {"concurrency": 3, "environments": 2, "timeout": 5.0, "step_timeout": 4.0, "retries": 0}
    assert set(patience) == PATIENCE
    for kind in (CollectSpec, EvaluateSpec):
        limits = EpisodeLimits.model_fields
        assert {name: kind.model_fields[name].default for name in limits} == EpisodeLimits().model_dump()
        assert kind(**patience).key_part() == kind().key_part()
        assert kind(max_failures=3).key_part() != kind().key_part()


def test_the_seed_of_an_episode_depends_on_its_id_only():
    jobs = [Scenario(f"s{number}", {}, "train") for number in range(3)]
    settings = {"sampling": Sampling(temperature=0.5), "max_turns": 2, "seed": 7}
    requests = episode_requests(jobs, 2, **settings, temperature_step=0.25)
    assert [request.id for request in requests] == ["s0/0", "s0/1", "s1/0", "s1/1", "s2/0", "s2/1"]
    assert [request.sampling.temperature for request in requests[:2]] == [0.5, 0.75]
    assert len({request.seed for request in requests}) == 6
    assert {request.id: request.seed for request in episode_requests(jobs[::-1], 1, **settings)} == {
        request.id: request.seed for request in requests if request.sample == 0
    }
    other = requests[0].aside("other")
    assert (other.id, other.sampling) == ("s0~other/0", requests[0].sampling)
    assert other.seed not in {request.seed for request in requests}
