"""Outcome of a recipe: its artifacts and decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from components.artifacts import Artifact
from flows.experiment.early_stopping import EvaluatedPolicy


@dataclass
class RunOutcome:
    """Artifacts and decisions of a run."""

    evaluations: dict[str, Artifact] = field(default_factory=dict)
    """Evaluations by name, in order: `start`, `sft`, `feedback`, those of the recipe's own, `final`."""
    measured: list[EvaluatedPolicy] = field(default_factory=list)
    """Policies evaluated from the start of the rounds on, in order of training."""
    reward_models: dict[int, list[Artifact]] = field(default_factory=dict)
    """Reward models by the round after which they were trained (0: before the rounds); they score the rounds from then
    on. Empty if the declared reward scores the rounds."""
    rounds: list[dict[str, Artifact]] = field(default_factory=list)
    """Trajectories, scores, selection and checkpoint of each round, by stage."""
    tasks: Artifact | None = None
    """Tasks that the flow generated; None if the environment has its own."""
    reported: dict[str, float] = field(default_factory=dict)
    """Numbers that the recipe reports besides the evaluations, by name."""
    checkpoint: Artifact | None = None
    """Final policy; None if nothing was trained."""
    begin: int | None = None
    """Step at the start of the rounds; None: that of the first measured policy."""
    step: int = 0
    """Round after which the final policy was trained; 0: the start of the rounds."""
    stopped: str | None = None
    """Reason why early stopping ended the rounds."""
    pruned: str | None = None
    """Reason why the sweep pruned the run; a pruned run deploys nothing."""
    chosen: str | None = None
    """Reason for the choice of the final policy, with `deploy.policy: best`."""
    rejected: str | None = None
    """Reason why a person rejected the deployment."""
    export: Artifact | None = None
    """Exported model; None if nothing was exported."""
    validations: dict[str, Artifact] = field(default_factory=dict)
    """Likelihoods of held-out rows of imported data, by `before` and `after` the training on it."""
    answers: dict[str, Artifact] = field(default_factory=dict)
    """Answers to held-out prompts of imported data, with the same keys."""

    @property
    def last(self) -> Artifact:
        """Evaluation of the final policy."""
        return list(self.evaluations.values())[-1]

    @property
    def decisions(self) -> list[str]:
        """Messages on the decisions that were taken, after the numbers that the recipe reports."""
        texts = (self.stopped, self.pruned, self.chosen, self.rejected)
        numbers = [f"{name}: {value:.3f}" for name, value in self.reported.items()]
        return [*numbers, *(text for text in texts if text is not None)]

    @property
    def first_step(self) -> int:
        """Step at the start of the rounds."""
        if self.begin is not None:
            return self.begin
        return self.measured[0].step if self.measured else self.step

    @property
    def last_step(self) -> int:
        """Number of the last round."""
        return self.first_step + len(self.rounds)

    @property
    def training_rewards(self) -> dict[int, float | None]:
        """Mean training reward by round; None if unknown. Contains only rounds scored by the current reward models,
        because scores of different reward models are not comparable."""
        judged_since = max(self.reward_models, default=0)
        numbered = enumerate(self.rounds, self.first_step + 1)
        return {n: artifacts["judge"].metrics.get("reward") for n, artifacts in numbered if n > judged_since}
