"""What people say of episodes, as episodes to learn from, each with its score.

    scores        the episode as it was sampled; reward: mean over authors of (score - 1) / 4
    corrections   the conversation up to the message, and what the person wrote in its place; reward 1. It was not
                  sampled, so it has no tokens; only that last message is learned
    choices       both episodes, in a group of their own that stands aside of their scenario, so that they are compared
                  with each other and no other; rewards 1 and 0. A pair on which most authors agree, ties left out

Held-out episodes teach nothing: whoever learned from them could not be measured on them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from components.errors import Problem, SpecError
from components.trajectories.feedback import Answer, Choice, Correction, Rating, content_digest, corrects
from components.trajectories.groups import aside, by_scenario
from components.trajectories.parts import CORRECTION
from components.trajectories.schema import History, Scenario, Score, Trajectory

Learns = Literal["scores", "corrections", "choices"]
TRAIN = "train"
"""Split of the episodes that may be learned from."""
Taught = list[tuple[Trajectory, Score]]
_Episodes = Mapping[tuple[str, str], Trajectory]
"""By id and content."""


def taught(episodes: Iterable[Trajectory], answers: Sequence[Answer], learns: Sequence[Learns]) -> Taught:
    """What is learned from, those of a group next to each other. episodes: all that answers may be about. Raises
    SpecError for a correction of what the assistant did not say."""
    wanted = {one.trajectory for one in answers} | {one.other for one in answers if isinstance(one, Choice)}
    known = {(one.id, content_digest(one)): one for one in episodes if one.id in wanted and one.scenario.split == TRAIN}
    found: Taught = []
    if "scores" in learns:
        found += _scored(known, [one for one in answers if isinstance(one, Rating)])
    if "corrections" in learns:
        found += _corrected(known, [one for one in answers if isinstance(one, Correction)])
    if "choices" in learns:
        found += _chosen(known, [one for one in answers if isinstance(one, Choice)])
    scores = {one.id: score for one, score in found}
    return [(one, scores[one.id]) for group in by_scenario(one for one, _ in found).values() for one in group]


def _scored(known: _Episodes, ratings: Sequence[Rating]) -> Taught:
    said: defaultdict[tuple[str, str], list[Rating]] = defaultdict(list)
    for one in ratings:
        said[one.episode].append(one)
    found = []
    for number, (episode, own) in enumerate(sorted(said.items())):
        if episode in known and known[episode].failure is None:
            reward = sum(one.value for one in own) / len(own)
            found.append(_with_score(known[episode], f"score-{number}", reward, known[episode].scenario))
    return found


def _corrected(known: _Episodes, corrections: Sequence[Correction]) -> Taught:
    found = []
    for number, one in enumerate(sorted(corrections, key=lambda one: one.id)):
        if one.episode in known:
            shown = known[one.episode]
            if not corrects(one, shown):
                where = f"message {one.message} of history {one.history} of {shown.id!r}"
                raise SpecError([Problem("feedback.path", f"a correction of {where}, which is not the assistant's")])
            history = shown.histories[one.history]
            before = [replace(message, span=None, finish_reason=None) for message in history.messages[: one.message]]
            told = History([*before, one.corrected()], agent=history.agent)
            made = Trajectory(shown.id, shown.scenario, shown.sample, [told], tools=shown.tools, policy=CORRECTION)
            name = f"correction-{number}"
            found.append(_with_score(made, name, 1.0, aside(shown.scenario, name)))
    return found


def _chosen(known: _Episodes, choices: Sequence[Choice]) -> Taught:
    """Of each pair what most authors say."""
    votes: defaultdict[tuple[tuple[str, str], tuple[str, str]], Counter[str]] = defaultdict(Counter)
    for one in choices:
        if one.better != "tie":
            a, b = one.episode, one.other_episode
            better, worse = (a, b) if one.better == "a" else (b, a)
            pair = min(better, worse), max(better, worse)
            votes[pair]["first" if better == pair[0] else "second"] += 1
    found: Taught = []
    for number, (pair, count) in enumerate(sorted(votes.items())):
        if count["first"] == count["second"] or not all(one in known for one in pair):
            continue
        first, second = (known[one] for one in pair)
        if first.failure is None and second.failure is None:
            name = f"choice-{number}"
            scenario = aside(first.scenario, name)
            found += [
                _with_score(one, name, float(count[side] == max(count.values())), scenario)
                for side, one in (("first", first), ("second", second))
            ]
    return found


def _with_score(one: Trajectory, name: str, reward: float, scenario: Scenario) -> tuple[Trajectory, Score]:
    """Under an id of its own: an episode may be learned from in several ways, and another artifact may have one by the
    same id."""
    made = replace(one, id=f"{one.id}~{name}", scenario=scenario)
    return made, Score(made.id, reward, {"people": reward})
