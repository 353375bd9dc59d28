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
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from components.algorithms import checkpoint, distributed, reward_losses, schedule
from components.algorithms.guards import STRIKES, Guards
from components.algorithms.losses import segment_sums
from components.algorithms.metrics import of_packs, over_steps
from components.algorithms.pairs import pairs
from components.algorithms.reward_card import CARD, Head, check_base, read_card, write_card
from components.algorithms.reward_data import OVERALL, Episode, episode, packs, turn_values, value
from components.algorithms.reward_model import RewardModel, vocabulary_digest
from components.algorithms.spec import ProcessRewardModelSpec, RewardTrainingSpec
from components.algorithms.steps import examples_by_step, finish
from components.algorithms.unfinished import Unfinished
from components.errors import ArtifactError
from components.models.spec import ModelSpec
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Score, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """Two episodes of a scenario, for one head."""

    better: Episode
    worse: Episode
    head: int
    margin: float
    """By how much the better one is better."""

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return self.better, self.worse


@dataclass(frozen=True)
class Labelled:
    """An episode with the labels of its turns."""

    episode: Episode
    label_RH: tuple[tuple[float, ...], ...]
    """NaN where there is none."""

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return (self.episode,)


Example = Pair | Labelled


@dataclass(frozen=True)
class Data:
    """What there is to learn from."""

    train: list[Example]
    held_out: list[Example]
    """The same of scenarios that are not trained on."""
    compared: list[Pair]
    """Pairs of these scenarios."""
    episodes: list[Episode]
    """Those that are trained on."""
    counts: dict[str, float]


def train_reward_model(
    spec: RewardTrainingSpec,
    model: ModelSpec,
    base_dir: Path,
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    *,
    start: Path | None,
    out: Path,
    scratch: Path,
    seed: int,
    on_step: Callable[[dict[str, float]], None],
    save_every: float = 30.0,
) -> dict[str, float]:
    """Trains a reward model and writes it to the folder `out` (`reward_model`). It begins with the adapter of the
    checkpoint `start`, a policy's; None: with the base model. A reward model as `start` is trained further.

    scores: of the trajectories, in any order; those of components give the heads their labels. on_step is called after
    each gradient step with its metrics, at once for those that an earlier try with the same `scratch` had taken.
    Several processes are given the same arguments, and the first one writes (`distributed`). Returns the means of the
    metrics, and how often the better episode of a held-out pair has the higher score (`heldout_accuracy`). Raises
    ArtifactError where a head has nothing to learn from or `start` does not fit, TrainingDiverged where a guard stops,
    and then writes nothing.
    """
    turns = isinstance(spec, ProcessRewardModelSpec)
    data = gather(spec, ChatFormat(load_tokenizer(base_dir)), trajectories, scores, model.max_length, seed)
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
    if start is not None and (start / CARD).is_file():
        card = read_card(start)
        check_base(start, card, model)
        if sorted(card.heads) != sorted(spec.heads):
            raise ArtifactError(
                f"the reward model in {start} has the heads {', '.join(card.heads)}, and heads are "
                f"{', '.join(spec.heads)}: expected the same, or another checkpoint to start from"
            )
        policy.load(start / checkpoint.ADAPTER)
        step = checkpoint.load_state(start, algorithm=spec.name, optimizer=optimizer, names=names)
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
        score_RH = policy.scores(data.episodes, spec.pack_tokens, distributed.share)
        measured = _held_out(spec, policy, data)
    if distributed.first():
        (out / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in unfinished.steps))
        if strikes := guards.strikes():
            (out / STRIKES).write_text("".join(json.dumps(one) + "\n" for one in strikes))
    _demand_finite(policy, score_RH, guards, step + len(unfinished.steps), trajectories)
    heads = {
        name: Head(weight, score_RH[:, index].mean().item(), score_RH[:, index].std(correction=0).item())
        for index, (name, weight) in enumerate(spec.heads.items())
    }
    kind = "process_reward_model" if turns else "reward_model"
    step += len(unfinished.steps)
    if distributed.first():
        policy.save(out / checkpoint.ADAPTER)
        write_card(out, kind, model, vocabulary_digest(base_dir), heads)  # type: ignore[arg-type]
        checkpoint.save_state(out, algorithm=spec.name, step=step, optimizer=optimizer, names=names)
    distributed.wait()
    return {**over_steps(unfinished.steps), **data.counts, **measured}


# --- what is learned from -------------------------------------------------------------------------------------------


def gather(
    spec: RewardTrainingSpec,
    chat: ChatFormat,
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    max_length: int,
    seed: int,
) -> Data:
    """The examples of a training, apart from those that are held out. Raises ArtifactError where a head has none."""
    turns = isinstance(spec, ProcessRewardModelSpec)
    by_id = {score.trajectory_id: score for score in scores}
    finished = [one for one in trajectories if one.failure is None and one.id in by_id]
    episodes = {one.id: episode(chat, one, turns=turns) for one in finished}
    whole = {name: one for name, one in episodes.items() if one.readings and one.longest <= max_length}
    if len(whole) < len(episodes):
        log.warning(
            "episodes left out of training, for they have nothing to read or are longer than model.max_length=%d "
            "tokens: %d of %d",
            max_length,
            len(episodes) - len(whole),
            len(episodes),
        )
    by_turn = isinstance(spec, ProcessRewardModelSpec) and spec.loss == "mse"
    values = _turn_sums(spec, whole, by_id) if by_turn else _values(spec, whole, by_id)
    compared = [one for index, head in enumerate(spec.heads) for one in _pairs(spec, whole, values[head], head, index)]
    found: list[Example] = [*_labelled(spec, whole, by_id)] if by_turn else [*compared]
    held = _held_out_scenarios(spec, found, seed)
    train, apart = ([one for one in found if (_scenario(one) in held) == side] for side in (False, True))
    for index, head in enumerate(spec.heads):
        if not any(_teaches(one, index) for one in train):
            raise ArtifactError(_nothing(spec, head, len(finished), len(values[head])))
    learned = list({id(one): one for example in train for one in example.episodes}.values())
    counts = {
        "labelled_episodes" if by_turn else "pairs": float(len(train)),
        "heldout_pairs": float(sum(_scenario(one) in held for one in compared)),
        "left_out": float(len(episodes) - len(whole)),
        "unlabelled": float(sum(len(whole) - len(found) for found in values.values())),
    }
    return Data(train, apart, [one for one in compared if _scenario(one) in held], learned, counts)


def _scenario(example: Example) -> str:
    return example.episodes[0].trajectory.group


def _values(
    spec: RewardTrainingSpec, episodes: Mapping[str, Episode], scores: Mapping[str, Score]
) -> dict[str, dict[str, float]]:
    """By head and trajectory: what it is worth by its label."""
    found = {
        head: {name: value(one.trajectory, scores[name], head) for name, one in episodes.items()} for head in spec.heads
    }
    return {head: {name: label for name, label in one.items() if label is not None} for head, one in found.items()}


def _turn_sums(
    spec: RewardTrainingSpec, episodes: Mapping[str, Episode], scores: Mapping[str, Score]
) -> dict[str, dict[str, float]]:
    """By head and trajectory: the sum of the labels of its turns, where each turn has one."""
    found: dict[str, dict[str, float]] = {head: {} for head in spec.heads}
    for name, one in episodes.items():
        for head in spec.heads:
            labels = turn_values(one.trajectory, scores[name], head, one.readings)
            if labels is not None and not any(map(math.isnan, labels)):
                found[head][name] = math.fsum(labels)
    return found


def _labelled(spec: RewardTrainingSpec, episodes: Mapping[str, Episode], scores: Mapping[str, Score]) -> list[Labelled]:
    """Episodes of which a head has labels."""
    made = []
    for name, one in episodes.items():
        columns = [turn_values(one.trajectory, scores[name], head, one.readings) for head in spec.heads]
        if any(column is not None for column in columns):
            none = [math.nan] * one.readings
            made.append(Labelled(one, tuple(zip(*(column or none for column in columns), strict=True))))
    return made


def _pairs(
    spec: RewardTrainingSpec, episodes: Mapping[str, Episode], values: Mapping[str, float], head: str, index: int
) -> Iterator[Pair]:
    known = [episodes[name].trajectory for name in values]
    for better, worse in pairs(known, lambda one: values[one.id], spec.pairs, spec.min_margin):
        margin = values[better.id] - values[worse.id] if spec.margin == "reward" else 0.0
        yield Pair(episodes[better.id], episodes[worse.id], index, margin)


def _held_out_scenarios(spec: RewardTrainingSpec, found: Sequence[Example], seed: int) -> set[str]:
    """Scenarios that are not trained on: the share asked for of those that teach, one at least, and never all."""
    scenarios = sorted({_scenario(one) for one in found})
    random.Random(f"{seed}-held-out").shuffle(scenarios)
    count = max(1, round(spec.held_out * len(scenarios))) if spec.held_out else 0
    return set(scenarios[: min(count, len(scenarios) - 1)]) if scenarios else set()


def _teaches(example: Example, head: int) -> bool:
    if isinstance(example, Pair):
        return example.head == head
    return any(not math.isnan(labels[head]) for labels in example.label_RH)


def _nothing(spec: RewardTrainingSpec, head: str, finished: int, labelled: int) -> str:
    """Why a head has nothing to learn from."""
    by_turn = isinstance(spec, ProcessRewardModelSpec) and spec.loss == "mse"
    what = "judged reward" if head == OVERALL else f"component '{head}'"
    if by_turn:
        what = "step rewards" if head == OVERALL else f"components '{head}/0', '{head}/1' and so on"
    if not labelled:
        wanted = f"{what}, one for each turn" if by_turn else what
        return (
            f"the head '{head}' of the reward model has nothing to learn from: of {finished} finished episodes none "
            f"has {wanted}. Give it a reward that says so, or leave the head out of algorithm.heads"
        )
    if by_turn:
        return f"the head '{head}' has labels in held-out scenarios only: collect more, or lower algorithm.held_out"
    return (
        f"the head '{head}' of the reward model has nothing to compare: in no scenario that is trained on do two of "
        f"the {labelled} episodes differ in their {what} by more than min_margin={spec.min_margin:g}. Collect more "
        "scenarios or larger groups, or choose a reward that tells episodes apart"
    )


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
    packed = packs(episodes, spec.pack_tokens, padded=policy.padded)
    before = checkpoint.random_states()
    score_RH = policy.scores(episodes, spec.pack_tokens, distributed.share_drawing).requires_grad_()
    loss, seen = loss_of(spec, batch, episodes, score_RH)
    weight_RH = torch.autograd.grad(loss, score_RH)[0]
    checkpoint.set_random_states(before)  # so that the same drops out as in the scores of which this is the gradient
    for (number_S, one), real in distributed.share_drawing(packed):
        weight_SH = weight_RH[number_S.to(policy.device)]
        (policy.read(one) * (weight_SH if real else 0 * weight_SH)).sum().backward()
    distributed.sum_gradients(policy.parameters.values())
    grad_norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), spec.max_grad_norm).item()
    counts = of_packs([one for _, one in packed])
    del counts["sampled_tokens"]  # nothing is read but their places
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
    return segment_sums(score_RH, torch.tensor([one.readings for one in episodes], device=score_RH.device))


def _held_out(spec: RewardTrainingSpec, policy: RewardModel, data: Data) -> dict[str, float]:
    """The loss on what was not trained on, and how often, and how far, the better episode of a pair is ahead; by head
    where there are several."""
    examples: list[Example] = [*data.held_out, *data.compared]
    if not examples:
        return {}
    episodes = list({id(one): one for example in examples for one in example.episodes}.values())
    place = {id(one): index for index, one in enumerate(episodes)}
    score_RH = policy.scores(episodes, spec.pack_tokens, distributed.share)
    measured = {}
    if data.held_out:
        own = list({id(one): one for example in data.held_out for one in example.episodes}.values())
        first_RH = score_RH[: sum(one.readings for one in own)]  # they come first in `episodes`
        measured["heldout_loss"] = loss_of(spec, data.held_out, own, first_RH)[0].item()
    worth_EH = _worth(episodes, score_RH)
    apart: dict[int, list[float]] = defaultdict(list)
    for pair in data.compared:
        better, worse = (worth_EH[place[id(one)], pair.head].item() for one in pair.episodes)
        apart[pair.head].append(better - worse)
    if flat := [one for column in apart.values() for one in column]:
        measured["heldout_accuracy"] = sum(one > 0 for one in flat) / len(flat)
        measured["heldout_margin"] = math.fsum(flat) / len(flat)
    if len(spec.heads) > 1:
        names = list(spec.heads)
        for head, column in sorted(apart.items()):
            measured[f"heldout_accuracy/{names[head]}"] = sum(one > 0 for one in column) / len(column)
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
