"""Tests of Monte Carlo continuation: labels are success rates, with any reproducible environment."""

from __future__ import annotations

import random

import pytest

from components.environments.games.tictactoe import TicTacToe
from components.environments.protocol import Restorable, Step
from components.errors import EngineError, SpecError
from components.inference import conversations
from components.inference.protocol import ChatCompletion, Sampling
from components.inference.transformers.engine import TransformersEngine
from components.rollout.agent import AgentLoop
from components.rollout.players.continuation import CONTINUED, ContinuationPlayer
from components.rollout.players.counterfactual import CounterfactualPlayer
from components.trajectories.step_labels import read
from tests.rollout.worlds import Echo, Parrot, collect, scenarios


class Coins(Echo):
    """Three coins; all must be heads."""

    def step(self, action):
        self.said.append(action["content"])
        done = len(self.said) == 3
        return Step(
            [] if done else [{"role": "user", "content": f"Coin {len(self.said)}."}],
            0.0,
            done,
            {"success": done and set(self.said) == {"heads"}},
        )


class SavedCoins(Coins):
    def save(self):
        return self.said

    def restore(self, scenario, state):
        self.reset(scenario)
        self.said = state


class Forgetful(Coins):
    """An environment with random observations."""

    def step(self, action):
        step = super().step(action)
        return Step([{"role": "user", "content": str(random.random())}], 0.0, step.done, step.info)


class Tosser(Parrot):
    async def chat(self, request):
        answer = await super().chat(request)
        texts = "heads" if random.Random(request.seed).random() < 0.6 else "tails"
        answer.message["content"] = texts
        ids = [ord(letter) for letter in texts]
        return ChatCompletion(answer.message, "stop", answer.prompt_token_ids, ids, [-0.5] * len(ids), answer.policy)


def continued(engine, environment, count=40, **options):
    return collect(
        engine, environment, scenarios(3), player=ContinuationPlayer(AgentLoop(), count), max_turns=3, **options
    )


@pytest.mark.parametrize("environment", [Coins, SavedCoins])
def test_a_label_is_how_often_the_policy_succeeds_from_there(environment):
    assert isinstance(environment(), Restorable) == (environment is SavedCoins)
    engine = Tosser()
    trajectories = continued(engine, environment)
    assert [trajectory.id for trajectory in trajectories] == [f"s{n}/{k}" for n in range(3) for k in range(2)]
    seen = set()
    for trajectory in trajectories:
        texts = [message.content for message in trajectory.histories[0].messages if message.role == "assistant"]
        labels = read(CONTINUED, trajectory)
        assert len(labels) == len(texts) == trajectory.metrics["turns"]
        for turn, label in enumerate(labels):
            lost = "tails" in texts[: turn + 1]
            expected = 0.0 if lost else 0.6 ** (2 - turn)
            assert label == pytest.approx(expected, abs=0.0 if lost or turn == 2 else 0.25)
            seen.add((turn, lost))
    assert len(seen) > 3
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_replaying_gives_what_restoring_gives():
    assert repr(continued(Tosser(), Coins, 3)) == repr(continued(Tosser(), SavedCoins, 3, concurrency=1))


def test_the_episode_is_the_one_that_is_played_without():
    plain = collect(Tosser(), Coins, scenarios(3), max_turns=3)
    engine = Tosser()
    trajectories = continued(engine, Coins, 2)
    answers = len(engine.requests) - sum(trajectory.metrics["turns"] for trajectory in trajectories)
    assert sum(trajectory.metrics["continued_tokens"] for trajectory in trajectories) == answers * len("heads")
    for trajectory, other in zip(plain, trajectories, strict=True):
        assert other.metrics.pop("continuations") == 2 * 2  # of all turns but the last one
        del other.metrics["continued_tokens"]
        other.metrics = {name: value for name, value in other.metrics.items() if "/" not in name}
        assert repr(trajectory) == repr(other)


def test_an_environment_that_does_not_repeat_itself_is_refused_by_name():
    with pytest.raises(
        SpecError, match=r"environment: Forgetful gave other observations or rewards .* methods `save` and `restore`"
    ):
        continued(Tosser(), Forgetful, 1)


def test_a_continuation_that_fails_is_kept_and_played_again():
    whole = continued(Tosser(), Coins, 2)
    plain = Tosser()
    collect(plain, Coins, scenarios(3), max_turns=3)
    once = {request.seed for request in plain.requests}

    def fail(request):
        if request.seed not in once:
            raise EngineError("out of memory")

    broken = continued(Tosser(fail=fail), Coins, 2)
    assert [trajectory.id for trajectory in broken[:3]] == ["s0/0", "s0/1", "s0~continued/0"]
    assert {trajectory.failure.message for trajectory in broken if "~" in trajectory.id} == {"out of memory"}
    assert not any(read(CONTINUED, trajectory) for trajectory in broken)
    finished = {trajectory.id: trajectory for trajectory in broken if trajectory.failure is None}
    assert repr(continued(Tosser(), Coins, 2, finished=finished)) == repr(whole)


def test_a_real_game_is_returned_to():
    """An engine that plays the first free cell, so that the outcome of a position is known."""

    class First(Parrot):
        async def chat(self, request):
            answer = await super().chat(request)
            free = "".join(request.messages[-1]["content"].splitlines()[-3:])
            answer.message["content"] = next(cell for cell in "123456789" if cell in free)
            return answer

    game = TicTacToe(train=4, heldout=1)
    trajectories = collect(
        First(),
        lambda: TicTacToe(train=4, heldout=1),
        game.scenarios("train"),
        player=ContinuationPlayer(AgentLoop(), 2),
    )
    for trajectory in trajectories:
        assert trajectory.failure is None
        assert read(CONTINUED, trajectory) == [float(trajectory.success)] * int(trajectory.metrics["turns"])


def test_it_goes_on_from_the_very_tokens_however_little_an_engine_remembers(base_dir, monkeypatch):
    monkeypatch.setattr(conversations, "REMEMBERED_ANSWERS", 3)
    engine = TransformersEngine(base_dir, max_length=1024, device="cpu")
    given = []

    async def chat(request):
        given.append(await real(request))
        return given[-1]

    real = engine.chat
    monkeypatch.setattr(engine, "chat", chat)
    options = {"sampling": Sampling(max_tokens=6), "group_size": 1, "max_turns": 3}
    (trajectory,) = collect(engine, Coins, scenarios(1), player=ContinuationPlayer(AgentLoop(), 4), **options)
    (history,) = trajectory.histories
    ends = [message.span[1] for message in history.messages if message.span]
    firsts = [*given[3:7], *given[7::2]]  # of each continuation: four from the second step, four from the first
    assert len(given) == 3 + 4 + 4 * 2
    for number, answer in enumerate(firsts):
        end = ends[1] if number < 4 else ends[0]
        assert answer.prompt_token_ids[:end] == history.token_ids[:end]
    texts = [message.content for message in history.messages if message.span]
    assert any("\ufffd" in text for text in texts), "else a new tokenisation would give the same tokens"


class Obedient(Parrot):
    """An engine that tosses what it has read last."""

    async def chat(self, request):
        answer = await super().chat(request)
        text = "tails" if "tails" in request.messages[-1]["content"] else "heads"
        ids = [ord(letter) for letter in text]
        message = {"role": "assistant", "content": text}
        return ChatCompletion(message, "stop", answer.prompt_token_ids, ids, [-0.5] * len(ids), answer.policy)


def replayed(engine, environment, recorded, step, answer, **options):
    player = CounterfactualPlayer(AgentLoop(), recorded, step, answer)
    return collect(engine, environment, [recorded.scenario], player=player, max_turns=3, **options)


def test_another_answer_of_the_environment_is_what_the_policy_goes_on_from():
    recorded = collect(Obedient(), Coins, scenarios(1), max_turns=3)[0]
    assert recorded.success
    for step, answer, said in ((1, None, ["heads"] * 3), (1, "tails", ["heads", "tails", "heads"]), (2, "tails", None)):
        episodes = replayed(Obedient(), Coins, recorded, step, answer)
        texts = [message.content for message in episodes[0].histories[0].messages if message.role == "assistant"]
        assert texts == (said or ["heads", "heads", "tails"])
        assert {episode.success for episode in episodes} == {answer is None}
    with pytest.raises(SpecError, match=r"environment: Forgetful gave other observations when the actions of the epis"):
        replayed(Obedient(), Forgetful, recorded, 1, "tails")


def test_the_tokens_before_the_branch_are_the_recorded_ones(base_dir):
    engine = TransformersEngine(base_dir, max_length=1024, device="cpu")
    options = {"sampling": Sampling(max_tokens=6), "group_size": 1}
    (recorded,) = collect(engine, Coins, scenarios(1), max_turns=3, seed=1, **options)
    engine = TransformersEngine(base_dir, max_length=1024, device="cpu")
    (episode,) = replayed(engine, Coins, recorded, 2, "Coin 7.", seed=2, **options)
    (before,), (after,) = recorded.histories, episode.histories
    end = [message.span for message in after.messages if message.span][1][1]
    assert after.token_ids[:end] == before.token_ids[:end]
    assert repr(after.logprobs[:end]) == repr(before.logprobs[:end])
    assert [message.content for message in after.messages if message.role == "user"][-1] == "Coin 7."
    assert after.token_ids[end:] != before.token_ids[end:]
