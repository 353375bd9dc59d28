"""How a reward is asked, and how the scores of learned reward models become one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat

from components.specs import Spec


class JudgeSpec(Spec):
    concurrency: int = Field(16, ge=1)
    """Judgements under way at once, of a reward that waits: one that is `async` or says `blocking = True`. Where a
    judge is asked in batches, also how many come into one: then at least as many as a stage has. The episodes of four
    times as many are in memory."""
    budget: float | None = Field(None, gt=0)
    """Most that the judges of one stage may cost, in the currency of their prices. Where it is spent the run ends; what
    was judged is kept, and the same command with a higher budget goes on. None is no limit."""


class LearnedSpec(Spec):
    weight: FiniteFloat = 1.0
    """Of the learned reward."""
    task_weight: FiniteFloat = 0.0
    """Of the declared reward, which is added; 0 does not ask it."""
    normalise: bool = False
    """Scores of each head less their mean on the training data, over their standard deviation there."""
    combine: Literal["mean", "min", "bound"] = "mean"
    """Of several models: the mean, the lowest, or the mean less `deviations` standard deviations."""
    deviations: float = Field(1.0, ge=0)
    """See combine."""
    cap: FiniteFloat | None = None
    """Most that a score counts, of an episode or, by a process model, of a turn; null is no limit."""
