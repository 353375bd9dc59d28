"""The policy judges its own episodes: `judge_model@reward.model=policy`."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest

from components.errors import JudgeError, Problem, SpecError
from components.inference.protocol import BASE_POLICY, ChatCompletion
from components.models.weights import prepare
from components.rewards.judges.critic import DIMENSIONS
from components.rewards.llm.budget import Meter
from components.rewards.llm.models.local import EmbeddedJudge
from components.trajectories.store import read_scores
from flows.stages import episodes
from flows.stages.base import Context
from flows.stages.execute import run_stage
from flows.stages.judge import model_resources
from tests.deployment.tiny import TINY, write_adapter
from tests.flows.test_online_rl import DATA, Recorder

MODEL = {"name": "policy", "max_tokens": 64, "longest": 3000}
CRITIC = {"_target_": "components.rewards.judges.critic.Critic", "model": MODEL}
SHORT = {**CRITIC, "dimensions": {"good": {"description": "Was it good?"}}}
"""Question that leaves room in the tiny model's context for a correction."""
REWARDS = {
    "critic": CRITIC,
    "pairwise": {"_target_": "components.rewards.judges.pairwise.Pairwise", "model": MODEL},
    "ruler": {"_target_": "components.rewards.judges.ruler.Ruler", "model": MODEL},
}


class Pretend:
    """An engine whose policy knows how to judge: longer is better."""

    def __init__(self, version=BASE_POLICY):
        self.policy = version
        self.requests = []

    def release(self):
        pass

    async def chat(self, request):
        assert request.policy == self.policy
        self.requests.append(request)
        system, user = (message["content"] for message in request.messages[:2])
        shown = dict(re.findall(r'<trajectory id="(\w+)">\n(.*?)\n</trajectory>', user, re.S))
        if "Which one is better" in system:
            sizes = {name: len(text) for name, text in shown.items()}
            said = {"explanation": "", "better": "tie" if sizes["A"] == sizes["B"] else max(sizes, key=sizes.get)}
        elif shown:
            said = {
                "scores": [{"trajectory_id": name, "score": min(len(text) / 5000, 1)} for name, text in shown.items()]
            }
        else:
            said = {"scores": {name: min(len(user) / 5000, 1) for name in DIMENSIONS}}
        return ChatCompletion(
            {"role": "assistant", "content": json.dumps(said)}, "stop", [0] * 10, [0] * 5, [0.0] * 5, self.policy
        )

    def close(self):
        pass


def recorded(tmp_path, reward, **changes):
    model = {**TINY.model_dump(), "max_length": 2048}
    agent = {"max_turns": 2, "max_tokens": 12}
    return Recorder(tmp_path, reward=reward, model=model, agent=agent, warmup=None, rounds=2, **changes)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A collection by the tiny model, for any reward."""
    context = Context.at(tmp_path_factory.mktemp("self-judged"))
    run_stage(recorded(context.store.root, CRITIC).requests["collect[1]"], context)
    yield context
    context.warm.close()


def judged(context, reward):
    artifact, _ = run_stage(recorded(context.store.root, reward).requests["judge[1]"], context)
    return artifact, list(read_scores(artifact.path / "scores.parquet"))


def of(reward, **changes):
    """Asked in another way, so that no answer is known."""
    return {**reward, "model": {**MODEL, **changes}}


def test_the_stage_is_given_the_policy_that_played(tmp_path):
    run = recorded(tmp_path, CRITIC)
    assert "policy" not in run.requests["judge[1]"].inputs  # the base model
    assert run.requests["judge[2]"].inputs["policy"] == run.keys["train[1]"]
    served = {"_target_": CRITIC["_target_"], "model": {"name": "served", "url": "http://there/v1", "model": "a"}}
    assert "policy" not in recorded(tmp_path, served).requests["judge[2]"].inputs


@pytest.mark.parametrize("name", REWARDS)
def test_episodes_are_scored_by_the_policy_itself(played, monkeypatch, name):
    engine = Pretend()
    asked_for = []

    def warm_engine(model, policy, context, inference=None, kind="policy"):
        asked_for.append((model.name, policy))
        return engine

    monkeypatch.setattr(episodes, "warm_engine", warm_engine)
    artifact, found = judged(played, REWARDS[name])
    assert asked_for == [("tiny", None)]
    assert len(found) == DATA["collect"]["scenarios"] * DATA["collect"]["group_size"]
    assert all(one.reward is not None and 0 <= one.reward <= 1 and one.cost == 0.0 for one in found)
    assert artifact.metrics["unscored"] == 0
    assert artifact.metrics["calls"] == len(engine.requests) > 0
    assert artifact.metrics["prompt_tokens"] == 10 * len(engine.requests)
    assert {request.sampling.max_tokens for request in engine.requests} == {64}
    assert {request.sampling.temperature for request in engine.requests} == {0.0}


@pytest.mark.parametrize(
    ("longest", "words"),
    [(1600, "did not judge as it was asked, twice"), (9000, "show the judge less: reward.model.longest=9000")],
)
def test_the_tiny_model_cannot_judge_and_the_stage_says_so(played, longest, words):
    """Its answers are nonsense: no episode has a score, none a zero, and the run does not train on nothing."""
    with pytest.raises(JudgeError, match=r"scored none of the 8 finished episodes.*the policy itself") as caught:
        judged(played, of(SHORT, longest=longest, max_tokens=16))
    assert words in str(caught.value)


def test_the_engine_holds_an_answer_to_its_schema(played):
    """Answers of the tiny model, whose weights are random, are complete, on the scale, and end in time."""
    model = {**MODEL, "max_tokens": 160, "longest": 1000}
    target = "components.rewards.judges.graded.Graded"
    artifact, found = judged(played, {"_target_": target, "model": model, "scale": [1, 5]})
    assert all(one.reward is not None and 0 <= one.reward <= 1 for one in found)
    assert artifact.metrics["calls"] == len(found)  # no corrections


def test_an_engine_without_grammars_is_asked_in_words(played, monkeypatch, caplog):
    class Wordy(Pretend):
        async def chat(self, request):
            if request.form.constrained:
                raise SpecError([Problem("response_format", "needs the package llguidance")])
            return await super().chat(request)

    engine = Wordy()
    monkeypatch.setattr(episodes, "warm_engine", lambda *given, **named: engine)
    artifact, _ = judged(played, of(CRITIC, max_tokens=66))
    assert artifact.metrics["unscored"] == 0
    for form, weaker in (("schema", "object"), ("object", "none")):
        assert caplog.text.count(f"does not support reward.model.structured={form}; {weaker} is used") == 1


def test_what_a_policy_cannot_judge_is_unscored_beside_what_it_can(played, monkeypatch):
    shown: list[str] = []

    class First(Pretend):
        """Judges the first that it is asked about, and talks nonsense of the others."""

        async def chat(self, request):
            answer = await super().chat(request)
            shown.append(request.messages[1]["content"])
            return answer if request.messages[1]["content"] == shown[0] else _nonsense(answer)

    engine = First()
    monkeypatch.setattr(episodes, "warm_engine", lambda *given, **named: engine)
    artifact, found = judged(played, of(CRITIC, max_tokens=65))
    unscored = [one for one in found if one.reward is None]
    assert 0 < len(unscored) < len(found)
    assert artifact.metrics["unscored"] == len(unscored)
    assert all("the policy itself did not judge" in one.failure.message for one in unscored)


def _nonsense(answer):
    return replace(answer, message={"role": "assistant", "content": "hm"})


def test_a_judge_with_an_adapter_answers_with_its_weights(tmp_path):
    context = Context.at(tmp_path, None)
    base = prepare(TINY, context.cache)
    resources = model_resources(Meter(), context, TINY, None, None)
    plain = {"name": "tiny", "source": "random"}
    trained = {**plain, "adapter": str(write_adapter(base, tmp_path / "adapter", seed=3))}

    def answer(model):
        client = EmbeddedJudge(model=model, max_tokens=16).build(resources)
        messages = [{"role": "user", "content": "Which is better?"}]
        return asyncio.run(client.call(messages, None, "question", False)).text

    answers = [answer(model) for model in (plain, trained, plain)]
    context.warm.close()
    assert answers[0] == answers[2] != answers[1]
