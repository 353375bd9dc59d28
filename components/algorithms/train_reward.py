"""Training of reward models on judged episodes: Bradley-Terry on pairs, or squared error to the labels of turns.

An episode is worth the sum of its readings: one reading for a model of whole episodes, one for each turn for a process
model. Of two episodes of a scenario the better one should be worth more. Each head has pairs of its own, for the order
of episodes may be another by each component of the score.

A loss is a function of the readings of its batch. Its derivative by each is a number; the gradient is then that of the
weighted sum of readings, which is computed pack by pack, in the memory of one.

Legend: E episodes of a batch, R readings, H heads, P pairs.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from components.algorithms import checkpoint, reward_losses, schedule
from components.algorithms.guards import STRIKES, Guards
from components.algorithms.metrics import over_steps
from components.algorithms.reward_card import CARD, Head, check_base, read_card, write_card
from components.algorithms.reward_data import Episode, owners, packs
from components.algorithms.reward_examples import Example, Judged, Labelled, Pair, Sides, gather
from components.algorithms.reward_model import RewardModel, vocabulary_digest
from components.algorithms.spec import ProcessRewardModelSpec, RewardTrainingSpec
from components.algorithms.steps import examples_by_step, finish
from components.algorithms.unfinished import Unfinished
from components.errors import ArtifactError
from components.models.spec import ModelSpec
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Trajectory


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
) -> dict[str, float]:
    """Trains a reward model and writes it to the folder `out` (`reward_model`). It begins with the adapter of the
    checkpoint `start`, a policy's; None: with the base model. A reward model as `start` is trained further, and stays
    as it is where there is nothing to learn from.

    judged: collections of episodes, the newest first; all are trained on. on_step is called after each gradient step
    with its metrics, at once for those that an earlier try with the same `scratch` had taken. Returns the means of the
    metrics, and how often the better episode of a held-out pair of the newest collection has the higher score
    (`heldout_accuracy`; of a model that is trained further also `heldout_accuracy_before` this training, and where
    there are earlier collections `heldout_accuracy_earlier` on theirs). Raises ArtifactError where a head of a new
    model has nothing to learn from or `start` does not fit, TrainingDiverged where a guard stops, and then writes
    nothing.
    """
    turns = isinstance(spec, ProcessRewardModelSpec)
    card = read_card(start) if start is not None and (start / CARD).is_file() else None
    known = Sides.read(start) if start is not None and card is not None else None
    data = gather(spec, ChatFormat(load_tokenizer(base_dir)), judged, model.max_length, seed, known)
    policy = RewardModel(base_dir, model, list(spec.heads), seed)
    policy.checkpoint_layers(spec.gradient_checkpointing)
    names = list(policy.parameters)
    optimizer = torch.optim.AdamW(
        list(policy.parameters.values()),
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
    )
    torch.manual_seed(seed)
    step = 0
    measured: dict[str, float] = {}
    if start is not None and card is not None:
        check_base(start, card, model)
        if sorted(card.heads) != sorted(spec.heads):
            raise ArtifactError(
                f"the reward model in {start} has the heads {', '.join(card.heads)}, and heads are "
                f"{', '.join(spec.heads)}: expected the same, or another checkpoint to start from"
            )
        policy.load(start / checkpoint.ADAPTER)
        step = checkpoint.load_state(start, algorithm=spec.name, optimizer=optimizer, names=names)
        with policy.still():
            measured |= _held_out(spec, policy, [], {"_before": data.compared})
    elif start is not None:
        policy.begin(start / checkpoint.ADAPTER)
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
            share = schedule.risen(spec, step + number)
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * share
            found = _gradient_step(spec, policy, optimizer, batch, step + number, guards)
            metrics = {"step": float(step + number), **found}
            unfinished.took(metrics)
            on_step(metrics)
    with policy.still():
        score_RH = policy.scores(data.episodes, spec.pack_tokens)
        measured |= _held_out(spec, policy, data.held_out, {"": data.compared, "_earlier": data.compared_earlier})
    (out / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in unfinished.steps))
    if strikes := guards.strikes():
        (out / STRIKES).write_text("".join(json.dumps(one) + "\n" for one in strikes))
    _demand_finite(
        policy, score_RH, guards, step + len(unfinished.steps), [one for part in judged for one in part.trajectories]
    )
    policy.save(out / checkpoint.ADAPTER)
    heads = {
        name: Head(weight, score_RH[:, index].mean().item(), score_RH[:, index].std(correction=0).item())
        if card is None or data.episodes
        else replace(card.heads[name], weight=weight)
        for index, (name, weight) in enumerate(spec.heads.items())
    }
    data.sides.write(out)
    kind = "process_reward_model" if turns else "reward_model"
    write_card(out, kind, model, vocabulary_digest(base_dir), heads)  # type: ignore[arg-type]
    checkpoint.save_state(out, algorithm=spec.name, step=step + len(unfinished.steps), optimizer=optimizer, names=names)
    return {**over_steps(unfinished.steps), **data.counts, **measured}


# --- one gradient step ----------------------------------------------------------------------------------------------


def _gradient_step(
    spec: RewardTrainingSpec,
    policy: RewardModel,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Example],
    step: int,
    guards: Guards,
) -> dict[str, float]:
    started = time.monotonic()
    measured, counts = backward(spec, policy, batch)
    skipped = False
    if not all(math.isfinite(measured[name]) for name in ("loss", "grad_norm")):
        skipped = _struck(spec, policy, batch, measured, step, guards)
    return finish(optimizer, measured, counts, skipped=skipped, started=started)


def backward(
    spec: RewardTrainingSpec, policy: RewardModel, batch: Sequence[Example]
) -> tuple[dict[str, float], dict[str, float]]:
    """Adds the gradient of the mean loss to the parameters and scales the whole down to max_grad_norm. Returns what it
    measured, and counts of tokens."""
    episodes = list({id(one): one for example in batch for one in example.episodes}.values())
    packed = packs(episodes, spec.pack_tokens)
    before = checkpoint.random_states()
    score_RH = policy.scores(episodes, spec.pack_tokens).requires_grad_()
    loss, seen = loss_of(spec, batch, episodes, score_RH)
    weight_RH = torch.autograd.grad(loss, score_RH)[0]
    checkpoint.set_random_states(before)  # so that the same drops out as in the scores of which this is the gradient
    for number_S, one in packed:
        (policy.read(one) * weight_RH[number_S.to(policy.device)]).sum().backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), spec.max_grad_norm).item()
    counts = {
        "tokens": float(sum(sum(one.lengths) for _, one in packed)),
        "computed_tokens": float(sum(len(one.token_ids_N) for _, one in packed)),
    }
    return {"loss": loss.item(), "grad_norm": grad_norm, **seen}, counts


def loss_of(
    spec: RewardTrainingSpec, batch: Sequence[Example], episodes: Sequence[Episode], score_RH: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean loss of a batch as a function of the readings of its episodes, and what is worth showing."""
    place = {id(one): index for index, one in enumerate(episodes)}
    if found := [example for example in batch if isinstance(example, Pair)]:
        worth_EH = _worth(episodes, score_RH)
        chosen_P, rejected_P = (
            worth_EH[[place[id(one.episodes[side])] for one in found], [one.head for one in found]] for side in (0, 1)
        )
        margin_P = torch.tensor([one.margin for one in found], device=score_RH.device)
        loss = reward_losses.bradley_terry(chosen_P, rejected_P, margin_P, spec.centering).mean()
        apart_P = (chosen_P - rejected_P).detach()
        return loss, {"margin": apart_P.mean().item(), "accuracy": (apart_P > 0).float().mean().item()}
    by_id = {id(example.episode): example.label_RH for example in batch if isinstance(example, Labelled)}
    label_RH = torch.tensor([row for one in episodes for row in by_id[id(one)]], device=score_RH.device)
    return reward_losses.mean_squared_error(score_RH, label_RH), {}


def _worth(episodes: Sequence[Episode], score_RH: torch.Tensor) -> torch.Tensor:
    """(E, H) what each episode is worth: the sum of its readings."""
    worth_EH = torch.zeros(len(episodes), score_RH.shape[1], device=score_RH.device)
    return worth_EH.index_add(0, owners(episodes).to(score_RH.device), score_RH)


def _held_out(
    spec: RewardTrainingSpec, policy: RewardModel, examples: Sequence[Example], compared: Mapping[str, Sequence[Pair]]
) -> dict[str, float]:
    """The loss on what was not trained on; and by the ending of the measures' names, of pairs: how often, and how far,
    the better episode is ahead; by head where there are several."""
    seen = [*examples, *(pair for found in compared.values() for pair in found)]
    episodes = list({id(one): one for example in seen for one in example.episodes}.values())
    if not episodes:
        return {}
    place = {id(one): index for index, one in enumerate(episodes)}
    score_RH = policy.scores(episodes, spec.pack_tokens)
    measured = {}
    if examples:
        own = list({id(one): one for example in examples for one in example.episodes}.values())
        first_RH = score_RH[: sum(one.readings for one in own)]  # they come first in `episodes`
        measured["heldout_loss"] = loss_of(spec, examples, own, first_RH)[0].item()
    worth_EH = _worth(episodes, score_RH)
    names = list(spec.heads)
    for end, found in compared.items():
        apart: dict[str, list[float]] = defaultdict(list)
        for pair in found:
            better, worse = (worth_EH[place[id(one)], pair.head].item() for one in pair.episodes)
            apart[names[pair.head]].append(better - worse)
        if flat := [one for column in apart.values() for one in column]:
            measured[f"heldout_accuracy{end}"] = sum(one > 0 for one in flat) / len(flat)
            measured[f"heldout_margin{end}"] = math.fsum(flat) / len(flat)
        if len(names) > 1:
            for head, column in sorted(apart.items()):
                measured[f"heldout_accuracy{end}/{head}"] = sum(one > 0 for one in column) / len(column)
    return measured


def _struck(
    spec: RewardTrainingSpec,
    policy: RewardModel,
    batch: Sequence[Example],
    measured: Mapping[str, float],
    step: int,
    guards: Guards,
) -> bool:
    """Whether the step is left out; each episode is measured with the examples that it comes first in."""
    of: dict[str, list[Example]] = defaultdict(list)
    for example in batch:
        of[example.episodes[0].trajectory.id].append(example)

    def measure(trajectory: Trajectory) -> dict[str, float]:
        for parameter in policy.parameters.values():
            parameter.grad = None
        found, _ = backward(spec, policy, of[trajectory.id])
        return {name: found[name] for name in ("loss", "grad_norm")}

    return guards.strike(
        "non_finite",
        spec.non_finite,
        step,
        {name: measured[name] for name in ("loss", "grad_norm")},
        [examples[0].episodes[0].trajectory for examples in of.values()],
        measure,
        by="grad_norm",
        advice="Lower algorithm.learning_rate",
    )


def _demand_finite(
    policy: RewardModel, score_RH: torch.Tensor, guards: Guards, step: int, trajectories: Sequence[Trajectory]
) -> None:
    broken = [name for name, parameter in policy.parameters.items() if not parameter.isfinite().all()]
    if broken or not score_RH.isfinite().all():
        measured = {"not_finite": float(len(broken))}
        guards.stop(
            {"step": step, **measured, "trajectories": [one.id for one in trajectories]},
            measured,
            trajectories,
            "not_finite counts tensors of the reward model; its scores are infinite or no number. Lower "
            "algorithm.learning_rate",
        )
