"""Training of reward models on judged episodes: what is learned from (`reward_examples`), one step after another
(`reward_step`), and what came of it (`reward_measures`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from components.algorithms.loop import checkpoint, distributed, schedule
from components.algorithms.loop.adamw import AdamW
from components.algorithms.loop.guards import STRIKES, Guards
from components.algorithms.loop.metrics import over_steps
from components.algorithms.loop.resume import Unfinished
from components.algorithms.policy import sharded
from components.algorithms.policy_gradient.gradient_steps import examples_by_step
from components.algorithms.reward_models.card import CARD, Card, Head, check_base, read_card, write_card
from components.algorithms.reward_models.examples import Judged, Sides, gather
from components.algorithms.reward_models.gradient_step import gradient_step
from components.algorithms.reward_models.metrics import demand_finite, held_out
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
    judged: Sequence[Judged],
    *,
    start: Path | None,
    out: Path,
    scratch: Path,
    seed: int,
    on_step: Callable[[dict[str, float]], None],
    save_every: float = 30.0,
    strategy: Strategy = "ddp",
) -> dict[str, float]:
    """Trains a reward model and writes it to the folder `out` (`reward_model`). It begins with what the checkpoint
    `start`, a policy's, has learned; None: with the base model. A reward model as `start` is trained further, and stays
    as it is where there is nothing to learn from.

    judged: collections of episodes, the newest first; all are trained on. on_step is called after each gradient step
    with its metrics, at once for those that an earlier try with the same `scratch` had taken. Several processes are
    given the same arguments, and the first one writes (`distributed`); strategy: what lies in parts on them.

    Returns the means of the metrics, and how often the better episode of a held-out pair of the newest collection has
    the higher score (`heldout_accuracy`; of a model that is trained further also `heldout_accuracy_before` this
    training, and where there are earlier collections `heldout_accuracy_earlier` on theirs). Raises ArtifactError where
    a head of a new model has nothing to learn from or `start` does not fit, TrainingDiverged where a guard stops, and
    then writes nothing.
    """
    card = read_card(start) if start is not None and (start / CARD).is_file() else None
    known = None
    if start is not None and card is not None:
        _demand_alike(start, card, spec, model)
        known = Sides.read(start)
    data = gather(spec, ChatFormat(load_tokenizer(base_dir)), judged, model.max_length, seed, known)
    policy = RewardModel(base_dir, model, list(spec.heads), seed)
    if strategy != "ddp":
        if policy.adapter is None:
            raise ResourceError(
                f"strategy {strategy}: a reward model of which all weights learn is not distributed in parts; expected "
                "strategy ddp, or model.lora with a rank"
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
        with policy.still():
            measured |= held_out(spec, policy, [], {"_before": data.compared})
    elif start is not None:
        policy.begin(policy.folder(start))
    unfinished = Unfinished(
        scratch / "unfinished", policy, optimizer, algorithm=spec.name, start=step, every=save_every
    )
    unfinished.restore()
    for taken in unfinished.steps:
        on_step(taken)
    done = len(unfinished.steps)
    guards = Guards(scratch)
    with unfinished.saved_when_stopped():
        for number, batch in enumerate(examples_by_step(data.train, spec.epochs, spec.batch_size, seed, step), start=1):
            if number <= done:
                continue
            share = schedule.warmup_share(spec, step + number)
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * share
            found = gradient_step(spec, policy, optimizer, batch, step + number, guards)
            metrics = {"step": float(step + number), **found}
            unfinished.took(metrics)
            on_step(metrics)
    with policy.still():
        score_RH = policy.scores(data.episodes, spec.pack_tokens, distributed.share)
        measured |= held_out(spec, policy, data.held_out, {"": data.compared, "_earlier": data.compared_earlier})
    if distributed.first():
        (out / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in unfinished.steps))
        if strikes := guards.strikes():
            (out / STRIKES).write_text("".join(json.dumps(one) + "\n" for one in strikes))
    everything = [one for part in judged for one in part.trajectories]
    demand_finite(policy, score_RH, guards, step + len(unfinished.steps), everything)
    heads = {
        name: Head(weight, score_RH[:, index].mean().item(), score_RH[:, index].std(correction=0).item())
        if card is None or data.episodes
        else replace(card.heads[name], weight=weight)
        for index, (name, weight) in enumerate(spec.heads.items())
    }
    step += len(unfinished.steps)
    if distributed.first():
        policy.save(policy.folder(out))
        data.sides.write(out)
        write_card(out, spec.name, model, vocabulary_digest(base_dir), heads)  # type: ignore[arg-type]
        moments, scale = checkpoint.moments(optimizer, names), policy.loss_scale.state()
        checkpoint.save_state(out, algorithm=spec.name, step=step, moments=moments, loss_scale=scale)
    distributed.wait()
    return {**over_steps(unfinished.steps), **data.counts, **measured}


def _demand_alike(start: Path, card: Card, spec: RewardTrainingSpec, model: ModelSpec) -> None:
    """Raises ArtifactError unless the reward model in `start` can be trained further as `spec` says."""
    check_base(start, card, model)
    if card.kind != spec.name:
        reads = {"reward_model": "whole episodes", "process_reward_model": "turns"}
        raise ArtifactError(
            f"the reward model in {start} is a {card.kind}, which scores {reads[card.kind]}, and algorithm.name is "
            f"{spec.name}, which scores {reads[spec.name]}: expected the same, or another checkpoint to start from"
        )
    if sorted(card.heads) != sorted(spec.heads):
        raise ArtifactError(
            f"the reward model in {start} has the heads {', '.join(card.heads)}, and heads are "
            f"{', '.join(spec.heads)}: expected the same, or another checkpoint to start from"
        )
