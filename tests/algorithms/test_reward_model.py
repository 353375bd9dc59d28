"""Reward models: losses compared with the formulas and TRL's, gradients compared with a plain model, one sequence at a
time; inputs, training, and rejected inputs."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from components.algorithms.reward_models import card as reward_card
from components.algorithms.reward_models import losses as reward_losses
from components.algorithms.reward_models import model as reward_model
from components.algorithms.reward_models.data import episode, packs
from components.algorithms.reward_models.examples import LabelledEpisode, Pair, gather
from components.algorithms.reward_models.model import RewardModel, load
from components.algorithms.reward_models.pair_accuracy import calibration
from components.algorithms.reward_models.spec import ProcessRewardModelSpec, RewardModelSpec, RewardTrainingSpec
from components.algorithms.reward_models.trainer import backward
from components.algorithms.trainer import JudgedCollection
from components.errors import ArtifactDamaged, ArtifactError, TrainingDiverged
from components.models.spec import LoraSpec
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Message, Score, Trajectory
from tests.algorithms.builders import (
    MODEL,
    batch,
    demonstrations,
    make_history,
    make_trajectory,
    plain_model,
    relative_difference,
    train_reward_model,
    trainable,
)
from tests.algorithms.test_checkpoint import DROPOUT
from tests.trajectories.builders import FAILURE

COMMON = {"learning_rate": 5e-3, "pack_tokens": 64, "batch_size": 64, "max_grad_norm": 1e9, "held_out": 0.0}
NUMBER = st.floats(-20, 20, width=32)


@pytest.fixture(scope="module")
def chat(base_dir) -> ChatFormat:
    return ChatFormat(load_tokenizer(base_dir))


def scores_of(trajectories: list[Trajectory], components=lambda trajectory: {}) -> list[Score]:
    return [Score(trajectory.id, trajectory.reward, components(trajectory)) for trajectory in trajectories]


def judged(trajectories: list[Trajectory], components=lambda trajectory: {}) -> list[JudgedCollection]:
    return [JudgedCollection(trajectories, scores_of(trajectories, components))]


def make(base_dir: Path, heads=("overall",), seed: int = 0, hidden_units: int | None = None) -> RewardModel:
    """Return a reward model with a non-zero adapter and biases."""
    model = RewardModel(base_dir, MODEL, heads, seed, hidden_units=hidden_units)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            if "lora_B" in name or name == "heads.bias":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_label_that_is_missing_counts_for_nothing():
    score = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    label = torch.tensor([[0.0, math.nan], [1.0, 4.0]])
    loss = reward_losses.mean_squared_error(score, label)
    assert loss.item() == pytest.approx((1 + 4 + 1) / 3)
    loss.backward()
    assert score.grad.tolist() == [[pytest.approx(2 / 3), 0.0], [pytest.approx(4 / 3), pytest.approx(2 / 3)]]
    assert reward_losses.mean_squared_error(score, torch.full((2, 2), math.nan)).item() == 0.0


@pytest.mark.parametrize(("margin", "centering"), [("none", 0.0), ("reward", 0.0), ("reward", 0.05)])
def test_loss_and_gradient_are_trls(base_dir, chat, margin, centering):
    """TRL 1.16's `compute_loss` on padded rows, with the classifier of transformers, which scores the last token."""
    from transformers import LlamaForSequenceClassification
    from trl import RewardTrainer

    spec = RewardModelSpec(**COMMON, margin=margin, centering=centering)
    trajectories = batch(seed=5, groups=3, size=3)
    ours = make(base_dir)
    with torch.no_grad():
        ours.bias_H.zero_()  # TRL's head has none
    pairs = gather(spec, chat, judged(trajectories), 128, seed=0).train
    measured, _ = backward(spec, ours, pairs)

    plain = plain_model(base_dir, ours)
    inner = plain.get_base_model()
    inner.config.num_labels = 1
    classifier = LlamaForSequenceClassification(inner.config)
    classifier.model = inner.model
    with torch.no_grad():
        classifier.score.weight.copy_(ours.weight_HM)
    rows = [pair.better for pair in pairs] + [pair.worse for pair in pairs]
    tokens = [torch.tensor(episode.streams[0].token_ids) for episode in rows]
    assert len({len(row) for row in tokens}) > 1
    ids_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=inner.config.pad_token_id)
    inputs = {"input_ids": ids_BT, "attention_mask": (ids_BT != inner.config.pad_token_id).long()}
    if margin == "reward":
        inputs["margin"] = torch.tensor([a.trajectory.reward - b.trajectory.reward for a, b in _couples(pairs)])
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=centering or None),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )

    def model(**given):
        return classifier(**{name: value for name, value in given.items() if name != "margin"})

    loss = RewardTrainer.compute_loss(stub, model, inputs)
    loss.backward()
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert measured["accuracy"] == pytest.approx(stub._metrics["train"]["accuracy"][0])
    assert measured["margin"] == pytest.approx(stub._metrics["train"]["margin"][0], rel=1e-4, abs=1e-6)
    expected = {name: parameter.grad for name, parameter in trainable(plain).items()}
    expected |= {"heads.weight": classifier.score.weight.grad, "heads.bias": ours.bias_H.grad}
    assert relative_difference({name: parameter.grad for name, parameter in ours.parameters.items()}, expected) <= 1e-5


def _couples(pairs):
    return [(pair.better, pair.worse) for pair in pairs]


def _turns(trajectory: Trajectory) -> list[int]:
    """Return the positions of the last tokens of the two answers of an episode of `batch`."""
    mask = trajectory.histories[0].sampled_mask()
    return [index for index, sampled in enumerate(mask) if sampled and not [*mask, False][index + 1]]


@pytest.mark.parametrize(
    "spec",
    [
        RewardModelSpec(**COMMON, heads={"overall": 1.0, "kind": 0.5}, centering=0.1, margin="reward"),
        ProcessRewardModelSpec(**COMMON, heads={"overall": 1.0, "kind": 0.5}),
        ProcessRewardModelSpec(**COMMON, heads={"overall": 1.0, "kind": 0.5}, loss="comparison", pairs="best_worst"),
        ProcessRewardModelSpec(**COMMON, heads={"overall": 1.0, "kind": 0.5}, hidden_units=5),
    ],
    ids=["episodes", "turns", "turns, compared", "hidden layer"],
)
def test_loss_and_gradient_are_those_of_a_plain_model(base_dir, chat, spec):
    """Two-turn episodes with an observation between the turns, one sequence at a time; each head has its own labels."""
    trajectories = batch(seed=3, groups=3, size=3)
    labels = {}
    for index, trajectory in enumerate(trajectories):
        trajectory.step_rewards = [0.1 * index, 1.0 - 0.2 * index]
        labels[trajectory.id] = {"kind": (index * 5) % 7 / 7, "kind/0": 0.3 * index}  # kind/1 is never labelled
    assert list(spec.heads) == ["kind", "overall"]
    model = make(base_dir, list(spec.heads), hidden_units=spec.hidden_units)
    data = gather(spec, chat, judged(trajectories, lambda trajectory: labels[trajectory.id]), 128, seed=0)
    measured, _ = backward(spec, model, data.train)

    plain = plain_model(base_dir, model)
    weight = model.weight_HM.detach().clone().requires_grad_()
    bias = model.bias_H.detach().clone().requires_grad_()
    layer = torch.nn.Identity()
    if spec.hidden_units:
        layer = torch.nn.Sequential(torch.nn.Linear(model.hidden_layer.in_features, spec.hidden_units), torch.nn.ReLU())
        layer[0].load_state_dict(model.hidden_layer.state_dict())
    read = {}
    for trajectory in trajectories:
        ids = torch.tensor(trajectory.histories[0].token_ids)
        hidden_TD = plain.get_base_model().model(input_ids=ids[None]).last_hidden_state[0]
        positions = [len(ids) - 1] if spec.name == "reward_model" else _turns(trajectory)
        assert len(positions) == (1 if spec.name == "reward_model" else 2)
        read[trajectory.id] = layer(hidden_TD[positions]) @ weight.T + bias
    terms = []
    if spec.name == "process_reward_model" and spec.loss == "mse":
        for trajectory in trajectories:
            terms += [(read[trajectory.id][turn, 1] - trajectory.step_rewards[turn]) ** 2 for turn in (0, 1)]
            terms.append((read[trajectory.id][0, 0] - labels[trajectory.id]["kind/0"]) ** 2)
    else:
        for head, value in enumerate(
            (lambda trajectory: labels[trajectory.id]["kind"], lambda trajectory: trajectory.reward)
        ):
            for name in ("s0", "s1", "s2"):
                ranked = sorted(
                    (trajectory for trajectory in trajectories if trajectory.group == name), key=value, reverse=True
                )
                couples = [(a, b) for i, a in enumerate(ranked) for b in ranked[i + 1 :]]
                for a, b in couples if spec.pairs == "all" else [(ranked[0], ranked[-1])]:
                    chosen, rejected = (read[trajectory.id][:, head].sum() for trajectory in (a, b))
                    gap = chosen - rejected - (value(a) - value(b) if spec.margin == "reward" else 0.0)
                    terms.append(-torch.log(torch.sigmoid(gap)) + spec.centering * (chosen + rejected) ** 2)
    loss = sum(terms) / len(terms)
    loss.backward()
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: parameter.grad for name, parameter in trainable(plain).items()}
    expected |= {"heads.weight": weight.grad, "heads.bias": bias.grad}
    expected |= {f"heads.hidden.{name[2:]}": parameter.grad for name, parameter in layer.named_parameters()}
    assert relative_difference({name: parameter.grad for name, parameter in model.parameters.items()}, expected) <= 1e-5


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_each_turn_is_read_at_its_last_token_whatever_stands_between(chat):
    first = make_history([(False, [5] * 7), (True, [6, 7]), (False, [8] * 3), (True, [9])], [-1.0] * 3)
    helper = make_history([(False, [10] * 4), (True, [11, 12, 13]), (False, [14])], [-1.0] * 3)
    helper.agent = "helper"
    last = make_history([(False, [5] * 2), (True, [6] * 5), (False, [20, 21])], [-1.0] * 5)
    trajectory = make_trajectory("a", 0, [first, last, helper], 1.0)
    turns = episode(chat, trajectory, turns=True)
    assert [stream.places for stream in turns.streams] == [(8, 12), (6,), (6,)]
    whole = episode(chat, trajectory, turns=False)
    assert [(list(stream.token_ids), stream.places) for stream in whole.streams] == [(last.token_ids, (8,))]


def test_a_written_conversation_is_read_where_a_sampled_one_would_be(chat):
    (trajectory,) = demonstrations(1)
    (stream,) = episode(chat, trajectory, turns=True).streams
    ends = [index for index, token in enumerate(stream.token_ids) if token == chat.end_id]
    assert list(stream.places) == [ends[2], ends[4]]  # of system, user, assistant, user, assistant
    assert episode(chat, trajectory, turns=False).streams[0].places == (len(stream.token_ids) - 1,)


def test_scores_do_not_depend_on_what_else_is_in_the_pack(base_dir, chat):
    """An episode may be a prefix of another, or identical to it."""
    shared = make_history([(False, [5] * 6), (True, [7, 8])], [-1.0] * 2)
    longer = make_history([(False, [5] * 6), (True, [7, 8]), (False, [9, 9]), (True, [10])], [-1.0] * 3)
    trajectories = [make_trajectory("a", n, [history], 1.0) for n, history in enumerate((shared, longer, shared))]
    trajectories.insert(1, batch(groups=1, size=1)[0])
    model = make(base_dir)
    for turns in (False, True):
        episodes = [episode(chat, trajectory, turns=turns) for trajectory in trajectories]
        together = model.scores(episodes, 4096)
        assert len(packs(episodes, 4096)) == 1
        alone = torch.cat([model.scores([episode], 64) for episode in episodes])
        assert torch.allclose(together, alone, atol=1e-5)


def test_nothing_to_read_is_no_episode(chat):
    empty = make_trajectory("a", 0, [], 1.0)
    unsaid = make_trajectory("a", 1, [make_history([(False, [5, 6])], [])], 1.0)
    assert episode(chat, empty, turns=False).readings == episode(chat, unsaid, turns=True).readings == 0


# --- training -------------------------------------------------------------------------------------------------------

GOOD, BAD = 200, 100


def task(groups: int, size: int = 4) -> list[Trajectory]:
    """Return episodes with two answers; an answer that contains GOOD is good. The reward is the number of good
    answers."""
    result = []
    for number, trajectory in enumerate(batch(seed=9, groups=groups, size=size)):
        answers = [m for m in trajectory.histories[0].messages if m.span is not None]
        good = [bool(number & 1), bool(number & 2)]
        for message, is_good in zip(answers, good, strict=True):
            start, end = message.span
            trajectory.histories[0].token_ids[start:end] = [GOOD if is_good else BAD] * (end - start)
        trajectory.step_rewards, trajectory.reward = [float(value) for value in good], float(sum(good))
        result.append(trajectory)
    return result


def run(base_dir, folder: Path, spec: RewardTrainingSpec, trajectories, scores=None, earlier=(), **more):
    out, scratch = folder / "out", folder / "scratch"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    scratch.mkdir(exist_ok=True)
    options = {"model": MODEL, "start": None, "seed": 3, "on_step": lambda _: None, "save_every": 0.0} | more
    newest = JudgedCollection(trajectories, scores_of(trajectories) if scores is None else scores)
    metrics = train_reward_model(
        spec, base_dir=base_dir, judged=[newest, *earlier], out=out, scratch=scratch, **options
    )
    return out, metrics


LEARNING = {"learning_rate": 1e-2, "batch_size": 8, "epochs": 6, "held_out": 0.25}


@pytest.mark.parametrize(
    "spec",
    [
        RewardModelSpec(**LEARNING),
        ProcessRewardModelSpec(**LEARNING),
        ProcessRewardModelSpec(**LEARNING, loss="comparison"),
    ],
    ids=["episodes", "turns", "turns, compared"],
)
def test_it_learns_which_episode_is_better_on_scenarios_it_has_not_seen(base_dir, tmp_path, spec):
    out, metrics = run(base_dir, tmp_path, spec, task(8))
    assert metrics["heldout_pairs"] >= 8
    assert metrics["heldout_accuracy"] == 1.0
    card = reward_card.read_card(out)
    assert (card.kind, list(card.heads)) == (spec.name, ["overall"])


def test_accuracy_by_epoch_is_that_of_shorter_trainings(base_dir, tmp_path):
    spec = RewardModelSpec(**{**COMMON, "batch_size": 5, "held_out": 0.4, "epochs": 3, "learning_rate": 1e-3})
    trajectories = task(groups=10)
    out, metrics = run(base_dir, tmp_path / "3", spec, trajectories)
    for epochs in (1, 2):
        _, shorter = run(base_dir, tmp_path / str(epochs), spec.model_copy(update={"epochs": epochs}), trajectories)
        assert metrics[f"epoch/{epochs}/heldout_accuracy"] == shorter["heldout_accuracy"]
        assert metrics[f"epoch/{epochs}/accuracy"] == shorter[f"epoch/{epochs}/accuracy"]
    assert metrics["epoch/3/heldout_accuracy"] == metrics["heldout_accuracy"]
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps, pairs = len(log) // 3, int(metrics["pairs"])
    sizes = [5] * (steps - 1) + [pairs - 5 * (steps - 1)]
    right = [round(step["accuracy"] * size) for step, size in zip(log[:steps], sizes, strict=True)]
    assert metrics["epoch/1/accuracy"] == pytest.approx(sum(right) / pairs)
    assert sum(value for name, value in metrics.items() if name.endswith("/pairs")) == metrics["heldout_pairs"]


def test_calibration_compares_predicted_and_observed_shares():
    logit = math.log(0.83 / 0.17)  # the model is 83 % sure
    measured = calibration([logit, logit, -logit, 0.0, -40.0, 800.0])
    assert measured == pytest.approx(
        {
            "calibration/0.5/predicted": 0.5,
            "calibration/0.5/observed": 0.5,
            "calibration/0.5/pairs": 1,
            "calibration/0.8/predicted": 0.83,
            "calibration/0.8/observed": 2 / 3,
            "calibration/0.8/pairs": 3,
            "calibration/0.9/predicted": 1.0,
            "calibration/0.9/observed": 0.5,
            "calibration/0.9/pairs": 2,
            "calibration_error": (3 * (0.83 - 2 / 3) + 2 * 0.5) / 6,
        }
    )
    assert calibration([]) == {}


def test_heads_learn_their_components_and_may_disagree(base_dir, tmp_path):
    trajectories = task(8)
    kinds = {
        trajectory.id: {"first": trajectory.step_rewards[0], "second": 1 - trajectory.step_rewards[1]}
        for trajectory in trajectories
    }
    spec = RewardModelSpec(**{**LEARNING, "epochs": 12}, heads={"first": 1.0, "second": 2.0})
    _, metrics = run(
        base_dir, tmp_path, spec, trajectories, scores_of(trajectories, lambda trajectory: kinds[trajectory.id])
    )
    assert (metrics["heldout_accuracy/first"], metrics["heldout_accuracy/second"]) == (1.0, 1.0)


def test_it_keeps_the_mean_and_spread_of_its_scores(base_dir, tmp_path, chat):
    spec = RewardModelSpec(**{**LEARNING, "epochs": 1, "held_out": 0.0})
    trajectories = task(2)
    out, _ = run(base_dir, tmp_path, spec, trajectories)
    model, card = reward_model.load(out, base_dir, MODEL)
    score_R = model.scores([episode(chat, trajectory, turns=False) for trajectory in trajectories], 1024)[:, 0]
    assert card.heads["overall"].mean == pytest.approx(score_R.mean().item(), abs=1e-5)
    assert card.heads["overall"].std == pytest.approx(score_R.var(correction=0).sqrt().item(), abs=1e-5)


def test_it_begins_with_the_adapter_of_a_policy_and_goes_on_from_a_reward_model(base_dir, tmp_path, start):
    none = RewardModelSpec(**{**LEARNING, "learning_rate": 1e-30, "epochs": 1})
    out, _ = run(base_dir, tmp_path / "first", none, task(4), start=start)
    adapter = "adapter/adapter_model.safetensors"
    assert (out / adapter).read_bytes() == (start / adapter).read_bytes()
    further, _ = run(base_dir, tmp_path / "second", none, task(4), start=out, seed=8)
    assert torch.equal(*(load_file(folder / "heads.safetensors")["weight"] for folder in (out, further)))
    steps = [json.loads((folder / "trainer.json").read_text())["step"] for folder in (out, further)]
    assert steps[1] == 2 * steps[0] > 0
    trajectories = task(4)
    scores = scores_of(trajectories, lambda trajectory: {"more": trajectory.reward})
    for number, heads in enumerate(({"more": 1.0, "overall": 1.0}, {"more": 1.0})):
        other_heads = none.model_copy(update={"heads": heads})
        with pytest.raises(
            ArtifactError,
            match=f"has the heads overall, but algorithm.heads has {', '.join(heads)}. Set the same heads",
        ):
            run(base_dir, tmp_path / f"heads{number}", other_heads, trajectories, scores, start=out)
    by_turn = ProcessRewardModelSpec(epochs=1)
    with pytest.raises(
        ArtifactError, match=r"which scores whole episodes, but algorithm\.name is process_reward_model"
    ):
        run(base_dir, tmp_path / "kind", by_turn, trajectories, start=out)
    other = MODEL.model_copy(update={"name": "other"})
    with pytest.raises(ArtifactError, match="another base"):
        run(base_dir, tmp_path / "base", none, trajectories, start=out, model=other)


# --- further training -----------------------------------------------------------------------------------------------


def again(trajectories: list[Trajectory], ago: int = 1) -> JudgedCollection:
    """Return the same episodes as an earlier collection."""
    (trajectory,) = judged(
        [dataclasses.replace(trajectory, id=f"{trajectory.id}@-{ago}") for trajectory in trajectories]
    )
    return trajectory


def test_two_trainings_are_one_of_twice_the_epochs(base_dir, tmp_path):
    """AdamW's moments and step counts are restored: without them the second training would differ."""
    trajectories = task(4)
    specs = [ProcessRewardModelSpec(**{**COMMON, "batch_size": 999, "epochs": epochs}) for epochs in (1, 2)]
    first, _ = run(base_dir, tmp_path / "first", specs[0], trajectories)
    second, _ = run(base_dir, tmp_path / "second", specs[0], trajectories, start=first)
    whole, _ = run(base_dir, tmp_path / "whole", specs[1], trajectories)
    for name in ("heads.safetensors", "adapter/adapter_model.safetensors", "optimizer.safetensors"):
        ours, expected = (load_file(folder / name) for folder in (second, whole))
        assert relative_difference(ours, expected) <= 1e-5, name
        if name == "heads.safetensors":
            assert relative_difference(load_file(first / name), expected) > 1e-3
    texts = [(folder / "trainer.json").read_text() for folder in (second, whole)]
    assert texts[0] == texts[1]


def test_episodes_of_different_collections_are_never_a_pair(chat):
    """A judge may have ranked the episodes only within a collection."""
    trajectories = task(2)
    spec = RewardModelSpec(held_out=0.0)
    alone = gather(spec, chat, judged(trajectories), 128, seed=0)
    both = gather(spec, chat, [*judged(trajectories), again(trajectories)], 128, seed=0)
    assert both.counts["pairs"] == 2 * alone.counts["pairs"]
    sides = [{"@" in episode.trajectory.id for episode in pair.episodes} for pair in both.train]
    assert {len(collections) for collections in sides} == {1}


@pytest.mark.parametrize("spec", [RewardModelSpec(held_out=0.25), ProcessRewardModelSpec(held_out=0.25)])
def test_adversarial_examples_are_the_scenarios_that_the_predicted_rewards_order_wrongly(chat, spec):
    trajectories = task(8)  # rewards 0, 1, 1, 2 in each scenario
    predicted = {one.id: one.reward for one in trajectories}
    for best in trajectories[7:28:4]:  # those of six scenarios look worse than the others
        predicted[best.id] = -1.0
    predicted[trajectories[7].id] = None  # unscored by the model
    wrong = {one.group for one in trajectories[8:28]}
    attacked = dataclasses.replace(judged(trajectories)[0], predicted=predicted)
    found = gather(spec, chat, [*judged(trajectories), attacked], 128, seed=0)
    assert {pair.better.trajectory.group for pair in found.compared_adversarial} == found.split.held_out & wrong
    assert (len(found.compared_adversarial), found.compared_earlier) == (5 * len(found.split.held_out & wrong), [])
    of_a_scenario = 4 if spec.learns_turn_labels else 5  # its episodes, or its pairs
    assert found.counts["adversarial_examples"] == len(wrong) * of_a_scenario
    plain = gather(spec, chat, judged(trajectories), 128, seed=0)
    assert len(found.train) == len(plain.train) + len(found.split.trained & wrong) * of_a_scenario


def test_a_scenario_never_changes_sides(chat):
    spec = RewardModelSpec(held_out=0.25)
    trajectories = task(24)
    first = gather(spec, chat, judged(trajectories[: 8 * 4]), 128, seed=0)
    assert (len(first.split.trained), len(first.split.held_out)) == (6, 2)
    newest = [JudgedCollection(trajectories[4 * 4 :], scores_of(trajectories[4 * 4 :]))]
    further = gather(spec, chat, [*newest, again(trajectories[: 8 * 4])], 128, seed=5, earlier_split=first.split)
    assert first.split.trained < further.split.trained
    assert first.split.held_out < further.split.held_out
    assert (len(further.split.trained), len(further.split.held_out)) == (18, 6)
    groups = [{pair.better.trajectory.group for pair in part} for part in (further.train, further.compared)]
    assert groups[0] == further.split.trained
    assert groups[1] <= further.split.held_out
    assert {"@" in pair.better.trajectory.id for pair in further.train} == {True, False}
    assert {"@" in pair.better.trajectory.id for pair in [*further.compared, *further.held_out]} == {False}
    assert {pair.better.trajectory.group for pair in further.compared_earlier} == first.split.held_out
    forgotten = gather(spec, chat, newest, 128, seed=5, earlier_split=further.split)
    assert forgotten.split == further.split


def test_a_model_is_measured_before_and_after_on_the_newest_and_on_earlier_episodes(base_dir, tmp_path):
    trajectories = task(8)
    none = RewardModelSpec(**{**LEARNING, "learning_rate": 1e-30, "epochs": 1})
    first, before = run(base_dir, tmp_path / "first", none, trajectories)
    spec = RewardModelSpec(**{**LEARNING, "epochs": 12})
    _, after = run(base_dir, tmp_path / "second", spec, trajectories, start=first, earlier=[again(trajectories)])
    assert after["heldout_accuracy_before"] == before["heldout_accuracy"] < 1.0
    assert after["heldout_margin_before"] == pytest.approx(before["heldout_margin"], abs=1e-5)
    assert after["heldout_accuracy"] == after["heldout_accuracy_earlier"] == 1.0
    assert after["heldout_pairs"] == after["heldout_pairs_earlier"] == before["heldout_pairs"]


def test_a_model_with_nothing_new_to_learn_stays_as_it_is(base_dir, tmp_path):
    spec = RewardModelSpec(**{**LEARNING, "epochs": 1})
    first, _ = run(base_dir, tmp_path / "first", spec, task(4))
    same = task(2)
    no_difference(same)
    second, metrics = run(base_dir, tmp_path / "second", spec, same, start=first)
    assert (metrics["skipped"], metrics["pairs"]) == (1.0, 0.0)
    assert "heldout_accuracy" not in metrics
    for name in ("heads.safetensors", "adapter/adapter_model.safetensors", "optimizer.safetensors", "scenarios.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert reward_card.read_card(first) == reward_card.read_card(second)


def test_a_killed_further_training_goes_on_to_the_same_bytes(base_dir, tmp_path):
    spec = RewardModelSpec(**{**LEARNING, "epochs": 2}, hidden_units=7)
    first, _ = run(base_dir, tmp_path / "first", spec, task(4), model=DROPOUT)
    begun = json.loads((first / "trainer.json").read_text())["step"]

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == begun + 3:
            raise KeyboardInterrupt

    options = {"model": DROPOUT, "start": first, "earlier": [again(task(4))]}
    with pytest.raises(KeyboardInterrupt):
        run(base_dir, tmp_path / "stopped", spec, task(6), on_step=stop, **options)
    stopped, measured = run(base_dir, tmp_path / "stopped", spec, task(6), **options)
    whole, expected = run(base_dir, tmp_path / "whole", spec, task(6), **options)
    for name in ("adapter/adapter_model.safetensors", "heads.safetensors", "reward_model.json", "optimizer.safetensors",
                 "trainer.json", "rng.safetensors", "scenarios.json"):  # fmt: skip
        assert (stopped / name).read_bytes() == (whole / name).read_bytes(), name
    for name in ("heldout_accuracy", "heldout_margin", "heldout_margin_before", "heldout_margin_earlier", "loss"):
        assert measured[name] == expected[name]
    assert load(whole, base_dir, DROPOUT)[0].hidden_layer.out_features == 7
    with pytest.raises(ArtifactError, match="does not contain the heads overall with these hidden_units"):
        run(base_dir, tmp_path / "linear", RewardModelSpec(**LEARNING), task(6), model=DROPOUT, start=first)


def test_a_model_that_does_not_say_what_it_learned_from_is_not_trained_further(base_dir, tmp_path, copied):
    (copied / "scenarios.json").unlink()
    with pytest.raises(ArtifactError, match=r"does not record which scenarios it was trained on \(scenarios.json"):
        run(base_dir, tmp_path / "further", RewardModelSpec(learning_rate=1e-3), task(2), start=copied)


def test_a_training_that_diverges_stops_before_a_model_is_written(base_dir, tmp_path):
    spec = RewardModelSpec(epochs=2).model_copy(update={"learning_rate": 1e30})  # a spec would reject this value
    with pytest.raises(TrainingDiverged, match="non_finite"):
        run(base_dir, tmp_path / "stop", spec, task(3))
    assert not (tmp_path / "stop" / "out" / "reward_model.json").exists()
    with pytest.raises(TrainingDiverged, match="at 0, only scores are affected"):
        run(base_dir, tmp_path / "skip", spec.model_copy(update={"non_finite": "skip"}), task(3))
    assert not (tmp_path / "skip" / "out" / "reward_model.json").exists()


# --- rejected inputs ------------------------------------------------------------------------------------------------


def no_difference(trajectories):
    for trajectory in trajectories:
        trajectory.reward = 0.5


def no_reward(trajectories):
    for trajectory in trajectories:
        trajectory.failure = FAILURE


def no_steps(trajectories):
    for trajectory in trajectories:
        trajectory.step_rewards = []


def too_many_steps(trajectories):
    for trajectory in trajectories:
        trajectory.step_rewards.append(1.0)


def not_numbers(trajectories):
    for trajectory in trajectories:
        trajectory.step_rewards = [math.nan] * 2


NOTHING_TO_LEARN = [
    (
        RewardModelSpec(),
        no_difference,
        "do two of the 8 labelled episodes differ in their judged reward by more than m",
    ),
    (RewardModelSpec(), no_reward, "none of 0 finished episodes has judged reward"),
    (
        RewardModelSpec(heads={"help": 1}),
        lambda _: None,
        "'help' .* none of 8 finished episodes has component 'help'.* algorithm.heads",
    ),
    *(
        (ProcessRewardModelSpec(), spoil, "none of 8 finished episodes has step rewards, one for each turn")
        for spoil in (no_steps, too_many_steps, not_numbers)
    ),
    (
        ProcessRewardModelSpec(heads={"help": 1}),
        lambda _: None,
        "none of 8 finished episodes has components 'help/0', 'help/1'",
    ),
]
"""Reward model, what makes its labels useless, and the words of the error."""


def test_a_head_without_anything_to_learn_is_refused(base_dir, tmp_path):
    for spec, spoil, words in NOTHING_TO_LEARN:
        trajectories = task(2)
        spoil(trajectories)
        with pytest.raises(ArtifactError, match=words):
            run(base_dir, tmp_path, spec, trajectories)
        assert list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_used_is_counted_and_left_out(chat, caplog):
    trajectories = task(3)
    trajectories[0].step_rewards = [1.0]  # for two turns
    trajectories[1].step_rewards = [1.0, math.nan]
    trajectories[2].histories[0].token_ids += [5] * 200
    trajectories[3].failure = FAILURE
    data = gather(ProcessRewardModelSpec(held_out=0.0), chat, judged(trajectories), 128, seed=0)
    assert data.counts["left_out"] == 1.0
    assert "longer than model.max_length=128 tokens: 1 of 11" in caplog.text
    used = {
        example.episode.trajectory.id: example.label_RH
        for example in data.train
        if isinstance(example, LabelledEpisode)
    }
    assert set(used) == {trajectory.id for trajectory in trajectories} - {
        trajectories[0].id,
        trajectories[2].id,
        trajectories[3].id,
    }
    assert math.isnan(used[trajectories[1].id][1][0])
    assert data.counts["unlabelled"] == 2.0  # these two have no sum over turns, because a label is missing


def test_held_out_scenarios_are_whole_and_never_all(chat):
    spec = RewardModelSpec(held_out=0.4)
    data = gather(spec, chat, judged(task(5)), 128, seed=1)
    trained = {pair.better.trajectory.group for pair in data.train if isinstance(pair, Pair)}
    apart = {pair.better.trajectory.group for pair in data.compared}
    assert (len(trained), len(apart)) == (3, 2)
    assert not trained & apart
    single = gather(spec, chat, judged(task(1)), 128, seed=1)
    assert (len(single.train), len(single.compared)) == (5, 0)


@pytest.fixture(scope="module")
def trained(base_dir, tmp_path_factory) -> Path:
    spec = RewardModelSpec(learning_rate=1e-3)
    return run(base_dir, tmp_path_factory.mktemp("trained"), spec, task(2))[0]


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "name", ["heads.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"]
)
def test_a_damaged_file_is_named(base_dir, copied, name):
    content = bytearray((copied / name).read_bytes())
    content[-3] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ArtifactDamaged, match=f"{name} is missing or was changed"):
        reward_model.load(copied, base_dir, MODEL)
    (copied / name).unlink()
    with pytest.raises(ArtifactDamaged, match=name):
        reward_card.content_digest(copied)


def test_what_is_no_reward_model_is_refused(base_dir, copied, start):
    with pytest.raises(ArtifactError, match=r"contains no reward model: reward_model.json is missing"):
        reward_model.load(start, base_dir, MODEL)
    card = json.loads((copied / "reward_model.json").read_text())
    for text, words in (
        ("{", "cannot be read"),
        (json.dumps({**card, "format": 9}), "has format 9, expected 1"),
        (json.dumps({**card, "heads": {"overall": {"weight": 1}}}), "is incomplete"),
    ):
        (copied / "reward_model.json").write_text(text)
        with pytest.raises(ArtifactError, match=words):
            reward_model.load(copied, base_dir, MODEL)


def test_another_base_or_vocabulary_is_refused(base_dir, copied):
    with pytest.raises(ArtifactError, match=r"trained on another base, name=tiny, than model.name=other"):
        reward_model.load(copied, base_dir, MODEL.model_copy(update={"name": "other"}))
    card = json.loads((copied / "reward_model.json").read_text())
    (copied / "reward_model.json").write_text(json.dumps({**card, "vocabulary": "0" * 64}))
    with pytest.raises(ArtifactError, match="another vocabulary"):
        reward_model.load(copied, base_dir, MODEL)


def test_its_own_lora_counts_not_that_of_the_policy(base_dir, trained):
    policy = MODEL.model_copy(update={"lora": LoraSpec(rank=16, alpha=3.0, dropout=0.5)})
    model, _ = reward_model.load(trained, base_dir, policy)
    assert (model.spec.lora.rank, model.spec.lora.dropout) == (4, 0.0)


def test_names_and_weights_of_heads_are_checked():
    for heads in ({}, {"a/b": 1.0}, {"a": 0.0}, {"a": math.inf}):
        with pytest.raises(ValueError):
            RewardModelSpec(heads=heads)


def test_a_message_without_span_is_no_turn(chat):
    trajectory = task(1)[0]
    trajectory.histories[0].messages.append(Message("assistant", "written"))
    assert episode(chat, trajectory, turns=True).readings == 2
