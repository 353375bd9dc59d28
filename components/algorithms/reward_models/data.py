"""What a reward model reads and what it should say: places in token streams, and labels.

A reading is the last token of what is scored: of an episode, or of each of its turns. Of an episode with several
histories, a model of whole episodes reads the last history of the agent that began; turns are read in all of them, in
their order.

Labels have names. `overall` is the judged reward, for turns the step rewards; any other name is a component of the
score, for turn i the component `NAME/i` or else the episode's metric `NAME/i`, where continuations leave theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from components.algorithms.policy.packing import Pack, Sequence_, pack
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.schema import History, Score, Trajectory

OVERALL = "overall"


@dataclass(frozen=True)
class Stream:
    """Tokens that the model reads, and where."""

    token_ids: Sequence[int]
    """(T,)"""
    places: tuple[int, ...]
    """Indices in [0, T) of the tokens whose hidden states are scored."""


@dataclass(frozen=True)
class Episode:
    """What is scored."""

    trajectory: Trajectory
    streams: tuple[Stream, ...]

    @property
    def readings(self) -> int:
        return sum(len(one.places) for one in self.streams)

    @property
    def longest(self) -> int:
        """Tokens of its longest stream."""
        return max((len(one.token_ids) for one in self.streams), default=0)


def episode(chat: ChatFormat, trajectory: Trajectory, *, turns: bool) -> Episode:
    """The readings of an episode: of each turn, or the one of the whole. None of an episode without tokens or turns."""
    if not turns:
        agent = trajectory.histories[0].agent if trajectory.histories else ""
        own = [one for one in trajectory.histories if one.agent == agent]
        streams = [Stream(ids, (len(ids) - 1,)) for ids, _ in _spans(chat, own[-1], trajectory)[-1:]] if own else []
    else:
        found = [one for history in trajectory.histories for one in _spans(chat, history, trajectory)]
        streams = [Stream(ids, tuple(end - 1 for _, end in spans)) for ids, spans in found]
    return Episode(trajectory, tuple(one for one in streams if one.token_ids and one.places))


def _spans(
    chat: ChatFormat, history: History, trajectory: Trajectory
) -> list[tuple[Sequence[int], list[tuple[int, int]]]]:
    """The token streams of a history, each with [start, end) of its turns; a written one is laid out as a rollout
    would."""
    if history.token_ids:
        return [(history.token_ids, [one.span for one in history.messages if one.span is not None])]
    streams = chat.streams([to_openai(message) for message in history.messages], trajectory.tools)
    return [(one.token_ids, one.spans) for one in streams]


def packs(episodes: Sequence[Episode], most_tokens: int, *, padded: bool = False) -> list[tuple[torch.Tensor, Pack]]:
    """(number of each reading, pack): readings are counted over all episodes, in order.

    A pack computes the nodes that predict its targets; the target after a place makes that place such a node. Where
    the place is the last token, what comes after it is made up: targets are never read.
    """
    sequences: list[Sequence_] = []
    number = 0
    for stream in (stream for one in episodes for stream in one.streams):
        targets = [place + 1 for place in stream.places]
        sequences.append(Sequence_([*stream.token_ids, 0], targets, first=number))
        number += len(targets)
    return [(one.number_S, one) for one in pack(sequences, most_tokens, padded=padded)]


def value(trajectory: Trajectory, score: Score, head: str) -> float | None:
    """What a head should say of a whole episode; None where there is no such label."""
    found = trajectory.reward if head == OVERALL else score.components.get(head)
    return found if found is not None and math.isfinite(found) else None


def turn_values(trajectory: Trajectory, score: Score, head: str, turns: int) -> list[float] | None:
    """What a head should say of each turn, NaN where a turn has no label; None where no turn has one, or where labels
    and turns differ in number."""
    if head == OVERALL:
        labels = list(trajectory.step_rewards)
    else:
        given = trajectory.metrics | score.components
        numbered = {name: label for name, label in given.items() if name.rpartition("/")[0] == head}
        if not set(numbered) <= {f"{head}/{turn}" for turn in range(turns)}:
            return None
        labels = [numbered.get(f"{head}/{turn}", math.nan) for turn in range(turns)]
    known = [label if math.isfinite(label) else math.nan for label in labels]
    return known if len(known) == turns and not all(map(math.isnan, known)) else None
