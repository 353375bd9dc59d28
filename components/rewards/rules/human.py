"""What people said of an episode as a reward: their scores, or else their choices (`trajectories.feedback`).

    reward = mean over authors of (score - 1) / 4                       where somebody scored it
           = how often it wins, by all choices in its group             where it was only compared

How often it wins is by default that of the Bradley-Terry model (Biometrika 39, 1952): strengths p_i with
P(i beats j) = p_i / (p_i + p_j), which make the choices likeliest; the value is p_i / (p_i + 1), its chance against an
average episode. Each episode also draws once with an average one, so that one that always won has no infinite strength.
A tie is half a win for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from components.errors import Problem, ResourceError, SpecError
from components.specs.registered import registered
from components.trajectories.feedback import Answer, Choice, Rating, content_digest, digest_of, read_all
from components.trajectories.schema import Failure, Score, Trajectory

Episode = tuple[str, str]
"""Id and content of a trajectory."""
Wins = Mapping[tuple[Episode, Episode], float]
"""How often the first one was chosen before the second; ties count half."""

SHARES = {"a": (1.0, 0.0), "b": (0.0, 1.0), "tie": (0.5, 0.5)}


@registered("reward.human")
class Human:
    """Scores what people scored or compared.

    Args:
        path: File of answers, or folder of such files: `ROOT/feedback`, or what `flows.annotate --export` wrote.
        choices: How choices become a number: `bradley_terry`, or `share`, the share of its comparisons that it won.

    An episode of which nobody said anything is unscored. The components of a Score are `score`, `choice` and `authors`,
    how many people said something; the notes are its explanation.
    """

    def __init__(self, path: str, choices: Literal["bradley_terry", "share"] = "bradley_terry"):
        self.choices = choices
        self._ratings: defaultdict[Episode, list[Rating]] = defaultdict(list)
        self._choices: defaultdict[Episode, list[Choice]] = defaultdict(list)
        for answer in _read(path):
            if isinstance(answer, Rating):
                self._ratings[answer.episode].append(answer)
            elif isinstance(answer, Choice):
                self._choices[answer.episode].append(answer)

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """For stage keys: what stands in the files in place of where they are. Raises SpecError where that is no
        feedback."""
        return {**arguments, "path": digest_of(_read(arguments["path"]))}

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """One score for each trajectory, from what was said of it and of its group."""
        episodes = [(one.id, content_digest(one)) for one in group]
        made = [choice for one in episodes for choice in self._choices[one] if choice.other_episode in episodes]
        won = wins(made)
        values = bradley_terry(won) if self.choices == "bradley_terry" else share_of_wins(won)
        return [
            self._score(one, episode, values.get(episode), made) for one, episode in zip(group, episodes, strict=True)
        ]

    def _score(self, one: Trajectory, episode: Episode, chosen: float | None, made: Sequence[Choice]) -> Score:
        ratings = self._ratings[episode]
        said: list[Rating | Choice] = [*ratings, *(c for c in made if episode in (c.episode, c.other_episode))]
        if not said:
            return Score(one.id, None, failure=Failure("people", "NotAnnotated", "nobody has scored or compared it"))
        parts: dict[str, float] = {}
        if chosen is not None:
            parts["choice"] = chosen
        if ratings:
            parts["score"] = sum(rating.value for rating in ratings) / len(ratings)
        reward = list(parts.values())[-1]
        notes = "\n".join(f"{answer.author}: {answer.note}" for answer in said if answer.note)
        return Score(one.id, reward, {**parts, "authors": float(len({a.author for a in said}))}, explanation=notes)


def wins(choices: Sequence[Choice]) -> Wins:
    """Of every two episodes that were compared, how often each was chosen."""
    won: defaultdict[tuple[Episode, Episode], float] = defaultdict(float)
    for choice in choices:
        a, b = choice.episode, choice.other_episode
        for pair, share in zip(((a, b), (b, a)), SHARES[choice.better], strict=True):
            won[pair] += share
    return won


def share_of_wins(won: Wins) -> dict[Episode, float]:
    """Wins over comparisons, of each episode that was compared."""
    return {one: total / (total + lost) for one, (total, lost) in _totals(won).items()}


def bradley_terry(won: Wins, tolerance: float = 1e-10, most: int = 10_000) -> dict[Episode, float]:
    """p / (p + 1) of each episode that was compared, by the MM algorithm of Hunter (Annals of Statistics 32, 2004):
    p_i ← W_i / Σ_j n_ij / (p_i + p_j), with one draw against strength 1."""
    totals = _totals(won)
    games = {pair: count + won.get(pair[::-1], 0.0) for pair, count in won.items()}
    strength = dict.fromkeys(totals, 1.0)
    for _ in range(most):
        met = {one: 1 / (power + 1) for one, power in strength.items()}
        for (one, other), count in games.items():
            met[one] += count / (strength[one] + strength[other])
        after = {one: (total + 0.5) / met[one] for one, (total, _) in totals.items()}
        change = max((abs(after[one] - power) / power for one, power in strength.items()), default=0.0)
        strength = after
        if change < tolerance:
            break
    return {one: power / (power + 1) for one, power in strength.items()}


def _totals(won: Wins) -> dict[Episode, tuple[float, float]]:
    """Wins and losses of each."""
    found: defaultdict[Episode, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (one, other), count in won.items():
        found[one][0] += count
        found[other][1] += count
    return {one: (gained, lost) for one, (gained, lost) in found.items()}


def _read(path: str) -> list[Answer]:
    try:
        return read_all(Path(path).expanduser())
    except ResourceError as error:
        raise SpecError([Problem("reward.path", str(error))]) from None
