"""Simulated judge of the measurement of RULER: it reads the end of a game from the question, and errs as often as its
name says."""

from __future__ import annotations

from statistics import fmean

import pytest

from components.environments.games.tictactoe import TicTacToe
from components.errors import ResourceError
from components.models.spec import ModelSpec
from components.rewards.judge import judge
from components.rewards.judges.ruler import Ruler
from components.rewards.llm.budget import Meter
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
from components.trajectories.schema import History, Message, Trajectory
from docs.simulated_judge import SCORES, application
from tests.rewards.judge_server import served
from tests.trajectories.builders import episode, talk

ENDS = {"win": "You win.", "draw": "A draw.", "loss": "You lose."}


@pytest.fixture(scope="module")
def url():
    with served(application()) as address:
        yield f"{address}/v1"


def games(scenarios: int = 4, samples: int = 8) -> list[Trajectory]:
    """Return games in which the agent plays cells in an order that differs by sample, some of them taken."""
    environment = TicTacToe(train=scenarios, heldout=1, difficulties=[1])
    played = []
    for scenario in environment.scenarios("train"):
        for sample in range(samples):
            messages = environment.reset(scenario)
            for turn in range(5):
                content = str((sample * 5 + turn * (2 + sample % 3)) % 9 + 1)
                step = environment.step({"content": content})
                messages += [{"role": "assistant", "content": content}, *step.observation]
                if step.done:
                    break
            history = History([Message(message["role"], message["content"]) for message in messages])
            played.append(episode(scenario.id, sample, histories=[history], outcome=step.info))
    return played


def scored(url: str, model: str, trajectories: list[Trajectory], seed: int | None = None) -> list[float | None]:
    extra = {} if seed is None else {"seed": seed}
    reward = Ruler(ServedJudge(url=url, model=model, extra=extra, retry_for=5.0))
    reward.use(RewardResources(None, ModelSpec(name="none"), Meter(), answers=None))
    try:
        return [score.reward for score in judge(reward, trajectories, concurrency=8)]
    finally:
        reward.close()


def expected(trajectory: Trajectory) -> float:
    return SCORES.get(ENDS.get(trajectory.outcome["result"], ""), 0.0)


def test_a_perfect_judge_scores_each_game_by_its_end(url):
    played = games()
    right = [expected(trajectory) for trajectory in played]
    assert {0.0, SCORES["You lose."], SCORES["You win."]} <= set(right)
    assert scored(url, "accuracy-1.0", played) == right
    assert scored(url, "accuracy-1.0", played[:1]) == right[:1]  # a single episode, as in evaluations


def test_errors_are_as_frequent_as_stated_and_repeatable(url):
    played = games(scenarios=64)
    right = [expected(trajectory) for trajectory in played]
    for accuracy in (0.75, 0.5):
        scores = scored(url, f"accuracy-{accuracy}", played)
        assert all(score in (value, pytest.approx(1 - value)) for score, value in zip(scores, right, strict=True))
        assert fmean(score == value for score, value in zip(scores, right, strict=True)) == pytest.approx(
            accuracy, abs=0.1
        )
        assert scored(url, f"accuracy-{accuracy}", played) == scores
        assert scored(url, f"accuracy-{accuracy}", played, seed=1) != scores


def test_another_model_and_another_task_are_refused(url):
    with pytest.raises(ResourceError, match="expected accuracy-P"):
        scored(url, "judge", games(1, 2))
    other = [episode("a", number, histories=[talk("Do a.", f"answer {number}")]) for number in range(2)]
    assert scored(url, "accuracy-1.0", other) == [None, None]


def test_a_judge_is_swapped_after_a_number_of_requests():
    played = games(scenarios=6)
    with served(application(swap=(6, 0.0))) as address:
        before, after = (scored(f"{address}/v1", "accuracy-1.0", played) for _ in range(2))
    assert before == [expected(trajectory) for trajectory in played]
    assert after == [pytest.approx(1 - score) for score in before]


def test_fresh_errors_differ_between_equal_requests():
    played = games(scenarios=16)
    with served(application(fresh_errors=True)) as address:
        first, second = (scored(f"{address}/v1", "accuracy-0.75", played) for _ in range(2))
        perfect = scored(f"{address}/v1", "accuracy-1.0", played)
    assert first != second
    assert perfect == [expected(trajectory) for trajectory in played]
