"""Human feedback as a reward: ratings, or else comparisons (`trajectories.feedback`).

    reward = mean over authors of (score - 1) / 4                       if the episode was rated
           = win probability from all comparisons in its group          if it was only compared

By default the win probability is that of the Bradley-Terry model (Biometrika 39, 1952): the maximum-likelihood
strengths p_i with P(i beats j) = p_i / (p_i + p_j); the value is p_i / (p_i + 1), the probability of beating an average
episode. Each episode also has one draw against an average one, so that strengths stay finite. A tie is half a win for
both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from components.errors import Problem, ResourceError, SpecError
from components.specs.marks import FILES
from components.specs.registered import registered
from components.trajectories.feedback import Answer, PairChoice, Rating, content_digest, digest_of, read_all
from components.trajectories.schema import Failure, Score, Trajectory

Episode = tuple[str, str]
"""Id and content digest of a trajectory."""
Wins = Mapping[tuple[Episode, Episode], float]
"""Number of times the first episode was preferred to the second; ties count half."""

SHARES = {"a": (1.0, 0.0), "b": (0.0, 1.0), "tie": (0.5, 0.5)}


@registered("reward.human")
class Human:
    """Reward from human ratings and comparisons.

    Args:
        path: File of answers, or folder of such files: `ROOT/feedback`, or output of `flows.runs annotate --export`.
        choices: Value of comparisons: `bradley_terry`, or `share`, the share of its comparisons that an episode won.

    An episode without feedback is unscored. The components of a Score are `score`, `choice` and `authors`, the number
    of people who rated or compared it; their notes are its explanation.
    """

    def __init__(self, path: Annotated[str, FILES], choices: Literal["bradley_terry", "share"] = "bradley_terry"):
        self.choices = choices
        self._ratings: defaultdict[Episode, list[Rating]] = defaultdict(list)
        self._choices: defaultdict[Episode, list[PairChoice]] = defaultdict(list)
        for answer in _read(path):
            if isinstance(answer, Rating):
                self._ratings[answer.episode].append(answer)
            elif isinstance(answer, PairChoice):
                self._choices[answer.episode].append(answer)

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: the digest of the feedback in place of its path. Raises SpecError if the
        path holds no feedback."""
        return {**arguments, "path": digest_of(_read(arguments["path"]))}

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each trajectory, from the feedback on it and on its group."""
        episodes = [(trajectory.id, content_digest(trajectory)) for trajectory in group]
        choices = [
            choice for episode in episodes for choice in self._choices[episode] if choice.other_episode in episodes
        ]
        win_counts = wins(choices)
        values = bradley_terry(win_counts) if self.choices == "bradley_terry" else share_of_wins(win_counts)
        return [
            self._score(trajectory, episode, values.get(episode), choices)
            for trajectory, episode in zip(group, episodes, strict=True)
        ]

    def _score(
        self, trajectory: Trajectory, episode: Episode, choice_value: float | None, choices: Sequence[PairChoice]
    ) -> Score:
        ratings = self._ratings[episode]
        answers: list[Rating | PairChoice] = [
            *ratings,
            *(c for c in choices if episode in (c.episode, c.other_episode)),
        ]
        if not answers:
            return Score(
                trajectory.id, None, failure=Failure("people", "NotAnnotated", "nobody has scored or compared it")
            )
        parts: dict[str, float] = {}
        if choice_value is not None:
            parts["choice"] = choice_value
        if ratings:
            parts["score"] = sum(rating.value for rating in ratings) / len(ratings)
        reward = list(parts.values())[-1]
        notes = "\n".join(f"{answer.author}: {answer.note}" for answer in answers if answer.note)
        return Score(
            trajectory.id, reward, {**parts, "authors": float(len({a.author for a in answers}))}, explanation=notes
        )


def wins(choices: Sequence[PairChoice]) -> Wins:
    """Return for each ordered pair of compared episodes how often the first was preferred."""
    win_counts: defaultdict[tuple[Episode, Episode], float] = defaultdict(float)
    for choice in choices:
        a, b = choice.episode, choice.other_episode
        for pair, share in zip(((a, b), (b, a)), SHARES[choice.better], strict=True):
            win_counts[pair] += share
    return win_counts


def share_of_wins(win_counts: Wins) -> dict[Episode, float]:
    """Return wins divided by comparisons, for each compared episode."""
    return {episode: gained / (gained + lost) for episode, (gained, lost) in _totals(win_counts).items()}


def bradley_terry(win_counts: Wins, tolerance: float = 1e-10, most: int = 10_000) -> dict[Episode, float]:
    """Return p / (p + 1) of each compared episode, by the MM algorithm of Hunter (Annals of Statistics 32, 2004): p_i ←
    W_i / Σ_j n_ij / (p_i + p_j), with one draw against strength 1. most: maximum number of iterations."""
    totals = _totals(win_counts)
    games = {pair: count + win_counts.get(pair[::-1], 0.0) for pair, count in win_counts.items()}
    strength = dict.fromkeys(totals, 1.0)
    for _ in range(most):
        expected_games = {episode: 1 / (power + 1) for episode, power in strength.items()}
        for (episode, other), count in games.items():
            expected_games[episode] += count / (strength[episode] + strength[other])
        updated = {episode: (gained + 0.5) / expected_games[episode] for episode, (gained, _) in totals.items()}
        change = max((abs(updated[episode] - power) / power for episode, power in strength.items()), default=0.0)
        strength = updated
        if change < tolerance:
            break
    return {episode: power / (power + 1) for episode, power in strength.items()}


def _totals(win_counts: Wins) -> dict[Episode, tuple[float, float]]:
    """Return wins and losses of each episode."""
    totals: defaultdict[Episode, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (episode, other), count in win_counts.items():
        totals[episode][0] += count
        totals[other][1] += count
    return {episode: (gained, lost) for episode, (gained, lost) in totals.items()}


def _read(path: str) -> list[Answer]:
    try:
        return read_all(Path(path).expanduser())
    except ResourceError as error:
        raise SpecError([Problem("reward.path", str(error))]) from None
