"""Selection of the example episodes of a report, and their form in the templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from components.trajectories.schema import History, Message, Score, Trajectory

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

    If the last evaluation has no failed episode, earlier evaluations are searched, latest first.
    """
    if not evaluations:
        return []
    last = evaluations[-1]
    scores = {item.label: item.scores for item in evaluations}
    finished = [item for item in last.trajectories if item.failure is None]
    best_first = sorted(finished, key=lambda item: (-_reward(item), item.id))
    good = _varied(item for item in best_first if item.success)
    bad = _varied(item for item in reversed(best_first) if not item.success)
    kinds = [("good", "Solved", last.label, good), ("bad", "Not solved", last.label, bad)]
    for evaluation in reversed(evaluations):
        failed = _varied(item for item in evaluation.trajectories if item.failure is not None)
        if failed:
            kinds.append(("failed", "Failed to run", evaluation.label, failed))
            break
    return [
        {
            "kind": kind,
            "title": title,
            "label": label,
            "episodes": [view(item, scores[label].get(item.id)) for item in episodes],
        }
        for kind, title, label, episodes in kinds
        if episodes
    ]


def before_and_after(evaluations: Sequence[EvaluatedEpisodes]) -> dict[str, Any] | None:
    """Return both policies' episodes of one scenario that the first policy did not solve and the last one did."""
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    unsolved = {item.scenario.id: item for item in first.trajectories if item.failure is None and not item.success}
    solved = (item for item in last.trajectories if item.success and item.scenario.id in unsolved)
    # Prefer the hardest scenario, then the first policy's longest conversation.
    after = max(
        solved, key=lambda i: (i.scenario.difficulty, _length(unsolved[i.scenario.id]), i.scenario.id), default=None
    )
    if after is None:
        return None
    before = unsolved[after.scenario.id]
    return {
        "sides": [
            (first.label, view(before, first.scores.get(before.id))),
            (last.label, view(after, last.scores.get(after.id))),
        ],
        "scenario": after.scenario.id,
    }


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
        "cut": max(0, len(message.content) - MAX_TEXT),
        "calls": [{"name": call.name, "arguments": call.arguments[:MAX_TEXT]} for call in message.tool_calls],
        "answers": names.get(message.tool_call_id or "", ""),
        "tokens": None if message.span is None else message.span[1] - message.span[0],
        "ended": message.finish_reason == "length",
    }


def _varied(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the first `EACH` trajectories, preferring different task types."""
    ordered = list(trajectories)
    first_of_type = {item.scenario.type: item for item in reversed(ordered)}
    fresh = [item for item in ordered if first_of_type[item.scenario.type] is item]
    return (fresh + [item for item in ordered if first_of_type[item.scenario.type] is not item])[:EACH]


def _reward(trajectory: Trajectory) -> float:
    return trajectory.reward if trajectory.reward is not None else 0.0


def _length(trajectory: Trajectory) -> int:
    return sum(len(history.messages) for history in trajectory.histories)
