"""Specs of the judge stage and of learned reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat

from components.specs import Spec


class JudgeSpec(Spec):
    concurrency: int = Field(16, ge=1)
    """Maximum number of concurrent judgements of a reward that waits (`async` or `blocking = True`). With a judge in
    batch mode, also the number of judgements gathered into one batch: set it to at least the number in a stage. The
    episodes of up to four times as many judgements are in memory."""
    ahead: bool = False
    """true: episodes of the rounds are judged while others are still played, a group as soon as all of its episodes
    have finished. Only for a reward that waits for a service. false: judging begins after the collection."""
    budget: float | None = Field(None, gt=0)
    """Maximum cost of the judges of one stage, in the currency of their prices. The run ends when it is spent. Finished
    judgements are stored, and the same command with a higher budget resumes. null is no limit."""

    def for_part(self, parts: int) -> JudgeSpec:
        """Return the settings of one of several equal parts of a stage, which share its budget equally."""
        return self if self.budget is None else self.model_copy(update={"budget": self.budget / parts})


class LearnedSpec(Spec):
    weight: FiniteFloat = 1.0
    """Weight of the learned reward."""
    task_weight: FiniteFloat = 0.0
    """Weight of the declared reward, which is added; with 0 it is not computed."""
    normalise: bool = False
    """Standardize the scores of each head with their mean and standard deviation on the training data."""
    combine: Literal["mean", "min", "bound"] = "mean"
    """Combination of several models: the mean, the lowest score, or the mean minus `deviations` standard deviations
    (`bound`)."""
    deviations: float = Field(1.0, ge=0)
    """Number of standard deviations that combine=bound subtracts."""
    cap: FiniteFloat | None = None
    """Upper bound of a score, per episode, or per turn for a process model; null is no limit."""
