"""Settings of the guards: their actions and thresholds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from components.specs import Spec

Action = Literal["off", "warn", "stop"]


class GuardsSpec(Spec):
    """Action of each guard (`off`, `warn` or `stop`), and the thresholds of drift."""

    no_signal: Literal["warn", "stop"] = "warn"
    """Action if a filter left nothing to train on: `warn` continues with an unchanged policy, `stop` ends the run."""
    reward_hacking: Action = "warn"
    """Action if training reward rose since the last held-out evaluation while held-out success fell: the 95 %
    confidence interval of the paired difference on the same scenarios is below zero. Needs `evaluate.every` above 0.
    Compares only rounds that the same reward models scored (`reward_model.every`)."""
    heldout_reward: Action = "warn"
    """The same as reward_hacking, for the held-out reward in place of success. Applies if evaluations use another
    reward than training: with `evaluate.reward`, or with `reward_model`."""
    length_drift: Action = "warn"
    """Action if, in each of the last two rounds, the mean number of sampled tokens per episode is more than
    `length_factor` times that of the first two rounds, or less than 1/`length_factor` of it, and success has not
    clearly risen."""
    length_factor: float = Field(2.0, gt=1)
    """Threshold of length_drift."""
    repetition_drift: Action = "warn"
    """Action if, in each of the last two rounds, the share of repeated 3-grams within messages is more than
    `repetition_rise` above that of the first two rounds, and success has not clearly risen."""
    repetition_rise: float = Field(0.2, gt=0, le=1)
    """Threshold of repetition_drift."""
    identical_answers: Action = "warn"
    """Action if, in each of the last two rounds, the share of pairs of episodes with the same text that did not both
    succeed is more than `identical_rise` above that of the first two rounds, within groups or between scenarios, and
    success has not clearly risen."""
    identical_rise: float = Field(0.3, gt=0, le=1)
    """Threshold of identical_answers."""
    ensemble_disagreement: Action = "warn"
    """Action if, in each of the last two rounds, the mean standard deviation of an ensemble's scores (the component
    `spread`) is more than `disagreement_factor` times that of the first two rounds that the same reward models
    scored."""
    disagreement_factor: float = Field(2.0, gt=1)
    """Threshold of ensemble_disagreement."""
    amplified_rewards: Action = "warn"
    """Action if `algorithm.scale` divides the advantages of at least a tenth of the groups by a standard deviation
    below `amplified_share` of the range of rewards in the run so far, so that tiny differences count like large ones
    (arXiv:2503.20783, section 3.1). Applies to policy gradients with `credit: episode` and without a KL penalty in
    token rewards."""
    amplified_share: float = Field(0.01, gt=0, lt=1)
    """Threshold of amplified_rewards."""
    judge_drift: Action = "off"
    """Action if the judge scores a fixed set of episodes differently from its first judgement: the mean score, the
    order within groups, or the share of unscored episodes changed (signed-rank tests over groups, together with a
    probability of a false alarm in the whole run of at most `drift_alpha`). The set is judged twice in the first round,
    and again in every other round, without cached answers."""
    anchors: int = Field(32, ge=1, le=500)
    """Number of scenarios of the first round whose episodes judge_drift judges again."""
    drift_alpha: float = Field(0.01, gt=0, lt=1)
    """Maximum probability of a false alarm of judge_drift in a run."""

    @field_validator(
        "reward_hacking",
        "heldout_reward",
        "length_drift",
        "repetition_drift",
        "identical_answers",
        "ensemble_disagreement",
        "amplified_rewards",
        "judge_drift",
        mode="before",
    )
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML parses a bare off as False


RULES: dict[str, tuple[str, ...]] = {
    "no_signal": ("filter",),
    "reward_hacking": ("judge", "evaluate"),
    "heldout_reward": ("judge", "evaluate"),
    "length_drift": ("collect",),
    "repetition_drift": ("collect",),
    "identical_answers": ("collect",),
    "ensemble_disagreement": ("judge",),
    "amplified_rewards": ("train",),
    "judge_drift": ("judge",),
}
"""Stages that each guard reads, by guard."""
DRIFTS = ("length_drift", "repetition_drift", "identical_answers", "ensemble_disagreement")
"""Guards that compare rounds with the first rounds."""
ADVICE = {
    "no_signal": "Increase the variance of rewards within groups (collect.temperature, collect.group_size, scenarios "
    "of medium difficulty, a reward with more levels), or choose another filter",
    "reward_hacking": "Compare the episodes of the two evaluations with those of high training reward, correct the "
    "reward, or train less",
    "heldout_reward": "Read the episodes of high training reward, correct the reward, or train less",
    "length_drift": "Measure the length bias of the reward (python -m flows.explain calibrate), penalize length, or "
    "train less",
    "repetition_drift": "Penalize repetition (reward=varied), or train less",
    "identical_answers": "Raise collect.temperature or the KL coefficient, or correct a reward that scores one answer "
    "high in all scenarios",
    "ensemble_disagreement": "Retrain the reward models on new episodes (reward_model.every), use a lower bound of "
    "their scores (combine=bound or min), or train less",
    "amplified_rewards": "Set algorithm.scale=none, or increase the weight of the term of the reward that causes the "
    "differences",
    "judge_drift": "Pin the version of the judge model, and compare its answers with those of the first round; rewards "
    "of earlier rounds are not comparable with those since",
}
"""Remedies that a guard's error message suggests, by guard."""
