"""The guards of one run: they are told of what the stages made, and tell what they find."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from components.artifacts import Artifact
from components.errors import GuardStruck, Problem, SpecError
from components.trajectories.schema import Trajectory
from flows.experiment.early_stopping import Measured
from flows.experiment.guards import shown
from flows.experiment.guards.drift import Look, drifted
from flows.experiment.guards.rules import no_signal, reward_hacking, rose, spans
from flows.experiment.guards.spec import ADVICE, GuardsSpec
from flows.history.records import GuardName, Notice, Shown

SPREAD = re.compile(r"components/(.*[/.])?spread")
"""Metrics of a judge stage that say how far an ensemble disagrees."""
SAME = {"identical_within": "within groups", "identical_between": "between scenarios"}


class Guards:
    """`tell` hears what they find, before a rule of `stop` raises GuardStruck. A rule that goes on striking is heard
    once, and again after a round in which it did not."""

    def __init__(self, spec: GuardsSpec, tell: Callable[[Notice], None], independent: bool = False):
        """independent: whether evaluations have another reward than the rounds."""
        self.spec = spec
        self.tell = tell
        self.independent = independent
        self._looks: dict[int, Look] = {}
        self._judged: dict[int, Look] = {}
        self._last: tuple[int, Artifact, Artifact] | None = None
        self._striking: set[str] = set()

    def filtered(self, label: str, step: int, selection: Artifact) -> None:
        """Looks at what a filter has left."""
        message = no_signal(label, selection.metrics)
        if message is not None:
            self._act("no_signal", step, message)

    def gathered(self, number: int, trajectories: Artifact, scores: Artifact, judged_since: int = 0) -> None:
        """Looks at a round that is to be trained on. judged_since: the round after which its judges were trained; what
        others say is no measure for it. Raises SpecError where an ensemble is to be watched and none judges."""
        self._last = (number, trajectories, scores)
        played, said = trajectories.metrics, scores.metrics
        episodes = played.get("episodes", 0.0) - played.get("failed", 0.0)
        self._looks[number] = Look(played, played.get("success"), episodes)
        spread = {name: value for name, value in said.items() if SPREAD.fullmatch(name)}
        if self.spec.ensemble_disagreement == "stop" and said and not spread:
            what = f"stop, and the scores of round {number} have no component `spread`, which ensembles have"
            raise SpecError([Problem("guards.ensemble_disagreement", f"{what}; expected off or warn")])
        self._judged = {n: look for n, look in self._judged.items() if n > judged_since} | {number: Look(spread)}
        label = f"collect[{number}]"
        best = (trajectories, scores, label)
        spec = self.spec
        found = drifted(
            self._looks, "tokens_per_episode", "sampled tokens of an episode", factor=spec.length_factor, both=True
        )
        shorter = found is not None and " fell from " in found
        self._say("length_drift", number, found, partial(shown.longest, *best, shortest=shorter))
        found = drifted(self._looks, "repetition", "the share of repeated 3-grams", rise=spec.repetition_rise)
        self._say("repetition_drift", number, found, partial(shown.most_repeated, *best))
        same = [
            drifted(self._looks, name, f"the share of pairs {where} that say the same", rise=spec.identical_rise)
            for name, where in SAME.items()
        ]
        self._say("identical_answers", number, "; ".join(filter(None, same)) or None, partial(shown.alike, *best))
        for name in sorted(spread):
            found = drifted(
                self._judged,
                name,
                "the disagreement of the judges",
                factor=spec.disagreement_factor,
                whatever_success=True,
            )
            component = name.removeprefix("components/")
            if found is not None:
                break
        else:
            found, component = None, ""
        self._say("ensemble_disagreement", number, found, partial(shown.most_disputed, *best, component))

    def evaluated(self, measured: Sequence[Measured], rewards: Mapping[int, float | None]) -> None:
        """Looks at the last two of these evaluations. rewards: mean training reward by round; what is not known yet
        gives no verdict."""
        rules: dict[GuardName, str] = {"reward_hacking": "success"}
        if self.independent:
            rules["heldout_reward"] = "reward"
        wanted = {name: what for name, what in rules.items() if getattr(self.spec, name) != "off"}
        if not wanted or len(measured) < 2:
            return
        previous, now = measured[-2:]
        rounds = spans([one.step for one in measured], sorted(rewards))
        before, since = ({n: value for n in part if (value := rewards[n]) is not None} for part in rounds)
        if (len(before), len(since)) != tuple(map(len, rounds)) or not rose(before, since):
            return
        played = _played(previous), _played(now)
        for name, what in wanted.items():
            difference = _difference(*played, what)
            steps = (previous.step, now.step)
            message = None if difference is None else reward_hacking(before, since, difference, steps, what)
            if message is not None:
                self._act(name, now.step, message, self._liked())

    def _liked(self) -> list[Shown]:
        """Episodes of the last round that the reward likes and that did not succeed."""
        if self._last is None:
            return []
        number, trajectories, scores = self._last
        return shown.liked_in_vain(trajectories, scores, f"collect[{number}]")

    def _say(self, name: GuardName, step: int, message: str | None, best: Callable[[], list[Shown]]) -> None:
        """Acts where a rule begins to strike."""
        if getattr(self.spec, name) == "off":
            return
        if message is None:
            self._striking.discard(name)
        elif name not in self._striking:
            self._striking.add(name)
            self._act(name, step, message, best())

    def _act(self, name: GuardName, step: int, message: str, episodes: Sequence[Shown] = ()) -> None:
        if episodes:
            message += f". Shown best by {episodes[0].label}: {', '.join(one.id for one in episodes)}"
        self.tell(Notice(name, step, message, list(episodes)))
        if getattr(self.spec, name) == "stop":
            raise GuardStruck(
                f"{message}. {ADVICE[name]}. What was finished is kept; guards.{name}=warn goes on from here"
            )


def _played(measured: Measured) -> list[Trajectory]:
    """The episodes of an evaluation, with their rewards; none where it is not made yet, or not on this machine."""
    from components.trajectories.store import load_scored

    folder = measured.evaluation.path
    trajectories, scores = folder / "trajectories.parquet", folder / "scores.parquet"
    return load_scored(trajectories, scores, None) if trajectories.is_file() and scores.is_file() else []


def _difference(before: list[Trajectory], after: list[Trajectory], what: str) -> dict[str, Any] | None:
    """The paired difference of two evaluations; None where no scenario was measured in both."""
    from components.evaluation.metrics import paired_difference, paired_rewards

    try:
        return paired_difference(before, after) if what == "success" else paired_rewards(before, after)
    except ValueError:
        return None
