"""The reward R = α·R_task + β·ΣR_step - γ·KL, from the judge to the advantages, compared with the formula written out
with a process reward model and a policy as PEFT and transformers build them, one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.policy_gradient.trainer import prepare
from components.algorithms.reward_models import model as reward_model
from components.algorithms.reward_models.data import episode
from components.algorithms.reward_models.spec import ProcessRewardModelSpec
from components.algorithms.trainer import JudgedCollection
from components.models.weights import load_tokenizer
from components.models.weights import prepare as prepare_weights
from components.rewards.judge import judge
from components.rewards.judges.learned import Learned
from components.rewards.protocol import RewardResources
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Score
from components.trajectories.store import read_scored, write_scores, write_trajectories
from tests.algorithms.builders import (
    MODEL,
    TEMPERATURE,
    batch,
    make_context,
    make_policy,
    plain_logprobs,
    plain_model,
    train_reward_model,
)

ALPHA, BETA, GAMMA = 0.7, 2.0, 0.3

pytestmark = pytest.mark.timeout(1800)


def task(trajectory) -> float:
    return 10.0 + trajectory.sample


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def process_model(cache, tmp_path_factory):
    """Train a process reward model briefly on labels of turns."""
    trajectories = batch(seed=1, groups=2, size=3)
    scores = [Score(trajectory.id, 0.0, {"good/0": trajectory.reward, "good/1": 0.5}) for trajectory in trajectories]
    out, scratch = tmp_path_factory.mktemp("process"), tmp_path_factory.mktemp("scratch")
    spec = ProcessRewardModelSpec(learning_rate=5e-3, held_out=0.0, heads={"good": 1.0})
    train_reward_model(
        spec, MODEL, prepare_weights(MODEL, cache), [JudgedCollection(trajectories, scores)],
        start=None, out=out, scratch=scratch, seed=0, on_step=lambda _: None,
    )  # fmt: skip
    return out


def steps_alone(process_model, cache, trajectory) -> list[float]:
    """Return R_step of each turn."""
    model, _ = reward_model.load(process_model, prepare_weights(MODEL, cache), MODEL)
    chat = ChatFormat(load_tokenizer(prepare_weights(MODEL, cache)))
    return model.scores([episode(chat, trajectory, turns=True)], 1024)[:, 0].tolist()


def kl_alone(policy, base_dir, trajectory) -> list[float]:
    """Return log π - log π_ref of each sampled token: the k1 estimate."""
    model = plain_model(base_dir, policy)
    (history,) = trajectory.histories
    with torch.no_grad():
        of_policy = plain_logprobs(model, history.token_ids, TEMPERATURE)
        with model.disable_adapter():
            of_reference = plain_logprobs(model, history.token_ids, TEMPERATURE)
    mask = torch.tensor(history.sampled_mask()[1:])
    return (of_policy - of_reference)[mask].tolist()


@pytest.fixture
def played(process_model, cache, tmp_path):
    """Return episodes as training reads them: judged, stored, joined."""
    trajectories = batch(seed=7, groups=2, size=2)
    for trajectory in trajectories:
        trajectory.reward = None
    reward = Learned(str(process_model), task=task, task_weight=ALPHA, weight=BETA)
    reward.use(RewardResources(cache, MODEL))
    files = tmp_path / "trajectories.parquet", tmp_path / "scores.parquet"
    write_trajectories(files[0], trajectories)
    write_scores(files[1], judge(reward, trajectories))
    return list(read_scored(*files))


PLAIN = {"baseline": "none", "scale": "none", "kl_coefficient": GAMMA, "kl_estimator": "k1", "pack_tokens": 64}
"""Settings under which the advantage of an episode is R itself."""


def test_the_advantage_of_an_episode_is_the_formula(played, process_model, cache, tmp_path):
    base_dir = prepare_weights(MODEL, cache)
    policy = make_policy(base_dir)
    prepare(GRPOSpec(**PLAIN, kl_in="reward"), make_context(policy, None, played, scratch=tmp_path))
    for trajectory in played:
        kl = kl_alone(policy, base_dir, trajectory)
        parts = ALPHA * task(trajectory), BETA * sum(steps_alone(process_model, cache, trajectory)), -GAMMA * sum(kl)
        assert trajectory.advantage == pytest.approx(sum(parts), rel=1e-4)
        assert min(map(abs, parts)) > 1e-3  # each term is non-zero


def test_with_credit_by_turn_each_turn_has_its_part_and_all_add_up(played, process_model, cache, tmp_path):
    """With discount 0, turn t gets β·R_step_t, and the last turn also α·R_task; each token is reduced by the KL penalty
    from it on."""
    base_dir = prepare_weights(MODEL, cache)
    policy = make_policy(base_dir)
    spec = GRPOSpec(**PLAIN, kl_in="token_rewards", credit="turns", discount=0.0)
    _, learning = prepare(spec, make_context(policy, None, played, scratch=tmp_path))
    for trajectory in played:
        kl, steps = kl_alone(policy, base_dir, trajectory), steps_alone(process_model, cache, trajectory)
        spans = [message.span for message in trajectory.histories[0].messages if message.span]
        rewards = [BETA * step for step in steps]
        rewards[-1] += ALPHA * task(trajectory)
        by_token = [reward for reward, (start, end) in zip(rewards, spans, strict=True) for _ in range(end - start)]
        expected = [reward - GAMMA * sum(kl[t:]) for t, reward in enumerate(by_token)]
        assert learning.advantages[trajectory.id] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert sum(trajectory.step_rewards) == pytest.approx(ALPHA * task(trajectory) + BETA * sum(steps), rel=1e-5)
