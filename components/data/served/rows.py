"""Rows to train on: the answers and conversations of a served policy that its users judged.

    score of an answer          the conversation up to it; only this answer is trained on
    score of a conversation     all recorded answers of the conversation
    better_than                 two answers to one prompt, with rewards 1 and 0
    correction                  the conversation up to the answer, and the corrected one, with reward 1

`split` of the source selects kinds (`KINDS`). A later score, choice or correction of the same answers replaces the
earlier one. Rows have the sampled tokens, unless an answer was recorded without: then the messages are tokenized by the
training. The conversations with feedback are in memory at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from components.data.examples import Candidate
from components.data.served.log import Line, files, locked, read
from components.data.spec import SourceSpec
from components.errors import ResourceError
from components.inference.protocol import ChatCompletion
from components.trajectories.convert import to_message
from components.trajectories.recorder import Recorder
from components.trajectories.schema import History, Message, ToolCall

KINDS = {"scores": "score", "corrections": "correction", "choices": "better_than"}
"""Fields of feedback that is trained on, by its kind."""


@dataclass(frozen=True)
class ServedSource:
    """Folder of recorded conversations, read up to a time."""

    folder: Path
    until: float
    fields: frozenset[str]
    """Fields of the feedback that is read."""

    @classmethod
    def of(cls, spec: SourceSpec) -> ServedSource | None:
        """Return the source that `path` names, `FOLDER` or `FOLDER@TIME`, with the kinds of feedback that `split`
        names; None for other data. Raises ResourceError for an invalid time, and for an unknown kind."""
        if not isinstance(spec.path, str) or "://" in spec.path:
            return None
        folder, until = Path(spec.path).expanduser(), ""
        if not folder.is_dir():
            name, _, until = spec.path.rpartition("@")
            folder = Path(name or spec.path).expanduser()
        if not folder.is_dir() or not files(folder):
            return None
        kinds = list(KINDS) if spec.split is None else spec.split.split("+")
        if not set(kinds) <= KINDS.keys():
            raise ResourceError(f"split = {spec.split}: expected some of {', '.join(KINDS)}, joined by +")
        fields = frozenset(KINDS[kind] for kind in kinds)
        try:
            return cls(folder.absolute(), datetime.fromisoformat(until).timestamp() if until else math.inf, fields)
        except ValueError:
            text = f"{spec.path}: {until!r} is no time; expected FOLDER@2026-11-28T12:00:00+00:00"
            raise ResourceError(text) from None

    def until_now(self) -> ServedSource:
        """Return the source up to now, if it has no time. Lines that are written later are later."""
        if self.until < math.inf:
            return self
        with locked(self.folder):
            return replace(self, until=time.time())

    @property
    def path(self) -> str:
        """The source as `path`."""
        if math.isinf(self.until):
            return str(self.folder)
        return f"{self.folder}@{datetime.fromtimestamp(self.until).astimezone().isoformat()}"

    def kinds(self) -> list[str]:
        """Return the kinds of feedback that there are rows of."""
        return [kind for kind, name in KINDS.items() if any(replace(self, fields=frozenset([name])).rows())]

    def digest(self) -> str:
        """Return the digest of the rows."""
        whole = hashlib.sha256()
        for row in self.rows():
            whole.update(json.dumps(row, default=asdict, sort_keys=True).encode())
        return whole.hexdigest()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows: those of answers to one prompt after each other."""
        feedback = [line for line in standing(read(self.folder, self.until)) if self.fields & line.keys()]
        wanted = {line["conversation"] for line in feedback}
        if compared := {line["better_than"] for line in feedback if "better_than" in line}:
            wanted |= {line["conversation"] for line in read(self.folder, self.until) if line.get("id") in compared}
        talks = defaultdict[str, list[_Answer]](list)
        by_id: dict[str | None, _Answer] = {}
        for line in read(self.folder, self.until):
            if "id" in line and line["conversation"] in wanted:
                by_id[line["id"]] = answer = _Answer.of(line, by_id.get(line["parent"]))
                talks[line["conversation"]].append(answer)

        def group(line: Line) -> str:
            answer = by_id.get(line.get("answer"))
            return line["conversation"] if answer is None else answer.prompt

        for line in sorted(feedback, key=group):
            asked = talks[line["conversation"]] if line.get("answer") is None else [by_id.get(line["answer"])]
            answers = [answer for answer in asked if answer is not None]
            if not answers:
                continue
            row = {"conversation": line["conversation"], "tools": answers[-1].tools}
            row |= {"prompt": answers[0].prompt} if line.get("answer") is not None else {}
            if "score" in line:
                yield row | {"candidates": [_candidate(answers, line["score"])]}
            if "better_than" in line and (worse := by_id.get(line["better_than"])) is not None:
                pair = [_candidate(answers, 1.0), _candidate([worse], 0.0)]
                if not all(candidate.tokenizer for candidate in pair):
                    for candidate in pair:
                        candidate.drop_tokens()
                yield row | {"candidates": pair}
            if "correction" in line:
                yield row | {"candidates": [_corrected(answers[0], line["correction"])]}


def standing(lines: Iterator[Line]) -> list[Line]:
    """Return the last feedback of each kind on each subject, one kind a line, in order of time."""
    last: dict[Any, Line] = {}
    # Feedback on a conversation is in the file of its last answer, and those of several servers overlap in time.
    for line in sorted((line for line in lines if "feedback" in line), key=lambda line: line["time"]):
        for field in [field for field in KINDS.values() if field in line]:
            subject = line.get("answer") or ("conversation", line["conversation"])
            key = (field, frozenset((subject, line["better_than"])) if field == "better_than" else subject)
            last.pop(key, None)
            last[key] = {name: value for name, value in line.items() if name == field or name not in KINDS.values()}
    return list(last.values())


@dataclass(frozen=True)
class _Answer:
    """A recorded answer with its whole prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    completion: ChatCompletion
    prompt: str
    tokenizer: str

    @classmethod
    def of(cls, line: Line, parent: _Answer | None) -> _Answer:
        messages, tools, tokens = line["messages"], line.get("tools", []), line["prompt_token_ids"]
        if parent is not None:
            messages, tools = [*parent.messages, parent.completion.message, *messages], parent.tools
            before = [*parent.completion.prompt_token_ids, *parent.completion.token_ids]
            tokens = [*before[: line["shared"]], *tokens]
        completion = ChatCompletion(
            line["message"],
            line["finish_reason"],
            tokens,
            line["token_ids"],
            [math.nan if logprob is None else logprob for logprob in line["logprobs"]],
            line["version"],
            altered=line["altered"],
        )
        return cls(messages, tools, completion, line["prompt"], line["tokenizer"])


def _candidate(answers: Sequence[_Answer], reward: float) -> Candidate:
    """Return the conversation of answers, which alone are trained on: with tokens, if all answers have them."""
    recorder = Recorder()
    for answer in answers:
        recorder.record(answer.messages, answer.completion)
    candidate = Candidate(recorder.histories, reward, tokenizer=answers[0].tokenizer)
    if not all(answer.completion.token_ids for answer in answers):
        candidate.drop_tokens()
    for message in candidate.messages:
        message.trained = message.trained and (message.role != "assistant" or message.finish_reason is not None)
    return candidate


def _corrected(answer: _Answer, correction: dict[str, Any]) -> Candidate:
    context = [to_message(message) for message in answer.messages]
    for message in context:
        message.trained = message.role != "assistant"
    calls = [
        ToolCall(f"call_{len(context)}_{number}", call["name"], call["arguments"])
        for number, call in enumerate(correction["calls"])
    ]
    return Candidate([History([*context, Message("assistant", correction["text"], calls)])])
