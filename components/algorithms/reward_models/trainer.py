"""Training of reward models on judged episodes: training data (`examples`), gradient steps (Bradley-Terry on pairs, or
squared error to the labels of turns), and evaluation: loss and pair accuracy on held-out scenarios, and a check for
finite numbers.

The value of an episode is the sum of its readings: one reading for a model of whole episodes, one per turn for a
process reward model. Of two episodes of a scenario, the better one should have the higher value.

A loss is a function of the readings of its batch. Its derivative with respect to each reading is a scalar; the gradient
of the loss is then the gradient of the weighted sum of readings. It is computed pack by pack, in the memory of one
pack.

Legend: E episodes of a batch, R readings, S those of a pack, H heads, P pairs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from components.algorithms.loop import checkpoint, distributed, schedule
from components.algorithms.loop.adamw import adamw
from components.algorithms.loop.epochs import (
    GuardedStep,
    StepMeasures,
    examples_by_step,
    finish_gradient,
    take_gradient_steps,
)
from components.algorithms.loop.guards import TrainingGuards
from components.algorithms.loop.metrics import mean_metrics, token_counts
from components.algorithms.loop.resume import UnfinishedTraining
from components.algorithms.policy_gradient.losses import segment_sums
from components.algorithms.reward_models import losses
from components.algorithms.reward_models.card import CARD, Card, RewardHead, check_base, read_card, write_card
from components.algorithms.reward_models.data import RewardEpisode, packs
from components.algorithms.reward_models.examples import Example, LabelledEpisode, Pair, ScenarioSplit, gather
from components.algorithms.reward_models.model import RewardModel, vocabulary_digest
from components.algorithms.reward_models.pair_accuracy import by_epoch, calibration
from components.algorithms.trainer import RewardTrainingRequest, StepMetrics, TrainingContext
from components.errors import ArtifactError, ResourceError
from components.models.spec import ModelSpec
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.reward_models.spec import RewardTrainingSpec


def train_reward_model(spec: RewardTrainingSpec, request: RewardTrainingRequest) -> dict[str, float]:
    """Train a reward model and write it to the folder `request.out` (`model`).

    Returns the means of the metrics, and the share of held-out pairs of the newest collection whose better episode has
    the higher score (`heldout_accuracy`), also by epoch, with the calibration of the scores (`pair_accuracy`). A model
    that is trained further also reports `heldout_accuracy_before`, the accuracy before this training; with earlier
    collections, `heldout_accuracy_earlier` is the accuracy on their pairs; `heldout_accuracy_adversarial` that on pairs
    of adversarial examples.
    Raises ArtifactError if a head of a new model has no training example or `start` does not fit, and TrainingDiverged
    if a guard stops the training; then nothing is written.
    """
    model, base_dir, judged, seed = request.model, request.base_dir, request.judged, request.seed
    start, out, scratch, strategy = request.start, request.out, request.scratch, request.strategy
    card = read_card(start) if start is not None and (start / CARD).is_file() else None
    split = None
    if start is not None and card is not None:
        _require_same_kind(start, card, spec, model)
        split = ScenarioSplit.read(start)
    data = gather(spec, ChatFormat(load_tokenizer(base_dir)), judged, model.max_length, seed, split)
    if strategy != "ddp" and model.lora is None:
        raise ResourceError(
            f"strategy {strategy}: full fine-tuning of a reward model cannot be sharded; expected strategy ddp, or "
            "model.lora with a rank"
        )
    policy = RewardModel(base_dir, model, list(spec.heads), seed, strategy, spec.hidden_units)
    policy.checkpoint_layers(spec.gradient_checkpointing)
    names = list(policy.parameters)
    optimizer = adamw(spec, [list(policy.parameters.values())])
    torch.manual_seed(seed)
    step = 0
    measured: dict[str, float] = {}
    if start is not None and card is not None:
        policy.load(policy.folder(start))
        step = checkpoint.load_state(
            start, algorithm=spec.name, optimizer=optimizer, names=names, loss_scale=policy.loss_scale
        )
        with policy.without_any_dropout():
            measured |= held_out(spec, policy, [], {"_before": data.compared})
    elif start is not None:
        policy.load_policy_weights(policy.folder(start))
    unfinished = UnfinishedTraining(scratch / "unfinished", policy, optimizer, every=request.save_every)
    trajectories = [trajectory for collection in judged for trajectory in collection.trajectories]
    context = TrainingContext.of(
        request,
        policy=policy,
        optimizer=optimizer,
        trajectories=trajectories,
        on_step=unfinished.resume(request.on_step),
        step=step,
        earlier_steps=tuple(unfinished.steps),
    )
    guarded_step = GuardedStep(
        spec, context, partial(backward, spec, policy), lambda example: example.episodes[0].trajectory
    )
    batches = examples_by_step(data.train, spec.epochs, spec.batch_size, seed, step)
    first = step

    def gradient_step(batch: Sequence[Example], number: int) -> StepMetrics:
        """Take a step; at the end of an epoch before the last, measure the held-out accuracy as well."""
        metrics = guarded_step(batch, number)
        taken = number - first
        if taken % (len(batches) // spec.epochs) or taken == len(batches):
            return metrics
        with policy.without_any_dropout():
            pairs = held_out(spec, policy, [], {"": data.compared})
        return metrics | {name: value for name, value in pairs.items() if name == "heldout_accuracy"}

    with unfinished.save_on_interrupt():
        logs = take_gradient_steps(
            context,
            batches,
            gradient_step,
            [spec.learning_rate],
            lambda number, _: schedule.warmup_share(spec, number),
        )
    compared = {"": data.compared, "_earlier": data.compared_earlier, "_adversarial": data.compared_adversarial}
    with policy.without_any_dropout():
        score_RH = policy.scores(data.episodes, spec.pack_size, distributed.share)
        measured |= held_out(spec, policy, data.held_out, compared)
    accuracy = measured.get("heldout_accuracy")
    measured |= by_epoch(logs, spec.epochs, len(data.train), spec.batch_size, accuracy)
    guards = TrainingGuards(scratch)
    if distributed.first():
        unfinished.write_log(out, guards)
    require_finite(policy, score_RH, guards, step + len(logs), trajectories)
    heads = {
        name: RewardHead(weight, score_RH[:, index].mean().item(), score_RH[:, index].std(correction=0).item())
        if card is None or data.episodes
        else replace(card.heads[name], weight=weight)
        for index, (name, weight) in enumerate(spec.heads.items())
    }
    step += len(logs)
    if distributed.first():
        policy.save(policy.folder(out))
        policy.check_saved(policy.folder(out))
        data.split.write(out)
        write_card(out, spec.name, model, vocabulary_digest(base_dir), heads)  # type: ignore[arg-type]
        state: dict[str, Any] = {"optimizer": optimizer, "names": names, "loss_scale": policy.loss_scale.state()}
        checkpoint.save_state(out, algorithm=spec.name, step=step, **state)
    distributed.wait()
    return {**mean_metrics(logs), **data.counts, **measured}


def _require_same_kind(start: Path, card: Card, spec: RewardTrainingSpec, model: ModelSpec) -> None:
    """Raise ArtifactError unless the reward model in `start` can be trained further with `spec`."""
    check_base(start, card, model)
    if card.kind != spec.name:
        reads = {"reward_model": "whole episodes", "process_reward_model": "turns"}
        raise ArtifactError(
            f"the reward model in {start} is a {card.kind}, which scores {reads[card.kind]}, but algorithm.name is "
            f"{spec.name}, which scores {reads[spec.name]}. Set algorithm.name={card.kind}, or start from another "
            "checkpoint"
        )
    if sorted(card.heads) != sorted(spec.heads):
        raise ArtifactError(
            f"the reward model in {start} has the heads {', '.join(card.heads)}, but algorithm.heads has "
            f"{', '.join(spec.heads)}. Set the same heads, or start from another checkpoint"
        )


def held_out(
    spec: RewardTrainingSpec, policy: RewardModel, examples: Sequence[Example], compared: Mapping[str, Sequence[Pair]]
) -> dict[str, float]:
    """Return the loss on held-out examples and, for each key of `compared`, the accuracy and mean margin of its pairs:
    how often and by how much the better episode has the higher value. The key is the suffix of the metric names. With
    several heads, the accuracy is also reported per head."""
    units = [*examples, *(pair for pairs in compared.values() for pair in pairs)]
    episodes = list({id(episode): episode for example in units for episode in example.episodes}.values())
    if not episodes:
        return {}
    index_of = {id(episode): index for index, episode in enumerate(episodes)}
    score_RH = policy.scores(episodes, spec.pack_size, distributed.share)
    measured = {}
    if examples:
        example_episodes = list({id(episode): episode for example in examples for episode in example.episodes}.values())
        first_RH = score_RH[: sum(episode.readings for episode in example_episodes)]  # they come first in `episodes`
        measured["heldout_loss"] = batch_loss(spec, examples, example_episodes, first_RH)[0].item()
    value_EH = episode_values(episodes, score_RH)
    names = list(spec.heads)
    for suffix, pairs in compared.items():
        margins: dict[str, list[float]] = defaultdict(list)
        for pair in pairs:
            better, worse = (value_EH[index_of[id(episode)], pair.head].item() for episode in pair.episodes)
            margins[names[pair.head]].append(better - worse)
        if all_margins := [margin for column in margins.values() for margin in column]:
            measured[f"heldout_accuracy{suffix}"] = sum(margin > 0 for margin in all_margins) / len(all_margins)
            measured[f"heldout_margin{suffix}"] = math.fsum(all_margins) / len(all_margins)
            if not suffix and not spec.learns_turn_labels:
                measured |= calibration([margin for margin in all_margins if math.isfinite(margin)])
        if len(names) > 1:
            for head, column in sorted(margins.items()):
                measured[f"heldout_accuracy{suffix}/{head}"] = sum(margin > 0 for margin in column) / len(column)
    return measured


def require_finite(
    policy: RewardModel, score_RH: torch.Tensor, guards: TrainingGuards, step: int, trajectories: Sequence[Trajectory]
) -> None:
    """Raise TrainingDiverged if a parameter or a score is not finite."""
    broken_names = [name for name, parameter in policy.parameters.items() if not parameter.isfinite().all()]
    if broken_names or not score_RH.isfinite().all():
        measured = {"not_finite": float(len(broken_names))}
        guards.stop(
            {"step": step, **measured, "trajectories": [trajectory.id for trajectory in trajectories]},
            measured,
            trajectories,
            "not_finite counts trained tensors with infinite or NaN values; at 0, only scores are affected. Lower "
            "algorithm.learning_rate",
        )


def backward(spec: RewardTrainingSpec, policy: RewardModel, batch: Sequence[Example]) -> StepMeasures:
    """Add the gradient of the mean loss to the parameters and scale it down to max_grad_norm. Return the measured
    metrics and token counts."""
    episodes = list({id(episode): episode for example in batch for episode in example.episodes}.values())
    packed_readings = packs(episodes, spec.pack_size, padded=policy.padded)
    states = checkpoint.random_states()
    score_RH = policy.scores(episodes, spec.pack_size, distributed.share_with_dropout).requires_grad_()
    loss, metrics = batch_loss(spec, batch, episodes, score_RH)
    weight_RH = torch.autograd.grad(loss, score_RH)[0]
    checkpoint.set_random_states(states)  # repeat the dropout of the scores that this is the gradient of
    for (number_S, packed), real in distributed.share_with_dropout(packed_readings):
        weight_SH = weight_RH[number_S.to(policy.device)]
        policy.loss_scale.backward((policy.read(packed) * (weight_SH if real else 0 * weight_SH)).sum())
    gradient = finish_gradient(policy, spec.max_grad_norm)
    counts = token_counts([packed for _, packed in packed_readings])
    del counts["sampled_tokens"]  # a reward model trains on no sampled tokens
    return {"loss": loss.item(), **gradient, **metrics}, counts


def batch_loss(
    spec: RewardTrainingSpec, batch: Sequence[Example], episodes: Sequence[RewardEpisode], score_RH: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the mean loss of a batch as a function of the readings of its episodes, and its metrics."""
    index_of = {id(episode): index for index, episode in enumerate(episodes)}
    if pair_examples := [example for example in batch if isinstance(example, Pair)]:
        value_EH = episode_values(episodes, score_RH)
        chosen_P, rejected_P = (
            value_EH[
                [index_of[id(pair.episodes[side])] for pair in pair_examples], [pair.head for pair in pair_examples]
            ]
            for side in (0, 1)
        )
        margin_P = torch.tensor([pair.margin for pair in pair_examples], device=score_RH.device)
        loss = losses.bradley_terry(chosen_P, rejected_P, margin_P, spec.centering).mean()
        difference_P = (chosen_P - rejected_P).detach()
        return loss, {"margin": difference_P.mean().item(), "accuracy": (difference_P > 0).float().mean().item()}
    by_id = {id(example.episode): example.label_RH for example in batch if isinstance(example, LabelledEpisode)}
    label_RH = torch.tensor([row for episode in episodes for row in by_id[id(episode)]], device=score_RH.device)
    return losses.mean_squared_error(score_RH, label_RH), {}


def episode_values(episodes: Sequence[RewardEpisode], score_RH: torch.Tensor) -> torch.Tensor:
    """Return the (E, H) values of the episodes: the sums of their readings."""
    return segment_sums(score_RH, torch.tensor([episode.readings for episode in episodes], device=score_RH.device))
