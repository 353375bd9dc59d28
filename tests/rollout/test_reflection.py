"""Tests of reflection: second attempts, their prompts, and their training data."""

from __future__ import annotations

import pytest

from components.environments.protocol import Step
from components.errors import ContextOverflow, EngineError, SpecError
from components.inference.protocol import ChatCompletion
from components.rollout.agent import AgentLoop
from components.rollout.formats import Presentation
from components.rollout.players.reflection import NOTE, ReflectionPlayer, ReflectionSpec, demonstrations, transcript
from components.trajectories.schema import Scenario
from components.trajectories.truncation import is_truncated
from tests.rollout.worlds import Echo, Parrot, collect, scenarios

SPEC = ReflectionSpec(max_tokens=5)


class Door(Echo):
    """Environment that opens at a password, which scenario 0 reveals at once."""

    def reset(self, scenario):
        self.first = scenario.input["number"] == 0
        return [{"role": "system", "content": "A door."}, {"role": "user", "content": "Open it."}]

    def step(self, action):
        return Step([], 1.0, True, {"success": self.first or action["content"] == "sesame"})


class Learner(Parrot):
    """An engine that says the password if the reflection is in the prompt."""

    async def chat(self, request):
        answer = await super().chat(request)
        last = request.messages[-1]["content"]
        said = "sesame" if NOTE in last else "Say sesame." if last.startswith(SPEC.prompt) else "open"
        answer.message["content"] = said
        ids = [ord(letter) for letter in said]
        return ChatCompletion(answer.message, "stop", answer.prompt_token_ids, ids, [-0.5] * len(ids), answer.policy)


def reflecting(engine, environment=Door, count=2, **options):
    return collect(engine, environment, scenarios(count), player=ReflectionPlayer(AgentLoop(), SPEC), **options)


def test_a_failed_episode_is_thought_about_and_tried_again():
    engine = Learner()
    trajectories = reflecting(engine)
    assert [trajectory.id for trajectory in trajectories] == [
        "s0/0",
        "s0/1",
        "s1/0",
        "s1/1",
        "s1~second/0",
        "s1~second/1",
    ]
    assert [trajectory.success for trajectory in trajectories] == [True, True, False, False, True, True]
    for first, second in zip(trajectories[2:4], trajectories[4:], strict=True):
        assert len(first.histories) == 1
        reflection, attempt = second.histories
        assert reflection.messages[0].content == (f"{SPEC.prompt}\n\nsystem: A door.\nuser: Open it.\nassistant: open")
        assert attempt.messages[1].content == f"{NOTE}Say sesame.\n\nOpen it."
        spoken = [history.token_ids[slice(*history.messages[-1].span)] for history in second.histories]
        assert ["".join(map(chr, ids)) for ids in spoken] == ["Say sesame.", "sesame"]
        assert second.step_rewards == [0.0, 1.0]
        assert second.metrics["sampled_tokens"] == len("Say sesame.sesame")
        assert second.metrics["turns"] == 1
        assert second.scenario.input == first.scenario.input
    asked = [request for request in engine.requests if request.messages[-1]["content"].startswith(SPEC.prompt)]
    assert {message.sampling.max_tokens for message in asked} == {SPEC.max_tokens}
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_it_does_not_depend_on_what_was_finished_before():
    whole = reflecting(Learner())
    for missing in ("s1~second/0", "s1/1", "s0/0"):
        told = []
        finished = {trajectory.id: trajectory for trajectory in whole if trajectory.id != missing}
        again = reflecting(
            Learner(), finished=finished, on_episode=lambda trajectory, seconds, told=told: told.append(trajectory.id)
        )
        assert repr(again) == repr(whole)
        assert told == {
            "s0/0": ["s0/0"], "s1/1": ["s1/1", "s1~second/1"], "s1~second/0": ["s1/0", "s1~second/0"]
        }[missing]  # fmt: skip


def test_a_reflection_that_fails_is_a_failed_second_attempt():
    def fail(request):
        if request.messages[-1]["content"].startswith(SPEC.prompt):
            raise EngineError("out of memory")

    trajectories = reflecting(Learner(fail=fail))
    assert [trajectory.failure.message for trajectory in trajectories if trajectory.failure] == ["out of memory"] * 2
    assert [trajectory.id for trajectory in trajectories if trajectory.failure] == ["s1~second/0", "s1~second/1"]


def test_an_episode_that_fails_is_not_thought_about():
    def fail(request):
        raise EngineError("out of memory")

    assert [trajectory.id for trajectory in reflecting(Learner(fail=fail))] == ["s0/0", "s0/1", "s1/0", "s1/1"]


def test_a_scenario_cannot_have_the_name_of_a_second_attempt():
    jobs = [*scenarios(2), Scenario("s1~second", {"number": 0}, "train")]
    with pytest.raises(SpecError, match="id 's1~second'; expected one without '~'"):
        collect(Learner(), Door, jobs, player=ReflectionPlayer(AgentLoop(), SPEC))


def test_second_attempts_as_demonstrations():
    trajectories = reflecting(Learner())
    shown = list(demonstrations(trajectories, group_size=2))
    assert {trajectory.policy for trajectory in shown} == {"demonstration"}
    assert [(trajectory.id, trajectory.group, trajectory.success) for trajectory in shown] == [
        ("s1/2", "s1", True),
        ("s1/3", "s1", True),
    ]
    for trajectory in shown:
        (history,) = trajectory.histories
        assert [message.content for message in history.messages] == ["A door.", "Open it.", "sesame"]
        assert history.token_ids == []
        assert trajectory.step_rewards == [1.0]
    trajectories[-1].histories[1].messages[-1].finish_reason = "length"
    assert [trajectory.id for trajectory in demonstrations(trajectories, group_size=2)] == ["s1/2"]


class Hall(Door):
    """A door with a long first observation."""

    def reset(self, scenario):
        super().reset(scenario)
        return [{"role": "user", "content": f"begin {'a' * 120_000} end"}]


def thinking(engine):
    """Return the prompts of the reflections."""
    return [
        request.messages[-1]["content"]
        for request in engine.requests
        if request.messages[-1]["content"].startswith(SPEC.prompt)
    ]


def test_a_transcript_that_does_not_fit_the_context_is_cut_until_it_does_and_counted():
    def full(request):
        if len(request.messages) == 1 and len(request.messages[0]["content"]) > 50_000:
            raise ContextOverflow("the prompt has 50,000 tokens")

    engine = Learner()
    spec = SPEC.model_copy(update={"max_transcript": 1_000_000})
    reflect = ReflectionPlayer(AgentLoop(Presentation(max_observation=200_000)), spec)
    options = {"player": reflect, "group_size": 1, "max_turns": 1}
    (whole,) = [
        trajectory for trajectory in collect(engine, Hall, scenarios(2), **options) if trajectory.id == "s1~second/0"
    ]
    (asked,) = thinking(engine)
    assert asked.endswith("a end\nassistant: open")
    assert "[cut:" not in asked
    assert "cut_transcript" not in whole.metrics

    engine = Learner(fail=lambda request: thinking_only(request, full))
    (cut,) = [
        trajectory for trajectory in collect(engine, Hall, scenarios(2), **options) if trajectory.id == "s1~second/0"
    ]
    *refused, asked = thinking(engine)
    assert (len(refused), cut.failure, cut.success) == (2, None, True)
    assert asked.startswith(f"{SPEC.prompt}\n\nuser: begin aaa")
    assert asked.endswith("a end\nassistant: open")
    assert "\n[cut: 90,0" in asked
    assert cut.metrics["cut_transcript"] == 1.0
    assert cut.histories[0].messages[0].content == asked


def thinking_only(request, fail):
    if request.messages[0]["content"].startswith(SPEC.prompt):
        fail(request)


def test_a_reflection_for_which_no_transcript_is_short_enough_is_truncated():
    def full(request):
        raise ContextOverflow("the prompt has 4,096 tokens")

    engine = Learner(fail=lambda request: thinking_only(request, full))
    (ended,) = [trajectory for trajectory in reflecting(engine, Hall, group_size=1) if is_truncated(trajectory)]
    assert (ended.id, ended.failure, ended.success) == ("s1~second/0", None, False)
    assert len(thinking(engine)) == 8  # 8,000 characters, then half as many, down to 100


def test_a_long_transcript_is_cut_in_the_middle():
    (one, *_) = collect(Parrot(), lambda: Echo(reset=lambda: [{"role": "user", "content": "a" * 500}]), scenarios(1))
    text, cut = transcript(one, 100)
    assert cut
    assert text.startswith("user: aaa")
    assert text.endswith(one.histories[0].messages[-1].content)
    assert "\n[cut: " in text
    assert len(text) < 130
