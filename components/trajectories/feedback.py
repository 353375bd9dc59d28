"""What people say of episodes: a score, a choice between two, a correction of a message.

    {"kind": "score", "score": 4, "trajectory": ID, "content": DIGEST, "artifact": DIGEST, "author": ..., "time": ...}

Answers are only added, one JSON object a line; nothing is changed or removed. What an author says again replaces what
the same author said before, and a withdrawal takes an answer back: `standing` is what is left. The files lie below the
run root, `feedback/<digest of the artifact>.jsonl`, and belong to the artifact whose episodes they are about.

The id of a trajectory is unique in its artifact only. So an answer also names the content that the person read
(`content_digest`): the same episode in another artifact is known again, another one by the same id is not taken for it.
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
from components.specs import Spec, validate
from components.trajectories.convert import to_openai
from components.trajectories.schema import Message, ToolCall, Trajectory

log = logging.getLogger(__name__)

FOLDER = "feedback"
"""Below the run root."""
LOWEST, HIGHEST = 1, 5
LOCK_LIMIT = 30.0
"""Seconds to wait for another process that adds answers."""
MOST_SHOWN = 10
"""Damaged lines that are named in one message."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Said(Spec):
    """What all answers have."""

    author: Annotated[str, StringConstraints(min_length=1, max_length=100, strip_whitespace=True)]
    time: str
    """ISO 8601 with a zone: `2026-11-05T10:11:12.345+00:00`."""
    artifact: Digest
    """Digest of the artifact that holds the episode."""

    @field_validator("time")
    @classmethod
    def _zoned(cls, value: str) -> str:
        try:
            zoned = datetime.fromisoformat(value).tzinfo is not None
        except ValueError:
            zoned = False
        if not zoned:
            raise ValueError("a time with its zone, such as 2026-11-05T10:11:12+00:00")
        return value

    @property
    def id(self) -> str:
        """sha256 of the answer: equal answers are one."""
        return _digest(self.model_dump(mode="json"))

    @property
    def moment(self) -> float:
        """Its time in seconds since the epoch."""
        return datetime.fromisoformat(self.time).timestamp()


class OfEpisode(Said):
    """An answer about an episode."""

    trajectory: Name
    content: Digest
    """`content_digest` of it."""
    note: str = Field("", max_length=10_000)

    @property
    @abstractmethod
    def about(self) -> tuple[Any, ...]:
        """What a later answer of the same author replaces."""

    @property
    def episode(self) -> tuple[str, str]:
        return self.trajectory, self.content


class Rating(OfEpisode):
    """How good an episode is."""

    kind: Literal["score"] = "score"
    score: int = Field(ge=LOWEST, le=HIGHEST)
    """1 (bad) to 5 (good)."""

    @property
    def about(self) -> tuple[Any, ...]:
        return (self.kind, self.author, self.episode)

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return (self.score - LOWEST) / (HIGHEST - LOWEST)


class Choice(OfEpisode):
    """Which of two episodes of a scenario is better: `trajectory` is a, `other` is b."""

    kind: Literal["choice"] = "choice"
    other: Name
    other_content: Digest
    better: Literal["a", "b", "tie"]

    @model_validator(mode="after")
    def _two(self) -> Choice:
        if self.trajectory == self.other:
            raise ValueError(f"two episodes; {self.other!r} is on both sides")
        return self

    @property
    def about(self) -> tuple[Any, ...]:
        return (self.kind, self.author, *sorted((self.episode, self.other_episode)))

    @property
    def other_episode(self) -> tuple[str, str]:
        return self.other, self.other_content


class CorrectedCall(Spec):
    name: Name
    arguments: str = "{}"
    """JSON text of a mapping."""

    @field_validator("arguments")
    @classmethod
    def _mapping(cls, value: str) -> str:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("JSON text of an object, such as {}")
        return value


class Correction(OfEpisode):
    """What the assistant should have said in place of one of its messages."""

    kind: Literal["correction"] = "correction"
    history: int = Field(0, ge=0)
    message: int = Field(ge=0)
    """Index of the message in its history."""
    text: str = Field("", max_length=200_000)
    calls: tuple[CorrectedCall, ...] = ()

    @field_validator("calls")
    @classmethod
    def _says_something(cls, value: tuple[CorrectedCall, ...], info: ValidationInfo) -> tuple[CorrectedCall, ...]:
        if not value and not info.data.get("text", "").strip():
            raise ValueError("a text or calls; a correction without either says nothing")
        return value

    model_config = {**Spec.model_config, "validate_default": True}

    @property
    def about(self) -> tuple[Any, ...]:
        return (self.kind, self.author, self.episode, self.history, self.message)

    def corrected(self) -> Message:
        """The message that should stand there."""
        calls = [ToolCall(f"call_{self.message}_{i}", one.name, one.arguments) for i, one in enumerate(self.calls)]
        return Message("assistant", self.text, calls)


class Withdrawal(Said):
    """Takes back an answer of the same author."""

    kind: Literal["withdrawal"] = "withdrawal"
    answer: Digest
    """Its id."""


Answer = Rating | Choice | Correction
Line = Answer | Withdrawal
KINDS: dict[str, type[Line]] = {
    "score": Rating,
    "choice": Choice,
    "correction": Correction,
    "withdrawal": Withdrawal,
}


def content_digest(trajectory: Trajectory) -> str:
    """sha256 of what a person reads of an episode: its messages and the tools that were offered."""
    histories = [[one.agent, [to_openai(message) for message in one.messages]] for one in trajectory.histories]
    return _digest({"histories": histories, "tools": trajectory.tools})


def corrects(one: Correction, trajectory: Trajectory) -> bool:
    """Whether the corrected message is one of the assistant's."""
    messages = trajectory.histories[one.history].messages if one.history < len(trajectory.histories) else []
    return one.message < len(messages) and messages[one.message].role == "assistant"


def standing(lines: Iterable[Line]) -> list[Answer]:
    """What holds, by time: of each author the last answer about each thing, without those that were withdrawn."""
    found = list(lines)
    taken_back = {(one.author, one.answer) for one in found if isinstance(one, Withdrawal)}
    last: dict[tuple[Any, ...], Answer] = {}
    for one in sorted(found, key=lambda one: one.moment):
        if not isinstance(one, Withdrawal) and (one.author, one.id) not in taken_back:
            last.pop(one.about, None)
            last[one.about] = one
    return list(last.values())


def digest_of(answers: Iterable[Answer]) -> str:
    """sha256 over what answers say, in any order."""
    return _digest(sorted(one.id for one in answers))


def read_line(text: str, where: str) -> Line:
    """The answer of one line. Raises ResourceError, which begins with `where`, for a line that is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResourceError(f"{where}: no JSON: {error}") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ResourceError(f"{where}: kind is {kind!r:.80}; expected one of {', '.join(KINDS)}")
    try:
        return validate(KINDS[kind], data, configuration=False)
    except SpecError as error:
        raise ResourceError(f"{where}: {'; '.join(map(str, error.problems))}") from None


def read(path: Path) -> list[Line]:
    """The lines of a file. An end without a line break was never acknowledged, and is left out with a warning. Raises
    ResourceError, which names each damaged line, or the file where there is none."""
    return [line for _, line in numbered(path)]


def numbered(path: Path) -> list[tuple[str, Line]]:
    """As `read`, each with its place for messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResourceError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"{path} cannot be read: {error}") from None
    *whole, rest = text.split("\n")
    if rest.strip() and _plain(rest) is None:
        log.warning("%s ends in the middle of a line, which is left out", path)
    else:
        whole.append(rest)
    found, wrong = [], []
    for number, line in enumerate(whole, 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                found.append((place, read_line(line, place)))
            except ResourceError as error:
                wrong.append(str(error))
    if wrong:
        more = f"\n… and {len(wrong) - MOST_SHOWN} more lines" if len(wrong) > MOST_SHOWN else ""
        raise ResourceError("\n".join(wrong[:MOST_SHOWN]) + more)
    return found


def read_all(path: Path) -> list[Answer]:
    """What stands in a file, or in all files of a folder. Raises as `read`, and where the folder has none."""
    if not path.is_dir():
        return standing(read(path))
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ResourceError(f"{path} holds no feedback: expected files *.jsonl, as flows.annotate writes them")
    return standing(line for file in files for line in read(file))


def write_line(line: Line) -> str:
    return json.dumps(line.model_dump(mode="json")) + "\n"


def append(path: Path, lines: Sequence[Line]) -> int:
    """Adds those that the file does not have yet and returns how many; they are on the disk when this returns. Several
    processes may do so at once. What a dead writer left of a line is cut off. Raises WaitTimeout."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "a+") as lock:
        lock_file(lock, f"{path.name}", LOCK_LIMIT)
        with open(path, "a+b") as file:
            file.seek(0)
            content = file.read()
            *whole, rest = content.decode("utf-8", "replace").split("\n")
            there = set(map(_plain, [*whole, rest]))
            fresh = [text for text in dict.fromkeys(map(write_line, lines)) if _plain(text) not in there]
            if rest.strip() and _plain(rest) is None:
                file.truncate(content.rfind(b"\n") + 1)
            elif rest:
                fresh.insert(0, "\n")
            file.write("".join(fresh).encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
    if new:  # the name of the file too
        sync_tree(path.parent)
    return sum(text != "\n" for text in fresh)


def _plain(line: str) -> str | None:
    """A line of JSON in one form."""
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _digest(value: Any) -> str:
    # ASCII: models write lone surrogates, which UTF-8 cannot.
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()
