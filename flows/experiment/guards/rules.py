"""Rules on the result of a filter, on two evaluations and the rounds between them, and on judgements of the anchors.

The judge has drifted if one of the tests of `components.evaluation.judge_drift` has a p-value of at most
alpha / (3 · K), K compared rounds with 3 tests each: the probability of a false alarm in the run is at most alpha. The
anchors are the same in every round, so a change of the policy does not change their scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from components.evaluation.judge_drift import TESTS, level
from flows.stages import selections

MOST_NAMED = 20
"""Maximum number of scenarios that a message lists."""


def no_signal(label: str, metrics: Mapping[str, float]) -> str | None:
    """Return a message if a filter kept no episode, according to its metrics; else None. label: of the filter stage."""
    if metrics.get("kept") != 0:
        return None
    message = f"{label} left nothing to train on: none of {metrics.get('dropped', 0):.0f} episodes was kept"
    return f"{message} ({counts})" if (counts := selections.counted(selections.reasons(metrics))) else message


def amplified_rewards(label: str, divisor: float, reward_range: float, share: float) -> str | None:
    """Return a message if advantages are divided by a standard deviation below this share of the range of rewards; else
    None (the difficulty bias of Dr. GRPO, arXiv:2503.20783, section 3.1).

    label: of the train stage. divisor: standard deviation that at least a tenth of its groups do not exceed.
    reward_range: range of the rewards of the run so far."""
    if divisor >= share * reward_range:
        return None
    return (
        f"{label} divides the advantages of at least a tenth of its groups by a standard deviation of at most "
        f"{divisor:.2g}, which is {divisor / reward_range:.2g} of the range of rewards in this run "
        f"({reward_range:.3g}): tiny differences count as much as those between failure and success "
        "(arXiv:2503.20783). With algorithm.scale=none they stay tiny; if they are meant to count, increase their "
        "weight in the reward"
    )


def spans(steps: Sequence[int], rounds: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the rounds between the third last and the second last evaluated step, and the rounds since the latter.

    If there are none before, the first round since stands in for them: its episodes come from the policy that was
    evaluated.
    """
    *_, previous, latest = steps
    since = [number for number in rounds if previous < number <= latest]
    start = steps[-3] if len(steps) > 2 else None
    before = [number for number in rounds if start is not None and start < number <= previous]
    return (before, since) if before else (since[:1], since[1:])


def reward_hacking(
    before: Mapping[int, float],
    since: Mapping[int, float],
    difference: Mapping[str, Any],
    steps: tuple[int, int],
    measure: str = "success",
) -> str | None:
    """Return a message if the mean training reward rose from the rounds `before` to the rounds `since` (reward by
    round), while held-out success, or the metric `what`, fell; else None.

    difference: result of `components.evaluation.metrics.paired_difference` for the evaluations after the two `steps`.
    """
    if not rose(before, since) or difference["high"] is None or difference["high"] >= 0:
        return None
    lost = difference["regressed"]
    listed = ", ".join(lost[:MOST_NAMED]) + (f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else "")
    return (
        f"training reward rose from {fmean(before.values()):.3f} ({numbers(before)}) to {fmean(since.values()):.3f} "
        f"({numbers(since)}), but held-out {measure} fell from {difference['before']:.3f} (step {steps[0]}) to "
        f"{difference['after']:.3f} (step {steps[1]}): {difference['difference']:+.3f} "
        f"[{difference['low']:+.3f}, {difference['high']:+.3f}] on the same {difference['n']} scenarios. Lost: {listed}"
    )


def rose(before: Mapping[int, float], since: Mapping[int, float]) -> bool:
    """Return True if the mean of `since` is above that of `before`; False if one is empty."""
    return bool(before) and bool(since) and fmean(since.values()) > fmean(before.values())


def numbers(rounds: Mapping[int, float] | Sequence[int]) -> str:
    """Return a range of rounds as text, such as `round 3` or `rounds 3 to 4`."""
    first, last = min(rounds), max(rounds)
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def judge_drift_message(
    drift: Mapping[str, float], *, alpha: float, rounds: int, rewards: tuple[float, float] | None = None
) -> str | None:
    """Return a message on a judge that has drifted, else None. drift: metrics of `compare_judgements`; empty if they
    are not known. rounds: number of compared rounds. rewards: mean training reward of the first round and of this
    one."""
    limit = level(alpha, rounds)
    changes = list(_changes(drift, limit))
    if not changes:
        return None
    text = (
        f"the judge drifted: on the same episodes of {drift['groups']:.0f} scenarios as at its first judgement, "
        f"{', '.join(changes)}; limit p = {limit:.2g} (drift_alpha={alpha:g} over {TESTS * rounds} tests)"
    )
    if rewards is not None and "shift" in drift:
        change = rewards[1] - rewards[0]
        text += (
            f". The training reward changed by {change:+.3f} since then, of which {drift['shift']:+.3f} is the judge's "
            f"shift and about {change - drift['shift']:+.3f} the policy"
        )
    return text


def _changes(drift: Mapping[str, float], limit: float) -> Iterator[str]:
    if drift.get("shift_p", 1.0) <= limit:
        interval = f" [{drift['shift_low']:+.3f}, {drift['shift_high']:+.3f}]" if "shift_low" in drift else ""
        yield f"its mean score shifted by {drift['shift']:+.3f}{interval} (p = {drift['shift_p']:.2g})"
    if drift.get("flips_p", 1.0) <= limit:
        yield (
            f"the order of {drift['flips']:.1%} of the pairs within groups changed, of {drift['flips_control']:.1%} at "
            f"an immediate repetition (p = {drift['flips_p']:.2g})"
        )
    if drift.get("unscored_p", 1.0) <= limit:
        yield (
            f"the share of unscored episodes rose from {drift['unscored_first']:.1%} to {drift['unscored']:.1%} "
            f"(p = {drift['unscored_p']:.2g})"
        )
