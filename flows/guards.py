"""Guards of a run: what no single stage can see going wrong. Each warns, or ends the run with GuardStruck.

- `no_signal`: a filter left nothing to train on.
- `reward_hacking`: the training reward rises while held-out success falls: the policy learns to please the reward, not
  to solve the task.

A guard decides from artifacts alone and is in no stage key. So the same command gives the same verdict, and with the
rule changed to `warn` it goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import field_validator

from components.artifacts import Artifact
from components.errors import GuardStruck
from components.specs import Spec
from flows import selections
from flows.records import Notice
from flows.stopping import Measured

MOST_NAMED = 20
"""Scenarios that a message names."""

NO_SIGNAL_ADVICE = (
    "Give the episodes more to differ in (collect.temperature, collect.group_size, scenarios that are neither too easy "
    "nor too hard, a reward with more shades), or choose another filter"
)
HACKING_ADVICE = (
    "Compare the episodes of the two evaluations with those that the reward liked, mend the reward, or train less"
)


class GuardsSpec(Spec):
    no_signal: Literal["warn", "stop"] = "warn"
    """A filter left nothing to train on: `warn` goes on (the policy stays as it is), `stop` ends the run."""
    reward_hacking: Literal["off", "warn", "stop"] = "warn"
    """Training reward rose since the last held-out evaluation while held-out success fell, by paired difference on the
    same scenarios with its whole 95 % interval below zero. Looked at where `evaluate.every` is above 0; only rounds
    that the same reward models judged are compared (`reward_model.every`)."""

    @field_validator("reward_hacking", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of a bare off


def no_signal(label: str, metrics: Mapping[str, float]) -> str | None:
    """What there is to say of a filter with these metrics; None where it kept something, or is not known to have kept
    nothing. label: of the filter stage."""
    if metrics.get("kept") != 0:
        return None
    kept = f"{label} left nothing to train on: none of {metrics.get('dropped', 0):.0f} episodes was kept"
    return f"{kept} ({why})" if (why := selections.counted(selections.reasons(metrics))) else kept


def spans(steps: Sequence[int], rounds: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rounds before the second last of the evaluated steps (since the one before that), and the rounds since.

    Where there were none before, the first round since stands for them: its episodes are those of the policy that was
    evaluated.
    """
    *_, previous, now = steps
    since = [number for number in rounds if previous < number <= now]
    start = steps[-3] if len(steps) > 2 else None
    before = [number for number in rounds if start is not None and start < number <= previous]
    return (before, since) if before else (since[:1], since[1:])


def reward_hacking(
    before: Mapping[int, float], since: Mapping[int, float], difference: Mapping[str, Any], steps: tuple[int, int]
) -> str | None:
    """What there is to say where the mean training reward of the rounds `since` is above that of the rounds `before`
    (reward by round), while held-out success fell; None where one of them did not happen.

    difference: what `components.evaluation.metrics.paired_difference` says of the evaluations after these two steps.
    """
    if not rose(before, since) or difference["high"] is None or difference["high"] >= 0:
        return None
    lost = difference["regressed"]
    named = ", ".join(lost[:MOST_NAMED]) + (f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else "")
    return (
        f"training reward rose from {fmean(before.values()):.3f} ({_numbers(before)}) to {fmean(since.values()):.3f} "
        f"({_numbers(since)}), but held-out success fell from {difference['before']:.3f} (step {steps[0]}) to "
        f"{difference['after']:.3f} (step {steps[1]}): {difference['difference']:+.3f} "
        f"[{difference['low']:+.3f}, {difference['high']:+.3f}] on the same {difference['n']} scenarios. Lost: {named}"
    )


def rose(before: Mapping[int, float], since: Mapping[int, float]) -> bool:
    """Whether the mean of the second is above that of the first; False where one is empty."""
    return bool(before) and bool(since) and fmean(since.values()) > fmean(before.values())


class Guards:
    """The guards of one run. `tell` hears what they find, before a rule of `stop` raises GuardStruck."""

    def __init__(self, spec: GuardsSpec, tell: Callable[[Notice], None]):
        self.spec = spec
        self.tell = tell

    def filtered(self, label: str, step: int, selection: Artifact) -> None:
        """Looks at what a filter has left."""
        self._act("no_signal", step, no_signal(label, selection.metrics), NO_SIGNAL_ADVICE)

    def evaluated(self, measured: Sequence[Measured], rewards: Mapping[int, float | None]) -> None:
        """Looks at the last two of these evaluations. rewards: mean training reward by round; what is not known yet
        gives no verdict."""
        if self.spec.reward_hacking == "off" or len(measured) < 2:
            return
        previous, now = measured[-2:]
        rounds = spans([one.step for one in measured], sorted(rewards))
        before, since = ({n: value for n in part if (value := rewards[n]) is not None} for part in rounds)
        if (len(before), len(since)) != tuple(map(len, rounds)) or not rose(before, since):
            return
        difference = _difference(previous, now)
        if difference is not None:
            message = reward_hacking(before, since, difference, (previous.step, now.step))
            self._act("reward_hacking", now.step, message, HACKING_ADVICE)

    def _act(self, name: Literal["no_signal", "reward_hacking"], step: int, message: str | None, advice: str) -> None:
        if message is None:
            return
        self.tell(Notice(name, step, message))
        if getattr(self.spec, name) == "stop":
            raise GuardStruck(f"{message}. {advice}. What was finished is kept; guards.{name}=warn goes on from here")


def _difference(previous: Measured, now: Measured) -> dict[str, Any] | None:
    """The paired difference in success of two evaluations; None where no scenario has a finished episode in both."""
    from components.evaluation.metrics import paired_difference
    from components.trajectories.store import read_trajectories

    paths = [one.evaluation.path / "trajectories.parquet" for one in (previous, now)]
    if not all(path.is_file() for path in paths):  # a plan: not made yet, or not on this machine
        return None
    before, after = (list(read_trajectories(path)) for path in paths)
    try:
        return paired_difference(before, after)
    except ValueError:
        return None


def _numbers(rounds: Mapping[int, float]) -> str:
    first, last = min(rounds), max(rounds)
    return f"round {first}" if first == last else f"rounds {first} to {last}"
