"""Agreement of annotators of the same episodes, with each other and with the judge."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from components.rewards.agreement import between, kappa, weighted_kappa
from components.trajectories.feedback import Answer, PairChoice, Rating
from flows.annotation.episodes import StageEpisodes


def agreement(episodes: StageEpisodes, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return measures of agreement as JSON data.

    `scores`: Krippendorff's alpha over all authors; for each pair of authors the number of episodes that both scored,
    quadratic-weighted kappa, and Spearman's correlation. `choices`: for each pair of authors the number of episode
    pairs that both compared, the share of equal choices, and Cohen's kappa. `judge`: the same measures of the mean
    score, scaled to 0 to 1, against the judge's reward; None without a judge.
    """
    by_author: dict[str, dict[str, float]] = {}
    for answer in answers:
        if isinstance(answer, Rating):
            by_author.setdefault(answer.author, {})[answer.trajectory] = float(answer.score)
    figures = between(by_author)
    scores: dict[str, Any] = {"authors": {name: len(ratings) for name, ratings in by_author.items()}}
    scores["alpha"] = figures.get("alpha")
    scores["pairs"] = [
        {
            "authors": [a, b],
            "episodes": int(figures[f"{a}_{b}/episodes"]),
            "weighted_kappa": _kappa_of_shared(by_author[a], by_author[b]),
            "spearman": figures.get(f"{a}_{b}/spearman"),
        }
        for a, b in combinations(by_author, 2)
    ]
    rewards = {name: score.reward for name, score in episodes.scores.items() if score.reward is not None}
    scaled: dict[str, list[float]] = {}
    for ratings in by_author.values():
        for name, value in ratings.items():
            scaled.setdefault(name, []).append((value - 1) / 4)
    people = {name: sum(values) / len(values) for name, values in scaled.items()}
    compared = between({"people": people, "judge": rewards}) if rewards else {}
    judge = {name.rpartition("/")[2]: value for name, value in compared.items() if "/" in name}
    return {"scores": scores, "choices": _choices(answers), "judge": judge or None}


def _kappa_of_shared(a: dict[str, float], b: dict[str, float]) -> float | None:
    shared = [name for name in a if name in b]
    return weighted_kappa([a[name] for name in shared], [b[name] for name in shared])


def _choices(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    by_author: dict[str, dict[tuple[str, str], str]] = {}
    for choice in answers:
        if isinstance(choice, PairChoice):
            swapped = choice.trajectory > choice.other
            better = {"a": "b", "b": "a"}.get(choice.better, "tie") if swapped else choice.better
            pair = min(choice.trajectory, choice.other), max(choice.trajectory, choice.other)
            by_author.setdefault(choice.author, {})[pair] = better
    rows = []
    for a, b in combinations(by_author, 2):
        shared = [pair for pair in by_author[a] if pair in by_author[b]]
        choices_a, choices_b = [by_author[a][pair] for pair in shared], [by_author[b][pair] for pair in shared]
        equal = sum(x == y for x, y in zip(choices_a, choices_b, strict=True)) / len(shared) if shared else None
        rows.append({"authors": [a, b], "pairs": len(shared), "equal": equal, "kappa": kappa(choices_a, choices_b)})
    return rows
