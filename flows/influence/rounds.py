"""Rounds of a recorded run: the training of a round, and the collections that it learned from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from components.errors import ResourceError
from components.trajectories.policy_text import text
from components.trajectories.schema import Trajectory
from flows.history.records import RunRecord, StageRecord
from flows.recipes.episodes import FED
from flows.stages.base import Request
from flows.terminal.console import shorten

OTHER_SEED = 1_000_003
"""Offset of the seed of a training in another order."""
_ROUND = re.compile(r"train\[(\d+)\]")


@dataclass(frozen=True)
class TrainedRound:
    """Round whose training has finished."""

    run: RunRecord
    number: int
    training: StageRecord
    collections: Mapping[str, StageRecord]
    """Collections by the suffix of their input names: none for that of the round, `+K` for those of refills."""

    @property
    def label(self) -> str:
        """Label of the collection of the round."""
        return self.collections[""].label

    @property
    def request(self) -> Request:
        """Request of the training."""
        return Request.from_json(self.training.request)

    @property
    def reordered(self) -> Request:
        """Request of the training with another seed: the same groups in another order. The difference that it makes is
        noise."""
        return replace(self.request, seed=self.request.seed + OTHER_SEED)

    @property
    def sampler(self) -> str | None:
        """Key of the policy that collected the round; None for the base model."""
        return self.collections[""].request["inputs"].get("policy")

    @property
    def start(self) -> str | None:
        """Key of the policy before the training; None for the base model."""
        return self.training.request["inputs"].get("start")

    @property
    def temperature(self) -> float:
        """Sampling temperature of the round."""
        return float(self.collections[""].request["spec"]["collect"]["temperature"])

    def inputs(self, name: str) -> dict[str, str]:
        """Return the keys of `trajectories`, `scores` or `selection` by the suffix of the collection."""
        return {suffix: self.training.request["inputs"][f"{name}{suffix}"] for suffix in self.collections}


def trained_rounds(run: RunRecord) -> list[TrainedRound]:
    """Return the rounds of a run that trained on episodes of its policy, in order."""
    collected = {
        stage.key: stage
        for stage in run.stages
        if stage.request["stage"] == "collect" and stage.request["spec"].get("actor", "policy") == "policy"
    }
    rounds = []
    for stage in run.stages:
        match = _ROUND.fullmatch(stage.label)
        if match is None or stage.request["stage"] != "train":
            continue
        collections = _collections(stage.request["inputs"], collected)
        if "" in collections:
            rounds.append(TrainedRound(run, int(match[1]), stage, collections))
    return sorted(rounds, key=lambda trained: trained.number)


def _collections(inputs: Mapping[str, str], collected: Mapping[str, StageRecord]) -> dict[str, StageRecord]:
    """Return the collections of a training by suffix."""
    suffixes = ["", *(f"+{number}" for number in range(1, len(inputs)))]
    names = {suffix: inputs.get(f"{FED[0]}{suffix}", "") for suffix in suffixes}
    return {suffix: collected[key] for suffix, key in names.items() if key in collected}


def round_of(run: RunRecord, number: int | None) -> TrainedRound:
    """Return a round of a run; None: its last one. Raises ResourceError if the run does not have it."""
    rounds = trained_rounds(run)
    if not rounds:
        flow = str(run.spec.get("flow", {}).get("_target_", "unknown")).rpartition(".")[2]
        labels = ", ".join(stage.label for stage in run.stages) or "none yet"
        raise ResourceError(
            f"run {run.short} ({run.name}, flow={flow}) has no round that trained on episodes of its policy; "
            f"expected a run with the stages collect[N] and train[N]. It has: {labels}"
        )
    numbers = [trained.number for trained in rounds]
    if number is None:
        return rounds[-1]
    if number not in numbers:
        raise ResourceError(f"--round {number}: run {run.short} has the rounds {listed(numbers)}")
    return rounds[numbers.index(number)]


def listed(names: Sequence[object], most: int = 20) -> str:
    """Return names as text, at most `most` of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


LONGEST = 160
"""Maximum number of characters of an excerpt."""


def excerpt(trajectory: Trajectory) -> str:
    """Return the beginning of the policy's messages, on one line."""
    return shorten(" / ".join(line for line in text(trajectory).split("\n") if line), LONGEST)
