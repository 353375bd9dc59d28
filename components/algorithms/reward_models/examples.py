"""Training and held-out examples of a reward model: pairs of episodes of which one is better, or episodes with labelled
turns.

Episodes come in collections, each sampled from one policy. Only episodes of the same collection are compared with each
other, because a judge may have ranked them relative to each other. The split of scenarios is permanent: a model that is
trained further never trains on a held-out scenario, and is never evaluated on a training scenario. `scenarios.json` of
a reward model records the split.

A collection with predicted rewards contributes adversarial examples: all examples of the scenarios in which a worse
episode has the higher predicted reward. The pairs that are ordered wrongly alone would be a biased sample: a model that
trains on them learns to order the others wrongly.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.algorithms.reward_models.data import OVERALL, RewardEpisode, episode, turn_values, value
from components.algorithms.trainer import JudgedCollection
from components.errors import ArtifactError
from components.json_text import read_json
from components.trajectories.chat import ChatFormat
from components.trajectories.groups import pairs, scenario_of
from components.trajectories.schema import Score

if TYPE_CHECKING:
    from components.algorithms.reward_models.spec import RewardTrainingSpec

log = logging.getLogger(__name__)

SPLIT = "scenarios.json"


@dataclass(frozen=True)
class Pair:
    """Two episodes of a scenario, for one head."""

    better: RewardEpisode
    worse: RewardEpisode
    head: int
    margin: float
    """Difference of the two values."""

    @property
    def episodes(self) -> tuple[RewardEpisode, ...]:
        return self.better, self.worse


@dataclass(frozen=True)
class LabelledEpisode:
    """An episode with the labels of its turns."""

    episode: RewardEpisode
    label_RH: tuple[tuple[float, ...], ...]
    """Labels by reading and head; NaN if missing."""

    @property
    def episodes(self) -> tuple[RewardEpisode, ...]:
        return (self.episode,)


Example = Pair | LabelledEpisode


@dataclass(frozen=True)
class ScenarioSplit:
    """Split of scenarios into training and held-out, by scenario id."""

    trained: frozenset[str] = frozenset()
    """Scenarios whose episodes the model was trained on."""
    held_out: frozenset[str] = frozenset()

    def write(self, folder: Path) -> None:
        """Write the split to the folder of a reward model."""
        data = {"held_out": sorted(self.held_out), "trained": sorted(self.trained)}
        (folder / SPLIT).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> ScenarioSplit:
        """Return the split of the reward model in a folder. Raises ArtifactError if it is missing or unreadable."""
        try:
            data = read_json(folder / SPLIT)
            return cls(frozenset(data["trained"]), frozenset(data["held_out"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"the reward model in {folder} does not record which scenarios it was trained on ({SPLIT}: "
                f"{error!r}), so none can be held out: train it again, or start from another checkpoint"
            ) from error


@dataclass(frozen=True)
class RewardModelData:
    """Training and evaluation data of one training."""

    train: list[Example]
    """Training examples of all collections."""
    held_out: list[Example]
    """Examples of held-out scenarios, from the newest collection only."""
    compared: list[Pair]
    """Pairs of held-out scenarios, from the newest collection only."""
    compared_earlier: list[Pair]
    """Pairs of held-out scenarios from the earlier collections without predicted rewards."""
    compared_adversarial: list[Pair]
    """Pairs of held-out scenarios from the collections with predicted rewards."""
    episodes: list[RewardEpisode]
    """Episodes that are trained on."""
    split: ScenarioSplit
    """Split after this training."""
    counts: dict[str, float]


@dataclass(frozen=True)
class _Read:
    """Contents of a collection, from training and held-out scenarios."""

    examples: list[Example]
    compared: list[Pair]
    finished: int
    """Number of scored episodes without a failure."""
    readable: int
    """Number of finished episodes with a reading that fit the model's length."""
    labelled: Mapping[str, int]
    """Number of readable episodes with a label, by head."""
    adversarial: bool
    """True if its examples are adversarial."""


def gather(
    spec: RewardTrainingSpec,
    chat: ChatFormat,
    judged: Sequence[JudgedCollection],
    max_length: int,
    seed: int,
    earlier_split: ScenarioSplit | None = None,
) -> RewardModelData:
    """Return the training examples and the held-out examples.

    judged: collections, the newest first. earlier_split: split of the model that is trained further. Raises
    ArtifactError if a head of a new model has no training example; a model that is trained further then keeps that head
    unchanged.
    """
    collections = [_read(spec, chat, collection, max_length) for collection in judged]
    finished, readable = (
        sum(collection.finished for collection in collections),
        sum(collection.readable for collection in collections),
    )
    if readable < finished:
        log.warning(
            "episodes left out of training because they have no tokens to score or are longer than model.max_length=%d "
            "tokens: %d of %d",
            max_length,
            finished - readable,
            finished,
        )
    held_out_scenarios = _held_out(
        spec,
        {_scenario(example) for collection in collections for example in collection.examples},
        seed,
        earlier_split or ScenarioSplit(),
    )
    train = [
        example
        for collection in collections
        for example in collection.examples
        if _scenario(example) not in held_out_scenarios
    ]
    for index, head in enumerate(spec.heads):
        if earlier_split is None and not any(_teaches(example, index) for example in train):
            raise ArtifactError(
                _no_examples_message(spec, head, finished, sum(collection.labelled[head] for collection in collections))
            )
    held_out_examples = [example for example in collections[0].examples if _scenario(example) in held_out_scenarios]

    def compared(collections: Iterable[_Read]) -> list[Pair]:
        return [pair for read in collections for pair in read.compared if _scenario(pair) in held_out_scenarios]

    newest_pairs = compared(collections[:1])
    pairs_earlier = compared(read for read in collections[1:] if not read.adversarial)
    adversarial = [read for read in collections if read.adversarial]
    pairs_adversarial = compared(adversarial)
    counts = {
        "labelled_episodes" if spec.learns_turn_labels else "pairs": float(len(train)),
        "heldout_pairs": float(len(newest_pairs)),
        "left_out": float(finished - readable),
        "unlabelled": float(
            sum(collection.readable - count for collection in collections for count in collection.labelled.values())
        ),
    }
    if len(collections) > 1 + len(adversarial):
        counts["heldout_pairs_earlier"] = float(len(pairs_earlier))
    if adversarial:
        counts["adversarial_examples"] = float(sum(len(read.examples) for read in adversarial))
        counts["heldout_pairs_adversarial"] = float(len(pairs_adversarial))
    episodes = list({id(unit): unit for example in train for unit in example.episodes}.values())
    split = ScenarioSplit(
        frozenset(map(_scenario, train)) | (earlier_split or ScenarioSplit()).trained, frozenset(held_out_scenarios)
    )
    return RewardModelData(
        train, held_out_examples, newest_pairs, pairs_earlier, pairs_adversarial, episodes, split, counts
    )


def _read(spec: RewardTrainingSpec, chat: ChatFormat, judged: JudgedCollection, max_length: int) -> _Read:
    by_id = {score.trajectory_id: score for score in judged.scores}
    finished = [
        trajectory for trajectory in judged.trajectories if trajectory.failure is None and trajectory.id in by_id
    ]
    episodes = {trajectory.id: episode(chat, trajectory, turns=spec.scores_turns) for trajectory in finished}
    readable = {name: unit for name, unit in episodes.items() if unit.readings and unit.longest <= max_length}
    values = _turn_sums(spec, readable, by_id) if spec.learns_turn_labels else _values(spec, readable, by_id)
    compared = [
        pair for index, head in enumerate(spec.heads) for pair in _pairs(spec, readable, values[head], head, index)
    ]
    labelled = _labelled(spec, readable, by_id) if spec.learns_turn_labels else []
    if judged.predicted is not None:
        misordered = {_scenario(pair) for pair in compared if _misordered(pair, judged.predicted)}
        compared = [pair for pair in compared if _scenario(pair) in misordered]
        labelled = [example for example in labelled if _scenario(example) in misordered]
    examples: list[Example] = [*labelled] if spec.learns_turn_labels else [*compared]
    counts = {head: len(labels) for head, labels in values.items()}
    return _Read(examples, compared, len(finished), len(readable), counts, judged.predicted is not None)


def _misordered(pair: Pair, predicted: Mapping[str, float | None]) -> bool:
    """Return True if the worse episode of the pair has the higher predicted reward."""
    better, worse = (predicted.get(unit.trajectory.id) for unit in pair.episodes)
    return better is not None and worse is not None and worse > better


def _scenario(example: Example) -> str:
    return scenario_of(example.episodes[0].trajectory.group)


def _values(
    spec: RewardTrainingSpec, episodes: Mapping[str, RewardEpisode], scores: Mapping[str, Score]
) -> dict[str, dict[str, float]]:
    """Return the label of each episode that has one, by head and trajectory."""
    labels = {
        head: {name: value(unit.trajectory, scores[name], head) for name, unit in episodes.items()}
        for head in spec.heads
    }
    return {
        head: {name: label for name, label in by_name.items() if label is not None} for head, by_name in labels.items()
    }


def _turn_sums(
    spec: RewardTrainingSpec, episodes: Mapping[str, RewardEpisode], scores: Mapping[str, Score]
) -> dict[str, dict[str, float]]:
    """Return the sum of the turn labels of each episode whose turns all have one, by head and trajectory."""
    sums: dict[str, dict[str, float]] = {head: {} for head in spec.heads}
    for name, unit in episodes.items():
        for head in spec.heads:
            labels = turn_values(unit.trajectory, scores[name], head, unit.readings)
            if labels is not None and not any(map(math.isnan, labels)):
                sums[head][name] = math.fsum(labels)
    return sums


def _labelled(
    spec: RewardTrainingSpec, episodes: Mapping[str, RewardEpisode], scores: Mapping[str, Score]
) -> list[LabelledEpisode]:
    """Return the episodes with labels of at least one head."""
    result = []
    for name, unit in episodes.items():
        columns = [turn_values(unit.trajectory, scores[name], head, unit.readings) for head in spec.heads]
        if any(column is not None for column in columns):
            missing = [math.nan] * unit.readings
            result.append(LabelledEpisode(unit, tuple(zip(*(column or missing for column in columns), strict=True))))
    return result


def _pairs(
    spec: RewardTrainingSpec, episodes: Mapping[str, RewardEpisode], values: Mapping[str, float], head: str, index: int
) -> Iterator[Pair]:
    trajectories = [episodes[name].trajectory for name in values]
    for better, worse in pairs(trajectories, lambda trajectory: values[trajectory.id], spec.pairs, spec.min_margin):
        margin = values[better.id] - values[worse.id] if spec.margin == "reward" else 0.0
        yield Pair(episodes[better.id], episodes[worse.id], index, margin)


def _held_out(spec: RewardTrainingSpec, scenarios: set[str], seed: int, earlier_split: ScenarioSplit) -> set[str]:
    """Return the held-out scenarios: the earlier ones, and as many new ones as it takes to reach the held-out share of
    the current scenarios; at least one, and never all."""
    new = sorted(scenarios - earlier_split.trained - earlier_split.held_out)
    random.Random(f"{seed}-held-out").shuffle(new)
    count = max(1, round(spec.held_out * len(scenarios))) if spec.held_out else 0
    missing = min(count, len(scenarios) - 1) - len(scenarios & earlier_split.held_out)
    return {*earlier_split.held_out, *new[: max(0, missing)]}


def _teaches(example: Example, head: int) -> bool:
    if isinstance(example, Pair):
        return example.head == head
    return any(not math.isnan(labels[head]) for labels in example.label_RH)


def _no_examples_message(spec: RewardTrainingSpec, head: str, finished: int, labelled: int) -> str:
    """Return the error message for a head without training examples."""
    by_turn = spec.learns_turn_labels
    label_name = "judged reward" if head == OVERALL else f"component '{head}'"
    if by_turn:
        label_name = "step rewards" if head == OVERALL else f"components '{head}/0', '{head}/1' and so on"
    if not labelled:
        expected = f"{label_name}, one for each turn" if by_turn else label_name
        return (
            f"the head '{head}' of the reward model has no labels: none of {finished} finished episodes has "
            f"{expected}. Use a reward that provides this label, or remove the head from algorithm.heads"
        )
    if by_turn:
        return (
            f"the head '{head}' has labels in held-out scenarios only: collect more scenarios, or lower "
            "algorithm.held_out"
        )
    return (
        f"the head '{head}' of the reward model has no pairs: in no training scenario do two of the {labelled} "
        f"labelled episodes differ in their {label_name} by more than min_margin={spec.min_margin:g}. Collect more "
        "scenarios or larger groups, or use a reward that distinguishes episodes"
    )
