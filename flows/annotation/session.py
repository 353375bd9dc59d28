"""A person at work on the episodes of one stage: what is asked, what was said, what MLflow is told.

An answer is on the disk before it is confirmed. Other people may work on the same episodes in other processes: what
they add is seen the next time something is asked.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from components.errors import Problem, ResourceError, SpecError
from components.specs import validate
from components.trajectories.feedback import (
    KINDS,
    Answer,
    Choice,
    Correction,
    Line,
    Rating,
    Withdrawal,
    append,
    read,
    standing,
)
from components.trajectories.schema import Message, Trajectory
from flows.annotation.episodes import Episodes

logger = logging.getLogger(__name__)

Tell = Callable[[Trajectory, Sequence[Answer]], object]
"""Tells MLflow what stands about an episode."""

ASKED = {"score": ("score", "note"), "choice": ("other", "better", "note"),
         "correction": ("history", "message", "text", "calls", "note")}  # fmt: skip
"""What the page may say of an answer, besides the episode; the rest is ours."""


class Session:
    """tell: told of each change, in a thread of its own; None tells nobody. Methods may be called from any thread."""

    def __init__(self, episodes: Episodes, author: str, tell: Tell | None = None):
        self.episodes = episodes
        self.author = author
        self._lock = threading.RLock()
        self._lines: list[Line] = []
        self._seen: tuple[int, int] | None = None
        self._refresh()
        mine = {name for one in self._mine() for name in _named(one)}
        self.order = sorted(episodes.by_id, key=lambda name: name in mine)  # stable: what is not answered comes first
        self.mirror = Mirror(tell) if tell is not None else None
        if self.mirror is not None:
            self._tell(self.standing())

    def standing(self) -> list[Answer]:
        """All that holds, of everybody."""
        with self._lock:
            self._refresh()
            return standing(self._lines)

    def state(self) -> dict[str, Any]:
        """What there is to do, and what this author has done."""
        scores, corrected, chosen = self._said()
        shown = []
        for name in self.order:
            one = self.episodes.by_id[name]
            status = "failed" if one.failure else "success" if one.success else "unsolved"
            shown.append(
                {
                    "id": name,
                    "scenario": one.scenario.id,
                    "sample": one.sample,
                    "status": status,
                    "score": scores[name].score if name in scores else None,
                    "corrections": sum(name == other for other, _, _ in corrected),
                }
            )
        return {
            "run": self.episodes.run.short,
            "name": self.episodes.run.name,
            "stage": self.episodes.label,
            "author": self.author,
            "file": self.episodes.file.name,
            "episodes": shown,
            "pairs": [{"a": a, "b": b, "better": _side(chosen, a, b)} for a, b in self.episodes.pairs],
            "mlflow": self.mirror.problem if self.mirror is not None else "",
        }

    def episode(self, name: str, reveal: bool = False) -> dict[str, Any]:
        """What is read of an episode. The judge's score is there once this author has scored it, or is asked for it.
        Raises ResourceError where there is no such episode."""
        one = self._episode(name)
        scores, corrected, _ = self._said()
        judged = self.episodes.scores.get(name)
        shown: dict[str, Any] = {
            "id": name,
            "scenario": one.scenario.id,
            "type": one.scenario.type,
            "difficulty": one.scenario.difficulty,
            "sample": one.sample,
            "split": one.scenario.split,
            "policy": one.policy,
            "success": one.success,
            "failure": f"{one.failure.boundary}: {one.failure.kind}: {one.failure.message}" if one.failure else None,
            "outcome": _text(one.outcome),
            "tools": [_text(tool) for tool in one.tools],
            "histories": [
                {"agent": history.agent, "messages": [_message(message) for message in history.messages]}
                for history in one.histories
            ],
            "score": scores[name].score if name in scores else None,
            "note": scores[name].note if name in scores else "",
            "corrections": [
                {"history": found.history, "message": found.message, "text": found.text, "calls": _calls(found)}
                for (other, _, _), found in corrected.items()
                if other == name
            ],
            "has_judge": judged is not None,
            "judge": None,
        }
        if judged is not None and (reveal or name in scores):
            why = f"{judged.failure.kind}: {judged.failure.message}" if judged.failure else ""
            parts = {part: f"{value:.3g}" for part, value in judged.components.items()}
            reward = "unscored" if judged.reward is None else f"{judged.reward:.3g}"
            shown["judge"] = {"reward": reward, "components": parts, "explanation": judged.explanation or why}
        return shown

    def answer(self, data: Mapping[str, Any]) -> Answer:
        """Keeps an answer of the page. Raises SpecError where it says what cannot be."""
        kind, name = data.get("kind"), data.get("trajectory")
        if not isinstance(kind, str) or kind not in ASKED:
            raise SpecError([Problem("kind", f"{kind!r:.80}: expected one of {', '.join(ASKED)}")])
        one = self._episode(name)
        given = {key: value for key, value in data.items() if key in ASKED[kind]}
        rest = {"kind": kind, "trajectory": name, "content": self.episodes.contents[one.id], **self._signed()}
        if kind == "choice":
            given["other_content"] = self.episodes.contents[self._episode(data.get("other")).id]
        found = validate(KINDS[kind], {**given, **rest}, configuration=False)
        assert isinstance(found, Rating | Choice | Correction)
        if (problem := self.episodes.problem(found)) is not None:
            raise SpecError([Problem(kind, problem)])
        self._keep(found)
        self._tell([found])
        return found

    def undo(self) -> Answer | None:
        """Takes the last answer of this author back, and returns it; what it had replaced holds again."""
        with self._lock:
            last = max(self._mine(), key=lambda one: one.moment, default=None)
            if last is None:
                return None
            self._keep(Withdrawal(answer=last.id, **self._signed()))
        self._tell([last])
        return last

    def close(self) -> None:
        """Waits, for a while, until MLflow has been told."""
        if self.mirror is not None:
            self.mirror.close()

    def _signed(self) -> dict[str, str]:
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        return {"author": self.author, "time": now, "artifact": self.episodes.artifact.digest}

    def _episode(self, name: Any) -> Trajectory:
        found = self.episodes.by_id.get(name) if isinstance(name, str) else None
        if found is None:
            raise SpecError([Problem("trajectory", f"{name!r:.80}: there is no such episode here")])
        return found

    def _mine(self) -> list[Answer]:
        return [one for one in self.standing() if one.author == self.author]

    def _said(self) -> tuple[dict[str, Rating], dict[tuple[str, int, int], Correction], list[Choice]]:
        """Scores by episode, corrections by episode, history and message, and choices of this author."""
        mine = self._mine()
        return (
            {one.trajectory: one for one in mine if isinstance(one, Rating)},
            {(one.trajectory, one.history, one.message): one for one in mine if isinstance(one, Correction)},
            [one for one in mine if isinstance(one, Choice)],
        )

    def _keep(self, line: Line) -> None:
        with self._lock:
            append(self.episodes.file, [line])
            self._refresh()

    def _refresh(self) -> None:
        """Reads the file again where it has changed."""
        with self._lock:
            try:
                status = self.episodes.file.stat()
            except FileNotFoundError:
                return
            if (now := (status.st_mtime_ns, status.st_size)) != self._seen:
                self._lines, self._seen = read(self.episodes.file), now

    def _tell(self, changed: Iterable[Answer]) -> None:
        if self.mirror is None:
            return
        now = self.standing()
        for name in dict.fromkeys(name for one in changed for name in _named(one)):
            if name in self.episodes.by_id:
                self.mirror.put(self.episodes.by_id[name], [one for one in now if name in _named(one)])


class Mirror:
    """Tells MLflow in a thread, so that nobody waits for it. What it could not be told it is told by the next session
    on these episodes: the file is the truth."""

    def __init__(self, tell: Tell):
        self.problem = ""
        """Why MLflow was not told something; empty where it was told all."""
        self._tell = tell
        self._waiting: queue.SimpleQueue[tuple[Trajectory, Sequence[Answer]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def put(self, episode: Trajectory, answers: Sequence[Answer]) -> None:
        self._waiting.put((episode, answers))

    def close(self, limit: float = 30.0) -> None:
        """Waits until all is said, `limit` seconds at most."""
        self._waiting.put(None)
        self._thread.join(limit)
        if self._thread.is_alive():
            self.problem = f"MLflow has not taken all answers in {limit:g} s; the next session tells it the rest"

    def _work(self) -> None:
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException

        while (next_one := self._waiting.get()) is not None:
            try:
                self._tell(*next_one)
            except (MlflowException, RequestException, OSError) as error:
                self.problem = f"MLflow was not told of {next_one[0].id}: {error}; the next session tells it"
                logger.warning("%s", self.problem)


def imported(lines: Sequence[tuple[str, Line]], known: Mapping[str, Episodes]) -> dict[str, list[Line]]:
    """Lines of another file by the artifact that they are about, if all of them can be taken. known: episodes by digest
    of their artifact. lines: with the place of each. Raises ResourceError, which names every line that cannot."""
    wrong = []
    found: dict[str, list[Line]] = {}
    for place, line in lines:
        if line.artifact not in known:
            where = ", ".join(one.label for one in known.values())
            wrong.append(f"{place}: it is about episodes of artifact {line.artifact[:12]}; expected those of {where}")
        elif (problem := known[line.artifact].problem(line)) is not None:
            wrong.append(f"{place}: {problem}")
        else:
            found.setdefault(line.artifact, []).append(line)
    if wrong:
        raise ResourceError("\n".join([*wrong[:10], *([f"… and {len(wrong) - 10} more"] if len(wrong) > 10 else [])]))
    return found


def _named(answer: Answer) -> list[str]:
    """The episodes that an answer is about."""
    return [answer.trajectory, answer.other] if isinstance(answer, Choice) else [answer.trajectory]


def _side(chosen: Sequence[Choice], a: str, b: str) -> str | None:
    for one in chosen:
        if {one.trajectory, one.other} == {a, b}:
            return one.better if one.trajectory == a or one.better == "tie" else {"a": "b", "b": "a"}[one.better]
    return None


def _message(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": message.content,
        "calls": [{"name": one.name, "arguments": one.arguments} for one in message.tool_calls],
        "cut": message.finish_reason == "length",
    }


def _calls(correction: Correction) -> list[dict[str, str]]:
    return [one.model_dump() for one in correction.calls]


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
