"""How far the people who read the same episodes agree, with each other and with the judge."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from components.rewards.agreement import between, kappa, weighted_kappa
from components.trajectories.feedback import Answer, Choice, Rating
from flows.annotation.episodes import Episodes


def agreement(episodes: Episodes, answers: Sequence[Answer]) -> dict[str, Any]:
    """`scores`: Krippendorff's alpha of all authors, and of every two of them how many episodes both scored,
    quadratic-weighted kappa, and Spearman's correlation. `choices`: of every two authors how many pairs both compared,
    the share of equal choices, and Cohen's kappa. `judge`: figures of the mean score against the judge's reward.
    """
    by_author: dict[str, dict[str, float]] = {}
    for one in answers:
        if isinstance(one, Rating):
            by_author.setdefault(one.author, {})[one.trajectory] = float(one.score)
    figures = between(by_author)
    scores: dict[str, Any] = {"authors": {name: len(said) for name, said in by_author.items()}}
    scores["alpha"] = figures.get("alpha")
    scores["pairs"] = [
        {
            "authors": [one, other],
            "episodes": int(figures[f"{one}_{other}/episodes"]),
            "weighted_kappa": _both(by_author[one], by_author[other]),
            "spearman": figures.get(f"{one}_{other}/spearman"),
        }
        for one, other in combinations(by_author, 2)
    ]
    judged = {name: one.reward for name, one in episodes.scores.items() if one.reward is not None}
    said: dict[str, list[float]] = {}
    for own in by_author.values():
        for name, value in own.items():
            said.setdefault(name, []).append((value - 1) / 4)
    people = {name: sum(values) / len(values) for name, values in said.items()}
    compared = between({"people": people, "judge": judged}) if judged else {}
    judge = {name.rpartition("/")[2]: value for name, value in compared.items() if "/" in name}
    return {"scores": scores, "choices": _choices(answers), "judge": judge or None}


def _both(one: dict[str, float], other: dict[str, float]) -> float | None:
    shared = [name for name in one if name in other]
    return weighted_kappa([one[name] for name in shared], [other[name] for name in shared])


def _choices(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    by_author: dict[str, dict[tuple[str, str], str]] = {}
    for one in answers:
        if isinstance(one, Choice):
            swapped = one.trajectory > one.other
            better = {"a": "b", "b": "a"}.get(one.better, "tie") if swapped else one.better
            by_author.setdefault(one.author, {})[min(one.trajectory, one.other), max(one.trajectory, one.other)] = (
                better
            )
    found = []
    for a, b in combinations(by_author, 2):
        shared = [pair for pair in by_author[a] if pair in by_author[b]]
        ours, theirs = [by_author[a][pair] for pair in shared], [by_author[b][pair] for pair in shared]
        equal = sum(x == y for x, y in zip(ours, theirs, strict=True)) / len(shared) if shared else None
        found.append({"authors": [a, b], "pairs": len(shared), "equal": equal, "kappa": kappa(ours, theirs)})
    return found
