"""The built-in filters written row by row, as their documentation defines them: the reference for those on columns."""

from __future__ import annotations

import hashlib
import math

from components.trajectories.schema import Selection


def rewards(group):
    return [row.reward for row in group if row.reward is not None]


def decisions(group, rule):
    """Selections of a group. `rule` gives the reason of a scored episode, None to keep it."""
    chosen = []
    for row in group:
        if row.reward is None:
            chosen.append(Selection(row.id, False, "unscored" if row.failure is None else "failed"))
        else:
            reason = rule(row)
            chosen.append(Selection(row.id, reason is None, reason or "kept"))
    return chosen


def everything(groups):
    return [decisions(group, lambda row: None) for group in groups]


def successful(groups):
    return [decisions(group, lambda row: None if row.success else "no_success") for group in groups]


def without(groups, names):
    return [decisions(group, lambda row: "left_out" if row.group in names else None) for group in groups]


def among(groups, name, kept):
    return [
        decisions(group, lambda row: None if getattr(row.scenario, name) in kept else f"other_{name}")
        for group in groups
    ]


def signal(groups, tolerance=1e-9):
    chosen = []
    for group in groups:
        values = rewards(group)
        spread = len(values) > 1 and not math.isclose(min(values), max(values), rel_tol=tolerance)
        chosen.append(decisions(group, lambda row, spread=spread: None if spread else "no_spread"))
    return chosen


def best(groups, count, reason="not_among_best"):
    """count: of a group, or a function of the number of its scored episodes."""
    chosen = []
    for group in groups:
        most = count(len(rewards(group))) if callable(count) else count
        ordered = sorted((row for row in group if row.reward is not None), key=lambda row: -row.reward)
        ids = {row.id for row in ordered[:most]}
        chosen.append(decisions(group, lambda row, ids=ids: None if row.id in ids else reason))
    return chosen


def share(total, part):
    return math.ceil(round(part * total, 9))


def top(groups, part):
    def order(row):
        digest = hashlib.blake2b(row.id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return -row.reward, int.from_bytes(digest)

    ordered = sorted(order(row) for group in groups for row in group if row.reward is not None)
    last = ordered[share(len(ordered), part) - 1] if ordered else None
    return [decisions(group, lambda row: None if order(row) <= last else "below_top_share") for group in groups]


def percentile(values, which):
    position = which * (len(values) - 1) / 100
    below = int(position)
    fraction = position - below
    if not fraction or values[below] == values[below + 1]:
        return values[below]
    return values[below] * (1 - fraction) + values[below + 1] * fraction


def percentiles(groups, lowest, highest, of):
    together = sorted(value for group in groups for value in rewards(group))
    chosen = []
    for group in groups:
        values = sorted(rewards(group)) if of == "group" else together
        low, high = (percentile(values, which) if values else 0.0 for which in (lowest, highest))

        def rule(row, low=low, high=high):
            return "below_percentile" if row.reward < low else "above_percentile" if row.reward > high else None

        chosen.append(decisions(group, rule))
    return chosen


def between(groups, name, minimum=-math.inf, maximum=math.inf):
    def rule(row):
        value = row.reward if name == "reward" else row.metrics.get(name, row.outcome.get(name))
        if not isinstance(value, int | float) or math.isnan(value):
            return f"{name}_unknown"
        return f"{name}_below_minimum" if value < minimum else f"{name}_above_maximum" if value > maximum else None

    return [decisions(group, rule) for group in groups]
