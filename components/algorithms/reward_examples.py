"""What a reward model learns from: pairs of episodes for each head, or episodes with labels of their turns; some
scenarios are held out.

Each head has pairs of its own, for the order of episodes may be another by each component of the score.

Legend: R readings, H heads.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from components.algorithms.pairs import pairs
from components.algorithms.reward_data import OVERALL, Episode, episode, turn_values, value
from components.algorithms.spec import ProcessRewardModelSpec, RewardTrainingSpec
from components.errors import ArtifactError
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
