"""Inputs and labels of a reward model: positions in token streams, and labels.

A reading is the score at the last token of an episode, or of each of its turns. For an episode with several histories,
a model of whole episodes reads the last history of the agent that began; turns are read in all histories, in their
order.

Labels have names. `overall` is the judged reward or, for turns, the step rewards. Any other name is a component of the
score or, for turn i, the component `NAME/i`, else the episode's metric `NAME/i`, in which continuations store their
labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from components.algorithms.policy.packing import Pack, TokenSequence, pack
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.roles import tools_of
from components.trajectories.schema import History, Score, Trajectory

OVERALL = "overall"


@dataclass(frozen=True)
class RewardStream:
    """Token stream that the model reads, with the positions that it scores."""

    token_ids: Sequence[int]
    """Token ids, (T,)."""
    places: tuple[int, ...]
    """Indices in [0, T) of the tokens whose hidden states are scored."""


@dataclass(frozen=True)
class RewardEpisode:
    """Unit that is scored: a trajectory with its token streams."""

    trajectory: Trajectory
    streams: tuple[RewardStream, ...]

    @property
    def readings(self) -> int:
        """Return the number of readings."""
        return sum(len(stream.places) for stream in self.streams)

    @property
    def longest(self) -> int:
        """Return the number of tokens of its longest stream."""
        return max((len(stream.token_ids) for stream in self.streams), default=0)


def episode(chat: ChatFormat, trajectory: Trajectory, *, turns: bool) -> RewardEpisode:
    """Return the episode with its readings: one per turn if `turns`, else one for the whole. An episode without tokens
    or turns has none."""
    if not turns:
        agent = trajectory.histories[0].agent if trajectory.histories else ""
        agent_histories = [history for history in trajectory.histories if history.agent == agent]
        streams = (
            [RewardStream(ids, (len(ids) - 1,)) for ids, _ in _spans(chat, agent_histories[-1], trajectory)[-1:]]
            if agent_histories
            else []
        )
    else:
        spans_by_stream = [
            stream_spans for history in trajectory.histories for stream_spans in _spans(chat, history, trajectory)
        ]
        streams = [RewardStream(ids, tuple(end - 1 for _, end in spans)) for ids, spans in spans_by_stream]
    return RewardEpisode(trajectory, tuple(stream for stream in streams if stream.token_ids and stream.places))


def _spans(
    chat: ChatFormat, history: History, trajectory: Trajectory
) -> list[tuple[Sequence[int], list[tuple[int, int]]]]:
    """Return the token streams of a history, each with the [start, end) spans of its turns. A written history is
    tokenized like a rollout."""
    if history.token_ids:
        return [(history.token_ids, [message.span for message in history.messages if message.span is not None])]
    streams = chat.streams([to_openai(message) for message in history.messages], tools_of(trajectory, history))
    return [(stream.token_ids, stream.spans) for stream in streams]


def packs(
    episodes: Sequence[RewardEpisode], most_tokens: int, *, padded: bool = False
) -> list[tuple[torch.Tensor, Pack]]:
    """Return (number of each reading, pack) for each pack; readings are numbered over all episodes, in order.

    A pack computes the nodes that predict its targets, so the target after a position makes that position such a node.
    If the position is the last token, its target is a dummy token: targets are never read.
    """
    sequences: list[TokenSequence] = []
    number = 0
    for stream in (stream for episode in episodes for stream in episode.streams):
        targets = [place + 1 for place in stream.places]
        sequences.append(TokenSequence([*stream.token_ids, 0], targets, first=number))
        number += len(targets)
    return [(packed.number_S, packed) for packed in pack(sequences, most_tokens, padded=padded)]


def value(trajectory: Trajectory, score: Score, head: str) -> float | None:
    """Return the label of a whole episode for a head; None if it has none."""
    label = trajectory.reward if head == OVERALL else score.components.get(head)
    return label if label is not None and math.isfinite(label) else None


def turn_values(trajectory: Trajectory, score: Score, head: str, turns: int) -> list[float] | None:
    """Return the label of each turn for a head, NaN for a turn without a label. Return None if no turn has a label, or
    if the numbers of labels and turns differ."""
    if head == OVERALL:
        labels = list(trajectory.step_rewards)
    else:
        named_values = trajectory.metrics | score.components
        numbered = {name: label for name, label in named_values.items() if name.rpartition("/")[0] == head}
        if not set(numbered) <= {f"{head}/{turn}" for turn in range(turns)}:
            return None
        labels = [numbered.get(f"{head}/{turn}", math.nan) for turn in range(turns)]
    finite_labels = [label if math.isfinite(label) else math.nan for label in labels]
    return finite_labels if len(finite_labels) == turns and not all(map(math.isnan, finite_labels)) else None
