"""Human feedback on episodes: scores, preferences between two episodes, corrections of messages, and labels of steps.

    {"kind": "score", "score": 4, "trajectory": ID, "content": DIGEST, "artifact": DIGEST, "author": ..., "time": ...}

Files are append-only, with one JSON object per line. A later answer of an author on the same subject replaces the
earlier one, and a withdrawal revokes an answer: `standing` returns the valid answers. A file is
`feedback/<digest of the artifact>.jsonl` below the run root and belongs to the artifact with the episodes.

A trajectory id is unique in its artifact only. Therefore an answer also contains the digest of the content that the
person read (`content_digest`): the same episode is recognized in another artifact, and another episode with the same id
is not confused with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from components.artifacts import lock_file, sync_tree
from components.errors import ResourceError, SpecError
from components.specs import FieldError, Spec, validate
from components.trajectories.convert import to_openai
from components.trajectories.schema import Message, ToolCall, Trajectory

log = logging.getLogger(__name__)

FOLDER = "feedback"
"""Folder name below the run root."""
LOWEST, HIGHEST = 1, 5
"""Range of scores."""
LOCK_LIMIT = 30.0
"""Time limit in seconds to acquire the file's lock."""
MOST_SHOWN = 10
"""Maximum number of damaged lines in one message."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class FeedbackEntry(Spec):
    """Fields common to all lines."""

    author: Annotated[str, StringConstraints(min_length=1, max_length=100, strip_whitespace=True)]
    time: str
    """ISO 8601 timestamp with time zone: `2026-11-05T10:11:12.345+00:00`."""
    artifact: Digest
    """Digest of the artifact with the episode."""

    @field_validator("time")
    @classmethod
    def _require_zone(cls, value: str) -> str:
        try:
            zoned = datetime.fromisoformat(value).tzinfo is not None
        except ValueError:
            zoned = False
        if not zoned:
            raise ValueError("a time with its zone, such as 2026-11-05T10:11:12+00:00")
        return value

    @property
    def id(self) -> str:
        """SHA-256 of the line: equal lines have equal ids."""
        return _digest(self.model_dump(mode="json"))

    @property
    def moment(self) -> float:
        """`time` in seconds since the epoch."""
        return datetime.fromisoformat(self.time).timestamp()


class EpisodeAnswer(FeedbackEntry):
    """An answer about an episode."""

    trajectory: Name
    content: Digest
    """`content_digest` of the trajectory."""
    note: str = Field("", max_length=10_000)

    @property
    @abstractmethod
    def about(self) -> tuple[Any, ...]:
        """Key of the answer's subject: a later answer with the same key replaces it."""

    @property
    @abstractmethod
    def verdict(self) -> Any:
        """Content of the answer: two answers on the same subject with different verdicts contradict each other."""

    @property
    def episode(self) -> tuple[str, str]:
        """Trajectory id and content digest."""
        return self.trajectory, self.content


class Rating(EpisodeAnswer):
    """A score of an episode."""

    kind: Literal["score"] = "score"
    score: int = Field(ge=LOWEST, le=HIGHEST)
    """1 (bad) to 5 (good)."""

    @property
    def about(self) -> tuple[Any, ...]:
        return (self.kind, self.author, self.episode)

    @property
    def verdict(self) -> Any:
        return self.score

    @property
    def value(self) -> float:
        """Score scaled to [0, 1]."""
        return (self.score - LOWEST) / (HIGHEST - LOWEST)


class PairChoice(EpisodeAnswer):
    """A preference between two episodes of a scenario: `trajectory` is a, `other` is b."""

    kind: Literal["choice"] = "choice"
    other: Name
    other_content: Digest
    better: Literal["a", "b", "tie"]

    @model_validator(mode="after")
    def _require_distinct(self) -> PairChoice:
        if self.trajectory == self.other:
            raise FieldError("other", f"{self.other!r}: expected two episodes; this one is on both sides")
        return self

    @property
    def about(self) -> tuple[Any, ...]:
        return (self.kind, self.author, *sorted((self.episode, self.other_episode)))

    @property
    def verdict(self) -> Any:
        return {"a": self.episode, "b": self.other_episode}.get(self.better)

    @property
    def other_episode(self) -> tuple[str, str]:
        return self.other, self.other_content


class MessageAnswer(EpisodeAnswer):
    """An answer about an assistant message of an episode."""

    history: int = Field(0, ge=0)
    """Index of the history."""
    message: int = Field(ge=0)
    """Index of the message in its history."""

    @property
    def about(self) -> tuple[Any, ...]:
        return (type(self), self.author, self.episode, self.history, self.message)


class StepLabel(MessageAnswer):
    """A label of a step, which is an assistant message with its calls."""

    kind: Literal["step"] = "step"
    good: bool = Field(strict=True)

    @property
    def verdict(self) -> Any:
        return self.good


class CorrectedCall(Spec):
    """A tool call of a corrected message."""

    name: Name
    arguments: str = "{}"
    """JSON text of a mapping."""

    @field_validator("arguments")
    @classmethod
    def _require_mapping(cls, value: str) -> str:
        try:
            arguments = json.loads(value)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError("JSON text of an object, such as {}")
        return value


class Correction(MessageAnswer):
    """A corrected version of an assistant message."""

    kind: Literal["correction"] = "correction"
    text: str = Field("", max_length=200_000)
    calls: tuple[CorrectedCall, ...] = ()

    @field_validator("calls")
    @classmethod
    def _require_content(cls, value: tuple[CorrectedCall, ...], info: ValidationInfo) -> tuple[CorrectedCall, ...]:
        if not value and not info.data.get("text", "").strip():
            raise ValueError("a text or calls; a correction needs at least one of them")
        return value

    model_config = {**Spec.model_config, "validate_default": True}

    @property
    def verdict(self) -> Any:
        return self.text, self.calls

    def corrected(self) -> Message:
        """Return the corrected message."""
        calls = [ToolCall(f"call_{self.message}_{i}", call.name, call.arguments) for i, call in enumerate(self.calls)]
        return Message("assistant", self.text, calls)


class Withdrawal(FeedbackEntry):
    """Revocation of an answer by its author."""

    kind: Literal["withdrawal"] = "withdrawal"
    answer: Digest
    """Id of the answer."""


Answer = Rating | PairChoice | Correction | StepLabel
Line = Answer | Withdrawal
KINDS: dict[str, type[Line]] = {
    "score": Rating,
    "choice": PairChoice,
    "correction": Correction,
    "step": StepLabel,
    "withdrawal": Withdrawal,
}


def content_digest(trajectory: Trajectory) -> str:
    """Return the SHA-256 of the content of an episode that a person reads: messages and tools."""
    histories = [
        [history.agent, [to_openai(message) for message in history.messages]] for history in trajectory.histories
    ]
    return _digest({"histories": histories, "tools": trajectory.tools})


def standing(lines: Iterable[Line]) -> list[Answer]:
    """Return the valid answers in order of time: the last answer of each author on each subject, without withdrawn
    ones."""
    return _latest([("", line) for line in lines])[0]


def _latest(lines: Sequence[tuple[str, Line]]) -> tuple[list[Answer], list[str]]:
    """Return the valid answers, and a message for each that contradicts one of the same author, subject and time:
    neither of them is the later one, which would replace the other. lines: each with its place."""
    withdrawn = {(line.author, line.answer) for _, line in lines if isinstance(line, Withdrawal)}
    last: dict[tuple[Any, ...], tuple[str, Answer]] = {}
    contradictions: dict[tuple[Any, ...], str] = {}
    for place, answer in sorted(lines, key=lambda placed: placed[1].moment):
        if isinstance(answer, Withdrawal) or (answer.author, answer.id) in withdrawn:
            continue
        before, other = last.pop(answer.about, (place, answer))
        last[answer.about] = place, answer
        if answer.moment > other.moment:
            contradictions.pop(answer.about, None)
        elif answer.verdict != other.verdict:
            subject = f"{answer.kind} of {answer.trajectory!r} by {answer.author} at {answer.time}"
            text = f"{place}: contradicts {before} ({subject}). Remove one of them, or add a later answer"
            contradictions[answer.about] = text
    return [answer for _, answer in last.values()], list(contradictions.values())


def digest_of(answers: Iterable[Answer]) -> str:
    """Return the SHA-256 of a set of answers, independent of their order."""
    return _digest(sorted(answer.id for answer in answers))


def read_line(text: str, where: str) -> Line:
    """Return the parsed and validated line. Raises ResourceError, whose text starts with `where`, for an invalid
    line."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResourceError(f"{where}: invalid JSON: {error}") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ResourceError(f"{where}: kind is {kind!r:.80}; expected one of {', '.join(KINDS)}")
    try:
        return validate(KINDS[kind], data, configuration=False)
    except SpecError as error:
        raise ResourceError(f"{where}: {'; '.join(map(str, error.problems))}") from None


def read(path: Path) -> list[Line]:
    """Return the lines of a file, or of all files of a folder. An incomplete last line was never acknowledged and is
    skipped with a warning. Raises ResourceError if lines are invalid or contradict each other, with their numbers, if
    the file does not exist, and for a folder without files."""
    return [line for _, line in numbered(path)]


def numbered(path: Path) -> list[tuple[str, Line]]:
    """Return the lines as `read` does, each with its file and line number for messages."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ResourceError(f"{path} holds no feedback: expected files *.jsonl, as flows.runs annotate writes them")
    lines = [line for file in files for line in _parsed(file)]
    _refuse(_latest(lines)[1])
    return lines


def _parsed(path: Path) -> list[tuple[str, Line]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ResourceError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"{path} cannot be read: {error}") from None
    *complete, last = text.split("\n")
    if last.strip() and _canonical(last) is None:
        log.warning("%s ends in the middle of a line, which is skipped", path)
    else:
        complete.append(last)
    parsed, errors = [], []
    for number, line in enumerate(complete, 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                parsed.append((place, read_line(line, place)))
            except ResourceError as error:
                errors.append(str(error))
    _refuse(errors)
    return parsed


def _refuse(errors: Sequence[str]) -> None:
    if errors:
        more = f"\n… and {len(errors) - MOST_SHOWN} more lines" if len(errors) > MOST_SHOWN else ""
        raise ResourceError("\n".join(errors[:MOST_SHOWN]) + more)


def read_all(path: Path) -> list[Answer]:
    """Return the valid answers of a file, or of all files of a folder. Raises as `read`."""
    return standing(read(path))


def write_line(line: Line) -> str:
    """Return a line as JSON, with its line break."""
    return json.dumps(line.model_dump(mode="json")) + "\n"


def append(path: Path, lines: Sequence[Line]) -> int:
    """Append the lines that the file does not contain yet, flush them to disk, and return their number. Safe for
    concurrent processes. The incomplete line of an interrupted writer is truncated. Raises WaitTimeout."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "a+") as lock:
        lock_file(lock, f"{path.name}", LOCK_LIMIT)
        with open(path, "a+b") as file:
            file.seek(0)
            content = file.read()
            *complete, last = content.decode("utf-8-sig", "replace").split("\n")
            present = set(map(_canonical, [*complete, last]))
            fresh = [text for text in dict.fromkeys(map(write_line, lines)) if _canonical(text) not in present]
            if last.strip() and _canonical(last) is None:
                file.truncate(content.rfind(b"\n") + 1)
            elif last:
                fresh.insert(0, "\n")
            file.write("".join(fresh).encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
    if new:  # flush the directory entry too
        sync_tree(path.parent)
    return sum(text != "\n" for text in fresh)


def _canonical(line: str) -> str | None:
    """Return a line of JSON in canonical form; None for invalid JSON."""
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _digest(value: Any) -> str:
    # ASCII, because models produce lone surrogates, which UTF-8 cannot encode.
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()
