"""What a reward model learns from, and what is held out: pairs of episodes of which one is better, or episodes with the
labels of their turns.

Episodes come in collections, each of one policy. Only episodes of one collection are compared with each other: a judge
may have ranked them among themselves. A scenario stays on its side for good: a model that is trained further never
learns from one that it was measured on, nor is it measured on one that it learned from. `scenarios.json` of a reward
model says which these are.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.algorithms.preference.pairs import pairs
from components.algorithms.reward_models.data import OVERALL, Episode, episode, turn_values, value
from components.algorithms.spec import ProcessRewardModelSpec, RewardTrainingSpec
from components.errors import ArtifactError
from components.json_text import read_json
from components.trajectories.chat import ChatFormat
from components.trajectories.groups import scenario_of
from components.trajectories.schema import Score, Trajectory

log = logging.getLogger(__name__)

SIDES = "scenarios.json"


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
class Judged:
    """A collection: episodes of one policy, and what the declared reward says of them."""

    trajectories: Sequence[Trajectory]
    """Their ids are unique over all collections of a training."""
    scores: Sequence[Score]
    """In any order; those of components give the heads their labels."""


@dataclass(frozen=True)
class Sides:
    """On which side scenarios are, by their ids."""

    trained: frozenset[str] = frozenset()
    """A model has learned from their episodes."""
    held_out: frozenset[str] = frozenset()

    def write(self, folder: Path) -> None:
        data = {"held_out": sorted(self.held_out), "trained": sorted(self.trained)}
        (folder / SIDES).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Sides:
        """Of the reward model in a folder. Raises ArtifactError where it does not say."""
        try:
            data = read_json(folder / SIDES)
            return cls(frozenset(data["trained"]), frozenset(data["held_out"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"the reward model in {folder} does not say which scenarios it was trained on ({SIDES}: {error!r}), so "
                "none could be held out from it: train it again, or begin with another checkpoint"
            ) from error


@dataclass(frozen=True)
class Data:
    """What there is to learn from."""

    train: list[Example]
    held_out: list[Example]
    """The same of scenarios that are not trained on; of the newest collection only."""
    compared: list[Pair]
    """Pairs of these scenarios; of the newest collection only."""
    compared_earlier: list[Pair]
    """Those of the collections before it."""
    episodes: list[Episode]
    """Those that are trained on."""
    sides: Sides
    """After this training."""
    counts: dict[str, float]


@dataclass(frozen=True)
class _Read:
    """What a collection gives, whichever side its scenarios are on."""

    examples: list[Example]
    compared: list[Pair]
    finished: int
    """Episodes that came to their end."""
    readable: int
    labelled: Mapping[str, int]
    """By head: readable episodes that are worth something by its label."""


def gather(
    spec: RewardTrainingSpec,
    chat: ChatFormat,
    judged: Sequence[Judged],
    max_length: int,
    seed: int,
    known: Sides | None = None,
) -> Data:
    """The examples of a training, apart from those that are held out.

    judged: the newest collection first. known: the sides of the model that is trained further. Raises ArtifactError
    where a head of a new model has nothing to learn from; one that is trained further stays as it is.
    """
    read = [_read(spec, chat, one, max_length) for one in judged]
    finished, readable = sum(one.finished for one in read), sum(one.readable for one in read)
    if readable < finished:
        log.warning(
            "episodes left out of training, for they have nothing to read or are longer than model.max_length=%d "
            "tokens: %d of %d",
            max_length,
            finished - readable,
            finished,
        )
    held = _held_out(spec, {_scenario(example) for one in read for example in one.examples}, seed, known or Sides())
    train = [example for one in read for example in one.examples if _scenario(example) not in held]
    for index, head in enumerate(spec.heads):
        if known is None and not any(_teaches(one, index) for one in train):
            raise ArtifactError(_nothing(spec, head, finished, sum(one.labelled[head] for one in read)))
    apart = [example for example in read[0].examples if _scenario(example) in held]
    compared, *before = ([pair for pair in one.compared if _scenario(pair) in held] for one in read)
    earlier = [pair for one in before for pair in one]
    counts = {
        "labelled_episodes" if _by_turn(spec) else "pairs": float(len(train)),
        "heldout_pairs": float(len(compared)),
        "left_out": float(finished - readable),
        "unlabelled": float(sum(one.readable - count for one in read for count in one.labelled.values())),
    }
    if before:
        counts["heldout_pairs_earlier"] = float(len(earlier))
    learned = list({id(one): one for example in train for one in example.episodes}.values())
    sides = Sides(frozenset(map(_scenario, train)) | (known or Sides()).trained, frozenset(held))
    return Data(train, apart, compared, earlier, learned, sides, counts)


def _read(spec: RewardTrainingSpec, chat: ChatFormat, judged: Judged, max_length: int) -> _Read:
    by_id = {score.trajectory_id: score for score in judged.scores}
    finished = [one for one in judged.trajectories if one.failure is None and one.id in by_id]
    episodes = {one.id: episode(chat, one, turns=isinstance(spec, ProcessRewardModelSpec)) for one in finished}
    whole = {name: one for name, one in episodes.items() if one.readings and one.longest <= max_length}
    values = _turn_sums(spec, whole, by_id) if _by_turn(spec) else _values(spec, whole, by_id)
    compared = [one for index, head in enumerate(spec.heads) for one in _pairs(spec, whole, values[head], head, index)]
    examples: list[Example] = [*_labelled(spec, whole, by_id)] if _by_turn(spec) else [*compared]
    return _Read(examples, compared, len(finished), len(whole), {head: len(found) for head, found in values.items()})


def _by_turn(spec: RewardTrainingSpec) -> bool:
    """Whether turns have labels of their own, and nothing is compared in training."""
    return isinstance(spec, ProcessRewardModelSpec) and spec.loss == "mse"


def _scenario(example: Example) -> str:
    return scenario_of(example.episodes[0].trajectory.group)


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


def _held_out(spec: RewardTrainingSpec, scenarios: set[str], seed: int, known: Sides) -> set[str]:
    """Scenarios that are not trained on: those that were held out before, and of the new ones as many as it takes to
    come to the share of those that teach now; one at least, and never all."""
    new = sorted(scenarios - known.trained - known.held_out)
    random.Random(f"{seed}-held-out").shuffle(new)
    count = max(1, round(spec.held_out * len(scenarios))) if spec.held_out else 0
    lacking = min(count, len(scenarios) - 1) - len(scenarios & known.held_out)
    return {*known.held_out, *new[: max(0, lacking)]}


def _teaches(example: Example, head: int) -> bool:
    if isinstance(example, Pair):
        return example.head == head
    return any(not math.isnan(labels[head]) for labels in example.label_RH)


def _nothing(spec: RewardTrainingSpec, head: str, finished: int, labelled: int) -> str:
    """Why a head has nothing to learn from."""
    by_turn = _by_turn(spec)
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
