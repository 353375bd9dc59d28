"""Forms of several answers to a prompt.

    preference    a chosen and a rejected answer, each text or messages
    ranking       answers from the best to the worst, or with their scores

The prompt of `preference` is a column of its own or implicit: the messages with which both conversations begin, the
turns of a transcript (`Human: ... Assistant: ...`), or the text with which both texts begin, up to the last line break
or space. A column `head` names what a preference compares, such as `helpful`: the head of a reward model learns it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from components.data.columns import RowColumns, parsed
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, Records, completion_messages, conversation, prompt_messages
from components.data.forms.writing import (
    labels,
    openai_messages,
    plain_or_messages,
    prompt_length,
    shared_length,
    single,
)
from components.data.messages import answer, context_only
from components.trajectories.groups import have_spread
from components.trajectories.schema import Message, Trajectory

_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def _read_preference(columns: RowColumns) -> DataExample:
    chosen, rejected = parsed(columns.need("chosen")), parsed(columns.need("rejected"))
    prompt = columns.get("prompt")
    better, worse = pair(prompt, chosen, rejected)
    scores = columns.number("score_chosen"), columns.number("score_rejected")
    rewards = (1.0, 0.0)
    if scores[0] is not None and scores[1] is not None and scores[0] > scores[1]:
        rewards = scores[0], scores[1]
    candidates = [conversation(better, rewards[0]), conversation(worse, rewards[1])]
    if head := columns.label("head"):
        for candidate, reward in zip(candidates, rewards, strict=True):
            candidate.components = {head: reward}
    return DataExample(candidates)


def pair(prompt: Any, chosen: Any, rejected: Any) -> tuple[list[Message], list[Message]]:
    """Return both conversations; only the messages in which they differ are trained. Raises RowProblem."""
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        better, worse = _transcripts(chosen, rejected)
    else:
        better, worse = _whole(prompt, chosen), _whole(prompt, rejected)
    shared = shared_length(better, worse)
    if shared == len(better) == len(worse):
        raise RowProblem("chosen and rejected are equal")
    return [*context_only(better[:shared]), *better[shared:]], [*context_only(worse[:shared]), *worse[shared:]]


def _whole(prompt: Any, completion: Any) -> list[Message]:
    """Return the conversation of an answer, which may contain its prompt."""
    messages = completion_messages(completion)
    if messages[0].role in ("system", "user"):
        return messages
    if prompt is None:
        raise RowProblem("there is no prompt: expected a column prompt, or conversations that begin with it")
    return [*prompt_messages(prompt), *messages]


def _transcripts(chosen: str, rejected: str) -> tuple[list[Message], list[Message]]:
    """Return two texts with an implicit prompt as conversations."""
    if all(_SPEAKER.match(text) for text in (chosen, rejected)):
        return _turns(chosen), _turns(rejected)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = chosen[: next((place for place, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))]
    cut = max(common.rfind("\n"), common.rfind(" ")) + 1
    if not common[:cut].strip():
        raise RowProblem("there is no prompt: chosen and rejected do not begin with the same words")
    prompt = common[:cut].rstrip()
    for text in (chosen, rejected):
        if not text[cut:].strip():
            raise RowProblem("an answer is empty after the common beginning of both texts", "empty")
    return (
        [Message("user", prompt), answer(chosen[cut:])],
        [Message("user", prompt), answer(rejected[cut:])],
    )


def _turns(text: str) -> list[Message]:
    _, *parts = _SPEAKER.split(text)
    return [
        Message("user", content.strip()) if speaker == "Human" else answer(content.strip())
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _write_preference(group: Sequence[Trajectory]) -> Records:
    candidates = list(single(group))
    if not have_spread(trajectory.reward or 0.0 for trajectory, _ in candidates):
        return
    best, chosen = max(candidates, key=lambda item: item[0].reward or 0.0)
    worst, rejected = min(candidates, key=lambda item: item[0].reward or 0.0)
    shared = shared_length(chosen, rejected)
    yield {
        **labels(best),
        "prompt": plain_or_messages(chosen[:shared], "user"),
        "chosen": openai_messages(chosen[shared:]),
        "rejected": openai_messages(rejected[shared:]),
        "score_chosen": best.reward,
        "score_rejected": worst.reward,
    }


PREFERENCE = Form(
    "preference",
    "a chosen and a rejected answer, with a prompt or an implicit one",
    {"chosen": ("chosen",), "rejected": ("rejected",)},
    _read_preference,
    _write_preference,
    {
        "prompt": ("prompt", "question", "instruction"),
        "score_chosen": ("score_chosen",),
        "score_rejected": ("score_rejected",),
        "head": ("head", "aspect", "dimension"),
    },
)


def _read_ranking(columns: RowColumns) -> DataExample:
    answers = columns.items("ranked")
    if len(answers) < 2:
        raise RowProblem("a ranked list needs at least two answers")
    if columns.source("ranked") == "completions" and columns.unread().keys() & {"labels", "step_labels"}:
        raise RowProblem("completions with labels are steps, not answers")
    if columns.get("scores") is not None:
        rewards = columns.numbers("scores")
    else:
        rewards = [1 - place / (len(answers) - 1) for place in range(len(answers))]
    if len(rewards) != len(answers):
        raise RowProblem(f"{len(rewards)} scores for {len(answers)} answers")
    prompt = columns.need("prompt")
    return DataExample(
        [
            conversation([*prompt_messages(prompt), *completion_messages(completion)], reward)
            for completion, reward in zip(answers, rewards, strict=True)
        ]
    )


def _write_ranking(group: Sequence[Trajectory]) -> Records:
    """Yield one row of a scenario's episodes, best first. Episodes of equal rewards rank nothing: they give no row."""
    episodes = sorted(single(group), key=lambda item: -(item[0].reward or 0.0))
    rewards = [trajectory.reward or 0.0 for trajectory, _ in episodes]
    if not have_spread(rewards):
        return
    best, messages = episodes[0]
    cut = min(prompt_length(messages), *(shared_length(messages, other) for _, other in episodes[1:]))
    ranked: list[Any] = [plain_or_messages(other[cut:], "assistant") for _, other in episodes]
    yield {
        **labels(best),
        "prompt": plain_or_messages(messages[:cut], "user"),
        "ranked": ranked,
        "scores": rewards,
    }


RANKING = Form(
    "ranking",
    "a prompt and a list of answers, best first or with scores",
    {
        "prompt": ("prompt", "question", "instruction"),
        "ranked": ("ranked", "ranking", "responses", "answers", "completions"),
    },
    _read_ranking,
    _write_ranking,
    {"scores": ("scores", "ratings")},
)
