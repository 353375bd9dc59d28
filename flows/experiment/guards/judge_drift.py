"""Judge drift: a judgement of the anchors against the first judgement of the same episodes.

The judge has drifted if one of the tests of `components.evaluation.judge_drift` has a p-value of at most
alpha / (3 · K), K compared rounds with 3 tests each: the probability of a false alarm in the run is at most alpha. The
anchors are the same in every round, so a change of the policy does not change their scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from components.evaluation.judge_drift import TESTS, level


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
