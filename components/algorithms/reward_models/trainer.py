"""Training of reward models on judged episodes: training data (`examples`), gradient steps (`gradient_step`), and
evaluation (`metrics`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from components.algorithms.loop import checkpoint, distributed, schedule
from components.algorithms.loop.adamw import AdamW
from components.algorithms.loop.guards import STRIKES, TrainingGuards
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.loop.resume import UnfinishedTraining
from components.algorithms.policy import sharded
from components.algorithms.policy_gradient.gradient_steps import examples_by_step
from components.algorithms.reward_models.card import CARD, Card, RewardHead, check_base, read_card, write_card
from components.algorithms.reward_models.examples import JudgedCollection, ScenarioSplit, gather
from components.algorithms.reward_models.gradient_step import gradient_step
from components.algorithms.reward_models.metrics import held_out, require_finite
from components.algorithms.reward_models.model import RewardModel, vocabulary_digest
from components.algorithms.spec import RewardTrainingSpec
from components.compute.spec import Strategy
from components.errors import ArtifactError, ResourceError
from components.models.spec import ModelSpec
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat


def train_reward_model(
    spec: RewardTrainingSpec,
    model: ModelSpec,
    base_dir: Path,
    judged: Sequence[JudgedCollection],
    *,
    start: Path | None,
    out: Path,
    scratch: Path,
    seed: int,
    on_step: Callable[[dict[str, float]], None],
    save_every: float = 30.0,
    strategy: Strategy = "ddp",
) -> dict[str, float]:
    """Train a reward model and write it to the folder `out` (`model`). It starts from the trained weights of the policy
    checkpoint `start`, or from the base model if that is None. If `start` is a reward model, it is trained further, and
    stays unchanged if there are no training examples.

    judged: collections of episodes, the newest first; all are trained on. on_step: called after each gradient step with
    its metrics, and at the start for the steps that an interrupted run with the same `scratch` took. In distributed
    training all processes get the same arguments, and the first one writes (`distributed`); strategy: tensors that are
    sharded over the processes.

    Returns the means of the metrics, and the share of held-out pairs of the newest collection whose better episode has
    the higher score (`heldout_accuracy`). A model that is trained further also reports `heldout_accuracy_before`, the
    accuracy before this training; with earlier collections, `heldout_accuracy_earlier` is the accuracy on their pairs.
    Raises ArtifactError if a head of a new model has no training example or `start` does not fit, and TrainingDiverged
    if a guard stops the training; then nothing is written.
    """
    card = read_card(start) if start is not None and (start / CARD).is_file() else None
    split = None
    if start is not None and card is not None:
        _require_same_kind(start, card, spec, model)
        split = ScenarioSplit.read(start)
    data = gather(spec, ChatFormat(load_tokenizer(base_dir)), judged, model.max_length, seed, split)
    policy = RewardModel(base_dir, model, list(spec.heads), seed)
    if strategy != "ddp":
        if policy.adapter is None:
            raise ResourceError(
                f"strategy {strategy}: full fine-tuning of a reward model cannot be sharded; expected strategy ddp, or "
                "model.lora with a rank"
            )
        sharded.shard(policy, strategy)
    policy.checkpoint_layers(spec.gradient_checkpointing)
    names = list(policy.parameters)
    optimizer = AdamW(
        list(policy.parameters.values()),
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
    )
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
    unfinished = UnfinishedTraining(
        scratch / "unfinished", policy, optimizer, algorithm=spec.name, start=step, every=save_every
    )
    unfinished.restore()
    for step_metrics in unfinished.steps:
        on_step(step_metrics)
    steps_done = len(unfinished.steps)
    guards = TrainingGuards(scratch)
    with unfinished.save_on_interrupt():
        for number, batch in enumerate(examples_by_step(data.train, spec.epochs, spec.batch_size, seed, step), start=1):
            if number <= steps_done:
                continue
            share = schedule.warmup_share(spec, step + number)
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * share
            step_metrics = gradient_step(spec, policy, optimizer, batch, step + number, guards)
            metrics = {"step": float(step + number), **step_metrics}
            unfinished.record_step(metrics)
            on_step(metrics)
    with policy.without_any_dropout():
        score_RH = policy.scores(data.episodes, spec.pack_tokens, distributed.share)
        measured |= held_out(spec, policy, data.held_out, {"": data.compared, "_earlier": data.compared_earlier})
    if distributed.first():
        (out / "log.jsonl").write_text("".join(json.dumps(step_metrics) + "\n" for step_metrics in unfinished.steps))
        if strikes := guards.strikes():
            (out / STRIKES).write_text("".join(json.dumps(strike) + "\n" for strike in strikes))
    trajectories = [trajectory for collection in judged for trajectory in collection.trajectories]
    require_finite(policy, score_RH, guards, step + len(unfinished.steps), trajectories)
    heads = {
        name: RewardHead(weight, score_RH[:, index].mean().item(), score_RH[:, index].std(correction=0).item())
        if card is None or data.episodes
        else replace(card.heads[name], weight=weight)
        for index, (name, weight) in enumerate(spec.heads.items())
    }
    step += len(unfinished.steps)
    if distributed.first():
        policy.save(policy.folder(out))
        data.split.write(out)
        write_card(out, spec.name, model, vocabulary_digest(base_dir), heads)  # type: ignore[arg-type]
        moments, scale = checkpoint.moments(optimizer, names), policy.loss_scale.state()
        checkpoint.save_state(out, algorithm=spec.name, step=step, moments=moments, loss_scale=scale)
    distributed.wait()
    return {**mean_metrics(unfinished.steps), **data.counts, **measured}


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
