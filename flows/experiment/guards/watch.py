"""Guards of one run: they receive the artifacts of its stages and report notices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.errors import GuardTriggered, Problem, SpecError
from components.evaluation.sequential import alpha_of
from components.json_text import read_json
from flows.experiment.early_stopping import EvaluatedPolicy
from flows.experiment.guards import sample_episodes
from flows.experiment.guards.drift import RoundMetrics, drift_message
from flows.experiment.guards.rules import (
    amplified_rewards,
    judge_drift_message,
    no_signal,
    reward_hacking,
    rose,
    spans,
)
from flows.experiment.guards.spec import ADVICE, GuardsSpec
from flows.history.records import GuardName, Notice, SampleEpisode

if TYPE_CHECKING:
    from components.trajectories.columns import EpisodeColumns

SPREAD = re.compile(r"components/(.*[/.])?spread")
"""Metrics of a judge stage that measure the disagreement of an ensemble."""
SAME = {"identical_within": "within groups", "identical_between": "between scenarios"}


class RunGuards:
    """State of the guards of one run. `tell` receives each notice before a guard with the action `stop` raises
    GuardTriggered. A guard that triggers in consecutive rounds reports once, and again after a round in which it did
    not."""

    def __init__(self, spec: GuardsSpec, tell: Callable[[Notice], None], independent: bool = False):
        """Initialize the state. independent: evaluations use another reward than the rounds."""
        self.spec = spec
        self.tell = tell
        self.independent = independent
        self._rounds: dict[int, RoundMetrics] = {}
        self._judged: dict[int, RoundMetrics] = {}
        self._rewards: dict[int, float] = {}
        self._last: tuple[int, Artifact, Artifact] | None = None
        self._range = 0.0
        """Largest range of the rewards of a round so far."""
        self._triggering: set[str] = set()

    def filtered(self, label: str, step: int, selection: Artifact) -> None:
        """Check the selection of a filter. Raises GuardTriggered."""
        message = no_signal(label, selection.metrics)
        if message is not None:
            self._act("no_signal", step, message)

    def gathered(self, number: int, trajectories: Artifact, scores: Artifact, judged_since: int = 0) -> None:
        """Check the episodes and scores of a round before training.

        judged_since: round after which the reward models that scored it were trained; scores of earlier reward models
        are not compared. Raises GuardTriggered; raises SpecError if `ensemble_disagreement: stop` finds no ensemble."""
        self._last = (number, trajectories, scores)
        collect_metrics, judge_metrics = trajectories.metrics, scores.metrics
        episodes = collect_metrics.get("episodes", 0.0) - collect_metrics.get("failed", 0.0)
        self._rounds[number] = RoundMetrics(collect_metrics, collect_metrics.get("success"), episodes)
        if "reward" in judge_metrics:
            self._rewards[number] = judge_metrics["reward"]
        spread = {name: value for name, value in judge_metrics.items() if SPREAD.fullmatch(name)}
        if self.spec.ensemble_disagreement == "stop" and judge_metrics and not spread:
            text = f"stop, but the scores of round {number} have no component `spread`, which only ensembles compute"
            raise SpecError([Problem("guards.ensemble_disagreement", f"{text}; expected off or warn")])
        comparable = {n: metrics for n, metrics in self._judged.items() if n > judged_since}
        self._judged = comparable | {number: RoundMetrics(spread)}
        label = f"collect[{number}]"
        source = (trajectories, scores, label)
        spec = self.spec
        message = drift_message(
            self._rounds, "tokens_per_episode", "sampled tokens of an episode", factor=spec.length_factor, both=True
        )
        shorter = message is not None and " fell from " in message
        self._report("length_drift", number, message, partial(sample_episodes.longest, *source, shortest=shorter))
        message = drift_message(self._rounds, "repetition", "the share of repeated 3-grams", rise=spec.repetition_rise)
        self._report("repetition_drift", number, message, partial(sample_episodes.most_repeated, *source))
        same = [
            drift_message(self._rounds, name, f"the share of pairs {scope} with equal text", rise=spec.identical_rise)
            for name, scope in SAME.items()
        ]
        self._report(
            "identical_answers", number, "; ".join(filter(None, same)) or None, partial(sample_episodes.alike, *source)
        )
        for name in sorted(spread):
            message = drift_message(
                self._judged,
                name,
                "the disagreement of the judges",
                factor=spec.disagreement_factor,
                ignore_success=True,
            )
            component = name.removeprefix("components/")
            if message is not None:
                break
        else:
            message, component = None, ""
        self._report(
            "ensemble_disagreement", number, message, partial(sample_episodes.most_disputed, *source, component)
        )

    def trained(self, number: int, checkpoint: Artifact) -> None:
        """Check what a round divided its advantages by. Raises GuardTriggered."""
        divisor = checkpoint.metrics.get("advantage_divisor")
        self._range = max(self._range, checkpoint.metrics.get("reward_range", 0.0))
        message = None
        if divisor is not None:
            message = amplified_rewards(f"train[{number}]", divisor, self._range, self.spec.amplified_share)
        self._report("amplified_rewards", number, message, list)

    def judged_again(self, number: int, drift: Mapping[str, float], rounds: int) -> None:
        """Compare a judgement of the anchors with the first one, after `gathered`. Raises GuardTriggered.

        drift: metrics of the judgement; empty in a plan. rounds: number of rounds that are compared."""
        first, last = min(self._rewards, default=number), self._rewards.get(number)
        rewards = (self._rewards[first], last) if first < number and last is not None else None
        message = judge_drift_message(drift, alpha=self.spec.drift_alpha, rounds=rounds, rewards=rewards)
        self._report("judge_drift", number, message, list)

    def evaluated(self, measured: Sequence[EvaluatedPolicy], rewards: Mapping[int, float | None]) -> None:
        """Compare the last two of these evaluations. Raises GuardTriggered.

        rewards: mean training reward by round, None if unknown; an unknown reward triggers no guard."""
        rules: dict[GuardName, str] = {"reward_hacking": "success"}
        if self.independent:
            rules["heldout_reward"] = "reward"
        active = {name: metric for name, metric in rules.items() if getattr(self.spec, name) != "off"}
        if not active or len(measured) < 2:
            return
        previous, latest = measured[-2:]
        rounds = spans([policy.step for policy in measured], sorted(rewards))
        before, since = ({n: value for n in part if (value := rewards[n]) is not None} for part in rounds)
        if (len(before), len(since)) != tuple(map(len, rounds)) or not rose(before, since):
            return
        episodes = _episodes(previous), _episodes(latest)
        alpha = alpha_of(*map(_summary, (previous, latest)))
        for name, metric in active.items():
            difference = _difference(*episodes, metric, alpha)
            steps = (previous.step, latest.step)
            message = None if difference is None else reward_hacking(before, since, difference, steps, metric)
            if message is not None:
                self._act(name, latest.step, message, self._high_reward_failures())

    def _high_reward_failures(self) -> list[SampleEpisode]:
        """Return the episodes of the last round with the highest reward that did not succeed."""
        if self._last is None:
            return []
        number, trajectories, scores = self._last
        return sample_episodes.high_reward_failures(trajectories, scores, f"collect[{number}]")

    def _report(
        self, name: GuardName, step: int, message: str | None, examples: Callable[[], list[SampleEpisode]]
    ) -> None:
        """Act if a guard begins to trigger. examples: return episodes for the notice."""
        if getattr(self.spec, name) == "off":
            return
        if message is None:
            self._triggering.discard(name)
        elif name not in self._triggering:
            self._triggering.add(name)
            self._act(name, step, message, examples())

    def _act(self, name: GuardName, step: int, message: str, episodes: Sequence[SampleEpisode] = ()) -> None:
        if episodes:
            message += f". Example episodes of {episodes[0].label}: {', '.join(episode.id for episode in episodes)}"
        self.tell(Notice(name, step, message, list(episodes)))
        if getattr(self.spec, name) == "stop":
            raise GuardTriggered(
                f"{message}. {ADVICE[name]}. Finished stages are kept; the same command with guards.{name}=warn "
                "resumes from here"
            )


def _episodes(measured: EvaluatedPolicy) -> EpisodeColumns:
    """Return the scored episodes of an evaluation; none if it is pending or not on this machine."""
    from components.trajectories.columns import EpisodeColumns
    from components.trajectories.sources import ScoredFiles

    files = ScoredFiles.of(measured.evaluation.path)
    return files.load() if files.trajectories.is_file() and files.scores.is_file() else EpisodeColumns.of([])


def _summary(measured: EvaluatedPolicy) -> dict[str, Any]:
    """Return the summary of an evaluation; empty if it is pending or not on this machine."""
    path = measured.evaluation.path / "summary.json"
    return read_json(path) if path.is_file() else {}


def _difference(
    before: EpisodeColumns, after: EpisodeColumns, metric: str, alpha: float | None
) -> dict[str, Any] | None:
    """Return the paired difference of two evaluations; None if no scenario was measured in both. alpha: error rate of
    the confidence sequence, if one may have stopped early; rewards have no interval then."""
    from components.evaluation.metrics import paired_difference, paired_rewards

    try:
        if metric == "success":
            return paired_difference(before, after, alpha)
        rewards = paired_rewards(before, after)
        return rewards if alpha is None else rewards | {"low": None, "high": None}
    except ValueError:
        return None
