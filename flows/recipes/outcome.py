"""The outcome of a flow: its artifacts and decisions, and the functions that follow a flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from components.artifacts import Artifact
from flows.experiment.early_stopping import Measured
from flows.history.records import Notice
from flows.stages.base import Request

OnRound = Callable[[int, dict[str, Artifact]], None]
"""Told of each finished round: its number and its artifacts by stage."""
OnNotice = Callable[[Notice], None]
"""Told what guards find, and what is decided from evaluations."""
Prune = Callable[[Measured], str | None]
"""Told of each policy that is evaluated before the last round; answers why the run ends there, or None."""


@dataclass
class Outcome:
    """The artifacts of a run."""

    evaluations: dict[str, Artifact] = field(default_factory=dict)
    """`start`, `sft`, `feedback`, `final`: those that there are, in this order."""
    measured: list[Measured] = field(default_factory=list)
    """Every policy that was evaluated from the start of the rounds on, in order of training."""
    reward_models: dict[int, list[Artifact]] = field(default_factory=dict)
    """By the round after which they were trained (0: before the rounds), and from which on they judged; empty where the
    declared reward does."""
    rounds: list[dict[str, Artifact]] = field(default_factory=list)
    """Of each round: trajectories, scores, selection, checkpoint, by stage."""
    checkpoint: Artifact | None = None
    """The final policy; None where nothing was trained."""
    step: int = 0
    """The round after which the final policy stood; 0: the start of the rounds."""
    stopped: str | None = None
    """Why the rounds ended before their number."""
    pruned: str | None = None
    """Why the sweep that the run belongs to ended it before its time; nothing is deployed then."""
    chosen: str | None = None
    """Why this is the final policy, where the best was asked for."""
    rejected: str | None = None
    """Why it was not deployed, where a person said so."""
    export: Artifact | None = None

    @property
    def last(self) -> Artifact:
        """The evaluation of the final policy."""
        return list(self.evaluations.values())[-1]

    @property
    def decisions(self) -> list[str]:
        """What was decided from evaluations, in words."""
        texts = (self.stopped, self.pruned, self.chosen, self.rejected)
        return [text for text in texts if text is not None]

    @property
    def first_step(self) -> int:
        """Where the rounds began."""
        return self.measured[0].step

    @property
    def last_step(self) -> int:
        """The last round that was played."""
        return self.first_step + len(self.rounds)

    @property
    def training_rewards(self) -> dict[int, float | None]:
        """Mean reward of the episodes of each round; None where it is not known yet. Only of rounds that the judges of
        the last one judged: what others say is no measure for it."""
        judged_since = max(self.reward_models, default=0)
        numbered = enumerate(self.rounds, self.first_step + 1)
        return {n: one["judge"].metrics.get("reward") for n, one in numbered if n > judged_since}


Approve = Callable[[Outcome, Request], str | None]
"""Asked with what is known, and the request that would deploy. Returns why not; None where it is accepted."""
