"""Learned reward: combination of the scores of reward models. The models are real, tiny and barely trained."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from components.algorithms.reward_models import card as reward_card
from components.algorithms.reward_models import model as reward_model
from components.algorithms.reward_models.data import episode
from components.algorithms.reward_models.spec import ProcessRewardModelSpec, RewardModelSpec
from components.algorithms.trainer import JudgedCollection
from components.errors import ArtifactDamaged, ArtifactError, ResourceError, SpecError
from components.models.weights import load_tokenizer, prepare
from components.rewards.judge import judge
from components.rewards.judges.learned import Learned, combined
from components.rewards.protocol import RewardResources
from components.specs import Target
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Score, Trajectory
from tests.algorithms.builders import MODEL, batch, history, train_reward_model, trajectory

HEADS = {"overall": 1.0, "kind": -0.5}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(cache, tmp_path_factory) -> dict[str, Path]:
    """Train two models of episodes and one of turns."""
    trajectories = batch(seed=1, groups=2, size=3)
    for example in trajectories:
        example.step_rewards = [example.reward or 0.0, 0.5]
    common = {"learning_rate": 5e-3, "held_out": 0.0, "heads": HEADS}
    specs = {
        "one": RewardModelSpec(**common),
        "two": RewardModelSpec(**common),
        "turns": ProcessRewardModelSpec(**common),
        "plain": RewardModelSpec(learning_rate=5e-3, held_out=0.0),
    }
    created = {}
    for seed, (name, spec) in enumerate(specs.items()):
        out, scratch = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("scratch")
        scores = [Score(o.id, o.reward, {"kind": o.sample / 2, "kind/0": 1.0, "kind/1": 0.0}) for o in trajectories]
        train_reward_model(
            spec, MODEL, prepare(MODEL, cache), [JudgedCollection(trajectories, scores)],
            start=None, out=out, scratch=scratch, seed=seed, on_step=lambda _: None,
        )  # fmt: skip
        created[name] = out
    return created


def group() -> list[Trajectory]:
    return batch(seed=7, groups=1, size=3)


def raw(folder: Path, cache: Path, trajectory: Trajectory) -> torch.Tensor:
    """Return the scores (R, H) of a single model."""
    model, card = reward_model.load(folder, prepare(MODEL, cache), MODEL)
    chat = ChatFormat(load_tokenizer(prepare(MODEL, cache)))
    return model.scores([episode(chat, trajectory, turns=card.kind == "process_reward_model")], 1024)


def scored(cache: Path, *folders: Path, found=None, **options) -> list[Score]:
    reward = Learned([str(folder) for folder in folders], **options)
    reward.use(RewardResources(cache, MODEL))
    return list(judge(reward, group() if found is None else found))


def test_the_reward_is_the_weighted_sum_of_the_heads(models, cache):
    for example, score in zip(group(), scored(cache, models["one"], weight=3.0), strict=True):
        ((kind, overall),) = raw(models["one"], cache, example).tolist()
        assert score.reward == pytest.approx(3.0 * (overall - 0.5 * kind), rel=1e-5, abs=1e-6)
        assert score.components == pytest.approx({"overall": overall, "kind": kind}, rel=1e-5, abs=1e-6)
        assert score.step_rewards == []


def test_normalised_scores_are_those_of_the_training_data(models, cache):
    heads = reward_card.read_card(models["one"]).heads
    for example, score in zip(group(), scored(cache, models["one"], normalise=True), strict=True):
        (values,) = raw(models["one"], cache, example).tolist()
        z = {name: (value - heads[name].mean) / heads[name].std for value, name in zip(values, heads, strict=True)}
        assert score.reward == pytest.approx(z["overall"] - 0.5 * z["kind"], rel=1e-4, abs=1e-5)


def test_step_rewards_add_up_to_the_reward_with_that_of_the_task(models, cache):
    options = {"task": lambda trajectory: 10.0 + trajectory.sample, "task_weight": 0.5, "weight": 2.0, "cap": 0.1}
    for example, score in zip(group(), scored(cache, models["turns"], **options), strict=True):
        steps = [
            2.0 * min(0.1, overall - 0.5 * kind) for kind, overall in raw(models["turns"], cache, example).tolist()
        ]
        assert len(steps) == 2
        task = 0.5 * (10.0 + example.sample)
        assert score.step_rewards == pytest.approx([steps[0], steps[1] + task], rel=1e-5, abs=1e-6)
        assert score.reward == pytest.approx(sum(steps) + task, rel=1e-5)
        assert score.components["task"] == 10.0 + example.sample


def test_an_ensemble_is_bounded_by_how_far_its_members_differ(models, cache, subtests):
    for how in ["mean", "min", "bound"]:
        with subtests.test(how=how):
            results = scored(cache, models["one"], models["two"], combine=how, deviations=2.0)
            again = scored(cache, models["one"], models["two"], combine=how, deviations=2.0)
            assert results == again  # members take turns in one model; which one was last makes no difference
            for example, score in zip(group(), results, strict=True):
                both = []
                for name in ("one", "two"):
                    ((kind, overall),) = raw(models[name], cache, example).tolist()
                    both.append(overall - 0.5 * kind)
                mean, half = sum(both) / 2, abs(both[0] - both[1]) / 2
                assert half > 1e-4
                expected = {"mean": mean, "min": min(both), "bound": mean - 2.0 * half}[how]
                assert score.reward == pytest.approx(expected, rel=1e-4, abs=1e-5)
                assert score.components["spread"] == pytest.approx(half, rel=1e-3)


def test_combined_written_out():
    score_MR = torch.tensor([[1.0, 4.0], [3.0, 4.0], [5.0, 1.0]])
    assert combined(score_MR, "mean", 9.0).tolist() == [3.0, 3.0]
    assert combined(score_MR, "min", 9.0).tolist() == [1.0, 1.0]
    spread = [math.sqrt(8 / 3), math.sqrt(2)]
    assert combined(score_MR, "bound", 0.5).tolist() == pytest.approx([3.0 - 0.5 * value for value in spread])


def test_what_cannot_be_read_is_unscored_and_says_why(models, cache):
    long = trajectory("s0", 7, [history([(False, [5] * 200), (True, [6])], [-1.0])], 1.0)
    unsaid = trajectory("s0", 8, [], 1.0)
    collected = [group()[0], long, unsaid]
    scores = scored(cache, models["one"], found=collected)
    assert [score.reward is None for score in scores] == [False, True, True]
    assert "its 201 tokens are more than model.max_length=128" in scores[1].failure.message
    assert "nothing that the reward model reads" in scores[2].failure.message


def test_an_unscored_task_leaves_the_episode_unscored(models, cache):
    def task(trajectory: Trajectory) -> float:
        return math.nan if trajectory.sample == 1 else 1.0

    scores = scored(cache, models["one"], task=task)
    assert [score.reward is None for score in scores] == [False, True, False]
    assert scores[1].failure.boundary == "judge"


def test_models_that_are_not_alike_make_no_ensemble(models, cache):
    for other in ("turns", "plain"):
        with pytest.raises(ArtifactError, match="make no ensemble"):
            scored(cache, models["one"], models[other])
    with pytest.raises(ArtifactError, match="another base"):
        Learned(str(models["one"])).use(RewardResources(cache, MODEL.model_copy(update={"name": "tiny2"})))
    with pytest.raises(ResourceError, match="call use"):
        Learned(str(models["one"])).score_group(group())
    with pytest.raises(SpecError, match="empty list"):
        Learned([])


def test_a_stage_key_says_what_the_folder_holds_not_where_it_is(models, tmp_path):
    import shutil

    def key(folder: Path) -> dict:
        data = {"_target_": "components.rewards.judges.learned.Learned", "path": str(folder)}
        return Target.model_validate(data).resolved()

    shutil.copytree(models["one"], tmp_path / "copy")
    assert key(tmp_path / "copy") == key(models["one"]) != key(models["two"])
    assert str(tmp_path) not in str(key(tmp_path / "copy"))
    (tmp_path / "copy" / "heads.safetensors").write_bytes(b"")
    with pytest.raises(ArtifactDamaged, match="heads"):
        key(tmp_path / "copy")
