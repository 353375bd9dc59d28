"""How a policy is evaluated, and how a judge is calibrated."""

from __future__ import annotations

from pydantic import Field, FiniteFloat

from components.specs import Spec, Target


class MarksSpec(Spec):
    """What is asked of a judge: of the first four measures at least so much, of the others at most, without their sign.
    None asks nothing. `components.evaluation.calibration` says what they measure."""

    auc: float | None = Field(None, ge=0, le=1)
    """At least: how often a good episode scores above a bad one."""
    spearman: float | None = Field(None, ge=-1, le=1)
    """At least: rank correlation with the truth."""
    spearman_within: float | None = Field(None, ge=-1, le=1)
    """At least: the same within groups, mean."""
    agreement: float | None = Field(None, ge=0, le=1)
    """At least: share of pairs of a group in the order of the truth."""
    length_bias: float | None = Field(None, ge=0, le=1)
    """At most: rank correlation with length, given the truth."""
    position_bias: float | None = Field(None, ge=0, le=1)
    """At most: rank correlation with the place shown."""
    noise: float | None = Field(None, ge=0)
    """At most: standard deviation over the judgements of an episode, mean."""
    unscored: float | None = Field(None, ge=0, le=1)
    """At most: share of the judgements."""
    cost_per_thousand: float | None = Field(None, ge=0)
    """At most: of judgements, in the currency of their prices."""

    def asked(self) -> dict[str, float]:
        """Those that are asked."""
        return self.model_dump(exclude_none=True)


class EvaluateSpec(Spec):
    split: str = "heldout"
    """Split of the environment that is measured; it shares no scenario with train."""
    scenarios: int | None = Field(None, ge=1)
    """How many, from the first on; None takes all."""
    every: int = Field(0, ge=0)
    """The policy is also evaluated after rounds `every`, 2 · `every` and so on; 0: only before and after the rounds."""
    reward: Target | None = None
    """Reward of the evaluations, on which no policy is trained: what a policy has learned only to please the declared
    reward, it does not rise by. None: the declared reward."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    concurrency: int = Field(64, ge=1)
    """Episodes in flight at once."""
    environments: int | None = Field(None, ge=1)
    """Most instances of the environment at once. None: one for each episode, or as many as the environment says."""
    max_failures: float = Field(0.1, ge=0)
    """Below 1: share of the episodes that may fail; from 1: how many."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one episode may take."""
    step_timeout: float | None = Field(None, gt=0)
    """Seconds that the environment may take for one step, or to reset. None: no limit but `timeout`."""
    retries: int = Field(2, ge=0)
    """How often an episode is played again whose environment was away."""


class CalibrateSpec(Spec):
    """How the declared reward is measured against the truth by `python -m flows.calibrate`. No run reads it."""

    truth: Target | None = None
    """Another reward whose scores are taken for true. None: the success that the environment states."""
    threshold: FiniteFloat | None = None
    """An episode is good whose truth is above this. None: the middle between the lowest and the highest truth."""
    scenarios: int = Field(32, ge=1)
    """Most scenarios of `evaluate.split` that are played, where no run is given."""
    group_size: int = Field(4, ge=1, le=10_000)
    """Episodes of each, sampled from the model as it is, as `collect` says."""
    solutions: bool | None = None
    """Whether the environment's own solution of each scenario is judged beside them. None: where there are any."""
    repeats: int = Field(2, ge=1)
    """How often each episode is judged: each time from another seed, where the reward has one, and each group in
    another order. From 2 on noise and bias by position can be told."""
    marks: MarksSpec = MarksSpec()
    """A judge that misses one of its marks is warned of, and with --strict ends the command with exit code 1."""
