"""Episodes on pages: the selection of examples for a report, and their form in the templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from components.trajectories.schema import History, Message, Score, Trajectory
from components.trajectories.stored import episodes_of

EACH = 2
"""Number of examples of each kind."""
MAX_TEXT = 4000
"""Maximum number of characters shown per message."""
MAX_MESSAGES = 60
"""Maximum number of messages shown per episode."""


class EvaluatedEpisodes(Protocol):
    @property
    def label(self) -> str: ...
    @property
    def trajectories(self) -> Sequence[Trajectory]: ...
    @property
    def scores(self) -> Mapping[str, Score]: ...


def choose(evaluations: Sequence[EvaluatedEpisodes]) -> list[dict[str, Any]]:
    """Choose good, bad and failed episodes of the last evaluation, of different task types if possible.

    If the last evaluation has no failed episode, earlier evaluations are searched, latest first. Only the chosen
    episodes are read.
    """
    if not evaluations:
        return []
    last = evaluations[-1]
    columns = episodes_of(last.trajectories).columns
    names = columns.names
    rewards = [reward if reward == reward else 0.0 for reward in columns.reward_N.tolist()]
    finished = (~columns.failed_N).nonzero()[0].tolist()
    best_first = sorted(finished, key=lambda place: (-rewards[place], names[place]))
    solved = columns.success_N.tolist()
    good = _varied((place for place in best_first if solved[place]), columns.types)
    bad = _varied((place for place in reversed(best_first) if not solved[place]), columns.types)
    kinds = [("Solved", last, good), ("Not solved", last, bad)]
    for evaluation in reversed(evaluations):
        columns = episodes_of(evaluation.trajectories).columns
        failed = _varied(columns.failed_N.nonzero()[0].tolist(), columns.types)
        if failed:
            kinds.append(("Failed to run", evaluation, failed))
            break
    return [
        {
            "title": title,
            "label": evaluation.label,
            "episodes": [
                view(item, evaluation.scores.get(item.id)) for item in episodes_of(evaluation.trajectories).rows(places)
            ],
        }
        for title, evaluation, places in kinds
        if places
    ]


def before_and_after(evaluations: Sequence[EvaluatedEpisodes]) -> list[tuple[str, dict[str, Any]]]:
    """Return both policies' episodes, with their labels, of one scenario that the first policy did not solve and the
    last one did; empty without one."""
    if len(evaluations) < 2:
        return []
    first, last = evaluations[0], evaluations[-1]
    first_episodes, last_episodes = episodes_of(first.trajectories), episodes_of(last.trajectories)
    before, after = first_episodes.columns, last_episodes.columns
    open_N = ~before.failed_N & ~before.success_N
    unsolved = {name: place for place, name in enumerate(before.group_texts) if open_N[place]}
    names, difficulties = after.group_texts, after.difficulties
    solved = [place for place in after.success_N.nonzero()[0].tolist() if names[place] in unsolved]
    if not solved:
        return []
    # Prefer the hardest scenario, then the first policy's longest conversation.
    counts_N = first_episodes.message_counts_N()
    place = max(solved, key=lambda i: (difficulties[i], counts_N[unsolved[names[i]]], names[i]))
    sides = []
    for evaluation, episodes, row in ((first, first_episodes, unsolved[names[place]]), (last, last_episodes, place)):
        (episode,) = episodes.rows([row])
        sides.append((evaluation.label, view(episode, evaluation.scores.get(episode.id))))
    return sides


def view(trajectory: Trajectory, score: Score | None = None) -> dict[str, Any]:
    """Return an episode as the templates read it: plain text and numbers. score: the judge's score of it."""
    return {
        "trajectory": trajectory,
        "components": score.components if score and len(score.components) > 1 else {},
        "explanation": score.explanation[:MAX_TEXT] if score else "",
        "status": "failed" if trajectory.failure else "good" if trajectory.success else "bad",
        "turns": sum(m.role == "assistant" for history in trajectory.histories for m in history.messages),
        "sampled_tokens": sum(sum(history.sampled_mask()) for history in trajectory.histories),
        "histories": [_history(history, len(trajectory.histories) > 1) for history in trajectory.histories],
    }


def _history(history: History, several: bool) -> dict[str, Any]:
    shown = history.messages[:MAX_MESSAGES]
    names = {call.id: call.name for message in history.messages for call in message.tool_calls}
    return {
        "agent": history.agent if several else "",
        "messages": [_message(message, names) for message in shown],
        "left_out": len(history.messages) - len(shown),
    }


def _message(message: Message, names: dict[str, str]) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": message.content[:MAX_TEXT],
        "reasoning": (message.reasoning or "")[:MAX_TEXT],
        "cut": max(0, len(message.content) - MAX_TEXT),
        "calls": [{"name": call.name, "arguments": call.arguments[:MAX_TEXT]} for call in message.tool_calls],
        "answers": names.get(message.tool_call_id or "", ""),
        "tokens": None if message.span is None else message.span[1] - message.span[0],
        "ended": message.finish_reason == "length",
    }


def _varied(places: Iterable[int], types: Sequence[str]) -> list[int]:
    """Return the first `EACH` positions, preferring different task types. types: by position."""
    ordered = list(places)
    first_of_type = {types[place]: place for place in reversed(ordered)}
    fresh = [place for place in ordered if first_of_type[types[place]] == place]
    return (fresh + [place for place in ordered if first_of_type[types[place]] != place])[:EACH]
