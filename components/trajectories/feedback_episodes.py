"""Conversion of human feedback to training episodes with scores.

    scores        the sampled episode; reward: mean over authors of (score - 1) / 4
    corrections   the conversation up to the corrected message, and the correction; reward 1. It has no tokens, because
                  it was not sampled; only the last message is trained on
    choices       both episodes, in a separate group, so that they are compared with each other only; rewards 1 and 0
                  by majority of the authors. Pairs without a majority are skipped

Labels of steps become step rewards, for a process reward model (`labelled`).

Held-out episodes are excluded: training on them would invalidate evaluation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal

from components.specs import nearest
from components.trajectories.feedback import (
    Answer,
    Correction,
    MessageAnswer,
    PairChoice,
    Rating,
    StepLabel,
    content_digest,
)
from components.trajectories.groups import aside, by_scenario
from components.trajectories.parts import CORRECTION
from components.trajectories.schema import History, Scenario, Score, Trajectory

Learns = Literal["scores", "corrections", "choices"]
KINDS: dict[Learns, type[Answer]] = {"scores": Rating, "corrections": Correction, "choices": PairChoice}
TRAIN = "train"
"""Split of the episodes that may be trained on."""
ScoredEpisodes = list[tuple[Trajectory, Score]]
_Episodes = Mapping[tuple[str, str], Trajectory]
"""Episodes by trajectory id and content digest."""


def mismatch(answer: Answer, by_id: Mapping[str, Trajectory], where: str) -> str | None:
    """Return the reason why an answer does not fit the episodes of its artifact; None if it does. where: name of the
    artifact, for messages."""
    contents = [(answer.trajectory, answer.content)]
    if isinstance(answer, PairChoice):
        contents.append((answer.other, answer.other_content))
    for name, content in contents:
        if name not in by_id:
            close = nearest(name, by_id)
            return f"there is no episode {name!r} in {where}{f' (did you mean {close}?)' if close else ''}"
        if content != content_digest(by_id[name]):
            return f"episode {name!r} of {where} has a different content than the annotated one"
    episode = by_id[answer.trajectory]
    if isinstance(answer, PairChoice) and episode.group != by_id[answer.other].group:
        return f"{answer.trajectory!r} and {answer.other!r} are of different scenarios and cannot be compared"
    if isinstance(answer, MessageAnswer):
        histories = episode.histories
        messages = histories[answer.history].messages if answer.history < len(histories) else []
        if answer.message >= len(messages) or messages[answer.message].role != "assistant":
            return (
                f"message {answer.message} of history {answer.history} of {answer.trajectory!r} is not the assistant's"
            )
        if isinstance(answer, Correction):
            tools = {tool["function"]["name"] for tool in episode.tools}
            own = {call.name for call in messages[answer.message].tool_calls}  # a revised text keeps its calls
            if unknown := [call.name for call in answer.calls if call.name not in tools | own]:
                close = nearest(unknown[0], tools)
                text = f"the correction of {answer.trajectory!r} calls {unknown[0]!r}; the tools of the episode are "
                return f"{text}{', '.join(sorted(tools)) or 'none'}{f' (did you mean {close}?)' if close else ''}"
    return None


def of_kinds(answers: Iterable[Answer], learns: Sequence[Learns]) -> list[Answer]:
    """Return the answers of these kinds."""
    return [answer for answer in answers if isinstance(answer, tuple(KINDS[kind] for kind in learns))]


def taught(episodes: Iterable[Trajectory], answers: Sequence[Answer]) -> ScoredEpisodes:
    """Return the training episodes with their scores, grouped by scenario. episodes: candidates that answers refer
    to."""
    referenced = {answer.trajectory for answer in answers}
    referenced |= {answer.other for answer in answers if isinstance(answer, PairChoice)}
    by_content = {
        (trajectory.id, content_digest(trajectory)): trajectory
        for trajectory in episodes
        if trajectory.id in referenced and trajectory.scenario.split == TRAIN
    }
    pairs = [
        *_scored(by_content, [answer for answer in answers if isinstance(answer, Rating)]),
        *_corrected(by_content, [answer for answer in answers if isinstance(answer, Correction)]),
        *_chosen(by_content, [answer for answer in answers if isinstance(answer, PairChoice)]),
    ]
    scores = {trajectory.id: score for trajectory, score in pairs}
    groups = by_scenario(trajectory for trajectory, _ in pairs).values()
    return [(trajectory, scores[trajectory.id]) for group in groups for trajectory in group]


def labelled(episodes: Iterable[Trajectory], answers: Iterable[Answer]) -> Iterator[Trajectory]:
    """Yield each history of the training episodes up to the last of its first steps that all have a label, with the
    labels as step rewards: the mean over authors, 1 for good and 0 for bad."""
    votes: defaultdict[tuple[tuple[str, str], int, int], list[bool]] = defaultdict(list)
    for answer in answers:
        if isinstance(answer, StepLabel):
            votes[answer.episode, answer.history, answer.message].append(answer.good)
    for trajectory in episodes:
        if trajectory.scenario.split == TRAIN:
            episode = trajectory.id, content_digest(trajectory)
            for number, history in enumerate(trajectory.histories):
                steps = [index for index, message in enumerate(history.messages) if message.role == "assistant"]
                own = [(step, votes[episode, number, step]) for step in steps]
                first = list(takewhile(lambda step: step[1], own))
                if first:
                    labels = [sum(values) / len(values) for _, values in first]
                    messages = [replace(message, span=None) for message in history.messages[: first[-1][0] + 1]]
                    yield replace(
                        trajectory,
                        histories=[History(messages, agent=history.agent)],
                        step_rewards=labels,
                        reward=sum(labels),
                        failure=None,
                    )


def _scored(episodes: _Episodes, ratings: Sequence[Rating]) -> ScoredEpisodes:
    """Return the rated episodes with the mean score of their authors."""
    by_episode: defaultdict[tuple[str, str], list[Rating]] = defaultdict(list)
    for rating in ratings:
        by_episode[rating.episode].append(rating)
    pairs = []
    for number, (episode, own) in enumerate(sorted(by_episode.items())):
        if episode in episodes and episodes[episode].failure is None:
            reward = sum(rating.value for rating in own) / len(own)
            pairs.append(_with_score(episodes[episode], f"score-{number}", reward, episodes[episode].scenario))
    return pairs


def _corrected(episodes: _Episodes, corrections: Sequence[Correction]) -> ScoredEpisodes:
    """Return the corrected conversations."""
    pairs = []
    for number, correction in enumerate(sorted(corrections, key=lambda correction: correction.id)):
        if correction.episode in episodes:
            original = episodes[correction.episode]
            history = original.histories[correction.history]
            before = [
                replace(message, span=None, finish_reason=None) for message in history.messages[: correction.message]
            ]
            corrected = History([*before, correction.corrected()], agent=history.agent)
            trajectory = Trajectory(
                original.id, original.scenario, original.sample, [corrected], tools=original.tools, policy=CORRECTION
            )
            name = f"correction-{number}"
            pairs.append(_with_score(trajectory, name, 1.0, aside(original.scenario, name)))
    return pairs


def _chosen(episodes: _Episodes, choices: Sequence[PairChoice]) -> ScoredEpisodes:
    """Return both episodes of each pair with a majority of votes."""
    votes: defaultdict[tuple[tuple[str, str], tuple[str, str]], Counter[str]] = defaultdict(Counter)
    for choice in choices:
        if choice.better != "tie":
            a, b = choice.episode, choice.other_episode
            better, worse = (a, b) if choice.better == "a" else (b, a)
            pair = min(better, worse), max(better, worse)
            votes[pair]["first" if better == pair[0] else "second"] += 1
    pairs: ScoredEpisodes = []
    for number, (pair, count) in enumerate(sorted(votes.items())):
        if count["first"] == count["second"] or not all(episode in episodes for episode in pair):
            continue
        first, second = (episodes[episode] for episode in pair)
        if first.failure is None and second.failure is None:
            name = f"choice-{number}"
            scenario = aside(first.scenario, name)
            pairs += [
                _with_score(trajectory, name, float(count[side] == max(count.values())), scenario)
                for side, trajectory in (("first", first), ("second", second))
            ]
    return pairs


def _with_score(trajectory: Trajectory, name: str, reward: float, scenario: Scenario) -> tuple[Trajectory, Score]:
    """Return the trajectory under a new id, with its score. The id is new because an episode may be trained on in
    several ways, and another artifact may have the same id."""
    renamed = replace(trajectory, id=f"{trajectory.id}~{name}", scenario=scenario)
    return renamed, Score(renamed.id, reward, {"people": reward})
