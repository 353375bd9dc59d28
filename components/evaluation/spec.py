"""Specs for the evaluation of a policy and the calibration of a judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from components.rollout.spec import PATIENCE, EpisodeLimits
from components.specs import FieldError, Spec, Target

SEQUENTIAL = ("stop", "alpha", "batch")
"""Settings of evaluations that stop when they are decided."""


class MarksSpec(Spec):
    """Required values of a judge's measures: minimum for the first four, maximum of the absolute value for the others.
    None: no requirement. `components.evaluation.calibration` defines the measures."""

    auc: float | None = Field(None, ge=0, le=1)
    """Minimum AUC: probability that a good episode scores above a bad one."""
    spearman: float | None = Field(None, ge=-1, le=1)
    """Minimum rank correlation with the truth."""
    spearman_within: float | None = Field(None, ge=-1, le=1)
    """Minimum rank correlation with the truth within groups, mean over groups."""
    agreement: float | None = Field(None, ge=0, le=1)
    """Minimum share of pairs within a group that are in the order of the truth."""
    length_bias: float | None = Field(None, ge=0, le=1)
    """Maximum rank correlation with length, given the truth."""
    position_bias: float | None = Field(None, ge=0, le=1)
    """Maximum rank correlation with the position shown."""
    noise: float | None = Field(None, ge=0)
    """Maximum standard deviation over the judgements of an episode, mean over episodes."""
    unscored: float | None = Field(None, ge=0, le=1)
    """Maximum share of judgements without a score."""
    cost_per_thousand: float | None = Field(None, ge=0)
    """Maximum cost per 1,000 judgements, in the currency of the prices."""

    def required(self) -> dict[str, float]:
        """Return the requirements that are not None, by measure."""
        return self.model_dump(exclude_none=True)


class EvaluateSpec(EpisodeLimits):
    """Evaluation of a policy: split, number of scenarios and limits."""

    split: str = "heldout"
    """Split of the environment to evaluate on; it shares no scenario with train."""
    scenarios: int | None = Field(None, ge=1)
    """Number of scenarios, from the first one; None: all."""
    every: int = Field(0, ge=0)
    """Interval of evaluations during training, in rounds; 0: only before and after the rounds."""
    reward: Target | None = None
    """Reward of the evaluations. No policy is trained on it, so it does not increase if a policy exploits the declared
    reward. None: the declared reward."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    samples: int = Field(1, ge=1)
    """Episodes per scenario, for pass@k and pass^k with k episodes. More than 1 needs a temperature above 0."""
    stop: Literal["never", "decided"] = "never"
    """`decided`: an evaluation in the rounds, or after them, ends when the interval of its paired difference in success
    to the policy at the start of the rounds excludes 0 (`components.evaluation.sequential`). `never`: it plays all
    scenarios."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Maximum probability that an evaluation with `stop=decided` decides without a difference, over all its looks."""
    batch: int = Field(32, ge=1)
    """Number of scenarios between two looks of an evaluation with `stop=decided`."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise FieldError(
                "samples",
                f"{self.samples}: greedy episodes of a scenario are equal (evaluate.temperature=0); expected 1, or "
                "evaluate.temperature=0.7",
            )
        return self

    @model_validator(mode="after")
    def _looks_have_a_use(self) -> Self:
        for name in ("alpha", "batch"):
            if self.stop == "never" and getattr(self, name) != type(self).model_fields[name].default:
                default = type(self).model_fields[name].default
                raise FieldError(
                    name,
                    f"{getattr(self, name):g}: only evaluations that stop early use it (evaluate.stop=never); expected "
                    f"{default:g}, or evaluate.stop=decided",
                )
        return self

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys. The stage adds the number of samples."""
        return self.declared(self.model_dump(mode="json", exclude=PATIENCE | {"every", "reward", "samples"}))

    def to_the_end(self) -> EvaluateSpec:
        """Return the settings of an evaluation that plays all scenarios."""
        return self.model_copy(update={name: type(self).model_fields[name].default for name in SEQUENTIAL})

    @staticmethod
    def declared(data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of a spec without the settings of evaluations that stop, unless it is one."""
        return {name: value for name, value in data.items() if name not in SEQUENTIAL or data["stop"] == "decided"}


class CalibrateSpec(Spec):
    """Settings of `flows.explain calibrate`, which compares the declared reward with the truth. Runs ignore it."""

    truth: Target | None = None
    """Reward whose scores are the truth. None: the success that the environment reports."""
    threshold: FiniteFloat | None = None
    """Truth above which an episode is good. None: the midpoint between the lowest and the highest truth."""
    scenarios: int = Field(32, ge=1)
    """Maximum number of scenarios of `evaluate.split` to play if no run is given."""
    group_size: int = Field(4, ge=1, le=10_000)
    """Episodes per scenario, sampled from the configured model with the settings of `collect`."""
    solutions: bool | None = None
    """True: also judge the environment's own solution of each scenario. None: if the environment has solutions."""
    repeats: int = Field(2, ge=1)
    """Number of judgements per episode, each with another seed (if the reward has one) and another order of the group.
    Noise and position bias need at least 2."""
    marks: MarksSpec = MarksSpec()
    """Requirements. An unmet one causes a warning and, with --strict, exit code 1."""
