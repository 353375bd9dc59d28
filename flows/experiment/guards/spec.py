"""Which guards there are, what each does when it strikes, and from where on it does."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from components.specs import Spec

Action = Literal["off", "warn", "stop"]


class GuardsSpec(Spec):
    no_signal: Literal["warn", "stop"] = "warn"
    """A filter left nothing to train on: `warn` goes on (the policy stays as it is), `stop` ends the run."""
    reward_hacking: Action = "warn"
    """Training reward rose since the last held-out evaluation while held-out success fell, by paired difference on the
    same scenarios with its whole 95 % interval below zero. Looked at where `evaluate.every` is above 0; only rounds
    that the same reward models judged are compared (`reward_model.every`)."""
    heldout_reward: Action = "warn"
    """The same of the reward of the evaluations in place of success. Looked at where that is another one than trains:
    with `evaluate.reward`, and with `reward_model`."""
    length_drift: Action = "warn"
    """In each of the last two rounds the mean sampled tokens of an episode are more than `length_factor` times those of
    the first two, or less than one `length_factor`'th, and success has not clearly risen with them."""
    length_factor: float = Field(2.0, gt=1)
    """See length_drift."""
    repetition_drift: Action = "warn"
    """In each of the last two rounds the share of repeated 3-grams within messages is more than `repetition_rise` above
    that of the first two, and success has not clearly risen."""
    repetition_rise: float = Field(0.2, gt=0, le=1)
    """See repetition_drift."""
    identical_answers: Action = "warn"
    """In each of the last two rounds the share of pairs of episodes that say the same and did not both succeed is more
    than `identical_rise` above that of the first two, within groups or between scenarios, and success has not clearly
    risen."""
    identical_rise: float = Field(0.3, gt=0, le=1)
    """See identical_answers."""
    ensemble_disagreement: Action = "warn"
    """In each of the last two rounds the mean standard deviation of an ensemble's scores (the component `spread`) is
    more than `disagreement_factor` times that of the first two that the same reward models judged."""
    disagreement_factor: float = Field(2.0, gt=1)
    """See ensemble_disagreement."""

    @field_validator(
        "reward_hacking",
        "heldout_reward",
        "length_drift",
        "repetition_drift",
        "identical_answers",
        "ensemble_disagreement",
        mode="before",
    )
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of a bare off


RULES: dict[str, tuple[str, ...]] = {
    "no_signal": ("filter",),
    "reward_hacking": ("judge", "evaluate"),
    "heldout_reward": ("judge", "evaluate"),
    "length_drift": ("collect",),
    "repetition_drift": ("collect",),
    "identical_answers": ("collect",),
    "ensemble_disagreement": ("judge",),
}
"""Every guard, and the stages that it looks at."""
DRIFTS = ("length_drift", "repetition_drift", "identical_answers", "ensemble_disagreement")
"""Guards that compare rounds with the first ones."""
ADVICE = {
    "no_signal": "Give the episodes more to differ in (collect.temperature, collect.group_size, scenarios that are "
    "neither too easy nor too hard, a reward with more shades), or choose another filter",
    "reward_hacking": "Compare the episodes of the two evaluations with those that the reward liked, mend the reward, "
    "or train less",
    "heldout_reward": "Read the episodes that the training reward likes, mend it, or train less",
    "length_drift": "Measure whether the reward likes length (python -m flows.calibrate), let it cost something, or "
    "train less",
    "repetition_drift": "Take something off for repetition (reward=varied), or train less",
    "identical_answers": "Raise collect.temperature or the weight of the KL, or mend a reward that one answer pleases "
    "everywhere",
    "ensemble_disagreement": "Train the reward models again on new episodes (reward_model.every), judge by the lower "
    "bound (combine=bound or min), or train less",
}
"""What to do, by guard."""
