"""Annotation session of one author on the episodes of one stage, with a mirror of the answers in MLflow.

An answer is written to disk before it is confirmed. Other authors may annotate the same episodes in other processes;
their answers appear with the next request.
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
    Correction,
    Line,
    PairChoice,
    Rating,
    StepLabel,
    Withdrawal,
    append,
    read,
    standing,
)
from components.trajectories.schema import Message, Trajectory
from flows.annotation.episodes import StageEpisodes

logger = logging.getLogger(__name__)

Tell = Callable[[Trajectory, Sequence[Answer]], object]
"""Function that writes the current answers about an episode to MLflow."""

ASKED = {"score": ("score", "note"), "choice": ("other", "better", "note"),
         "correction": ("history", "message", "text", "calls", "note"),
         "step": ("history", "message", "good", "note")}  # fmt: skip
"""Fields that the page may set per kind of answer, besides the episode; the session sets all others."""


class AnnotationSession:
    """Annotation session. Its methods are thread-safe.

    tell: called in a separate thread with each change; None disables the mirror.
    """

    def __init__(self, episodes: StageEpisodes, author: str, tell: Tell | None = None):
        self.episodes = episodes
        self.author = author
        self._lock = threading.RLock()
        self._lines: list[Line] = []
        self._file_state: tuple[int, int] | None = None
        """Modification time and size of the file when it was last read."""
        self._refresh()
        answered = {name for answer in self._own_answers() for name in _episode_ids(answer)}
        self.order = sorted(episodes.by_id, key=lambda name: name in answered)  # stable sort: unanswered ones first
        self.mirror = Mirror(tell) if tell is not None else None
        if self.mirror is not None:
            self._update_mirror(self.standing())

    def standing(self) -> list[Answer]:
        """Return the current answers of all authors."""
        with self._lock:
            self._refresh()
            return standing(self._lines)

    def state(self) -> dict[str, Any]:
        """Return the episodes and pairs with this author's answers, as JSON data for the page."""
        scores, corrections, choices = self._own_by_kind()
        rows = []
        for name in self.order:
            episode = self.episodes.by_id[name]
            status = "failed" if episode.failure else "success" if episode.success else "unsolved"
            rows.append(
                {
                    "id": name,
                    "scenario": episode.scenario.id,
                    "sample": episode.sample,
                    "status": status,
                    "score": scores[name].score if name in scores else None,
                    "corrections": sum(name == other for other, _, _ in corrections),
                }
            )
        return {
            "run": self.episodes.run.short,
            "name": self.episodes.run.name,
            "stage": self.episodes.label,
            "author": self.author,
            "file": self.episodes.file.name,
            "episodes": rows,
            "pairs": [{"a": a, "b": b, "better": _side(choices, a, b)} for a, b in self.episodes.pairs],
            "mlflow": self.mirror.problem if self.mirror is not None else "",
        }

    def episode(self, name: str, reveal: bool = False) -> dict[str, Any]:
        """Return an episode as JSON data for the page. reveal: include the judge's score before this author has scored
        the episode. Raises SpecError for an unknown episode."""
        episode = self._episode(name)
        scores, corrections, _ = self._own_by_kind()
        judged = self.episodes.scores.get(name)
        failure = episode.failure
        data: dict[str, Any] = {
            "id": name,
            "scenario": episode.scenario.id,
            "type": episode.scenario.type,
            "difficulty": episode.scenario.difficulty,
            "sample": episode.sample,
            "split": episode.scenario.split,
            "policy": episode.policy,
            "success": episode.success,
            "failure": f"{failure.boundary}: {failure.kind}: {failure.message}" if failure else None,
            "outcome": _text(episode.outcome),
            "tools": [_text(tool) for tool in episode.tools],
            "histories": [
                {"agent": history.agent, "messages": [_message(message) for message in history.messages]}
                for history in episode.histories
            ],
            "score": scores[name].score if name in scores else None,
            "note": scores[name].note if name in scores else "",
            "corrections": [
                {
                    "history": correction.history,
                    "message": correction.message,
                    "text": correction.text,
                    "calls": _calls(correction),
                }
                for (other, _, _), correction in corrections.items()
                if other == name
            ],
            "steps": [
                {"history": answer.history, "message": answer.message, "good": answer.good}
                for answer in self._own_answers()
                if isinstance(answer, StepLabel) and answer.trajectory == name
            ],
            "has_judge": judged is not None,
            "judge": None,
        }
        if judged is not None and (reveal or name in scores):
            reason = f"{judged.failure.kind}: {judged.failure.message}" if judged.failure else ""
            parts = {part: f"{value:.3g}" for part, value in judged.components.items()}
            reward = "unscored" if judged.reward is None else f"{judged.reward:.3g}"
            data["judge"] = {"reward": reward, "components": parts, "explanation": judged.explanation or reason}
        return data

    def answer(self, data: Mapping[str, Any]) -> Answer:
        """Validate and save an answer of the page. Raises SpecError if it is invalid."""
        kind, name = data.get("kind"), data.get("trajectory")
        if not isinstance(kind, str) or kind not in ASKED:
            raise SpecError([Problem("kind", f"{kind!r:.80}: expected one of {', '.join(ASKED)}")])
        episode = self._episode(name)
        fields = {key: value for key, value in data.items() if key in ASKED[kind]}
        own_fields = {
            "kind": kind,
            "trajectory": name,
            "content": self.episodes.contents[episode.id],
            **self._signature(),
        }
        if kind == "choice":
            fields["other_content"] = self.episodes.contents[self._episode(data.get("other")).id]
        answer = validate(KINDS[kind], {**fields, **own_fields}, configuration=False)
        assert not isinstance(answer, Withdrawal)
        if (problem := self.episodes.problem(answer)) is not None:
            raise SpecError([Problem(kind, problem)])
        self._save(answer)
        self._update_mirror([answer])
        return answer

    def undo(self) -> Answer | None:
        """Withdraw and return this author's last answer; the answer that it replaced becomes current again."""
        with self._lock:
            last = max(self._own_answers(), key=lambda answer: answer.moment, default=None)
            if last is None:
                return None
            self._save(Withdrawal(answer=last.id, **self._signature()))
        self._update_mirror([last])
        return last

    def close(self) -> None:
        """Wait, with a time limit, until all answers are in MLflow."""
        if self.mirror is not None:
            self.mirror.close()

    def _signature(self) -> dict[str, str]:
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        return {"author": self.author, "time": now, "artifact": self.episodes.artifact.digest}

    def _episode(self, name: Any) -> Trajectory:
        episode = self.episodes.by_id.get(name) if isinstance(name, str) else None
        if episode is None:
            raise SpecError([Problem("trajectory", f"{name!r:.80}: there is no such episode here")])
        return episode

    def _own_answers(self) -> list[Answer]:
        return [answer for answer in self.standing() if answer.author == self.author]

    def _own_by_kind(self) -> tuple[dict[str, Rating], dict[tuple[str, int, int], Correction], list[PairChoice]]:
        """Return this author's scores by episode, corrections by (episode, history, message), and choices."""
        own = self._own_answers()
        return (
            {answer.trajectory: answer for answer in own if isinstance(answer, Rating)},
            {
                (answer.trajectory, answer.history, answer.message): answer
                for answer in own
                if isinstance(answer, Correction)
            },
            [answer for answer in own if isinstance(answer, PairChoice)],
        )

    def _save(self, line: Line) -> None:
        with self._lock:
            append(self.episodes.file, [line])
            self._refresh()

    def _refresh(self) -> None:
        """Read the file again if it has changed."""
        with self._lock:
            try:
                status = self.episodes.file.stat()
            except FileNotFoundError:
                return
            if (file_state := (status.st_mtime_ns, status.st_size)) != self._file_state:
                self._lines, self._file_state = read(self.episodes.file), file_state

    def _update_mirror(self, changed: Iterable[Answer]) -> None:
        if self.mirror is None:
            return
        current = self.standing()
        for name in dict.fromkeys(name for answer in changed for name in _episode_ids(answer)):
            if name in self.episodes.by_id:
                answers = [answer for answer in current if name in _episode_ids(answer)]
                self.mirror.put(self.episodes.by_id[name], answers)


class Mirror:
    """Writer of answers to MLflow in a background thread. Answers that MLflow did not get are written by the next
    session on these episodes; the file is authoritative."""

    def __init__(self, tell: Tell):
        self.problem = ""
        """Reason why MLflow lacks answers; empty if it has all."""
        self._tell = tell
        self._pending: queue.SimpleQueue[tuple[Trajectory, Sequence[Answer]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def put(self, episode: Trajectory, answers: Sequence[Answer]) -> None:
        """Enqueue the current answers about an episode."""
        self._pending.put((episode, answers))

    def close(self, limit: float = 30.0) -> None:
        """Wait until all answers are written, at most `limit` seconds."""
        self._pending.put(None)
        self._thread.join(limit)
        if self._thread.is_alive():
            self.problem = f"MLflow did not get all answers within {limit:g} s; the next session writes the rest"

    def _work(self) -> None:
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException

        while (item := self._pending.get()) is not None:
            episode, answers = item
            try:
                self._tell(episode, answers)
            except (MlflowException, RequestException, OSError) as error:
                self.problem = f"MLflow did not get the answers about {episode.id}: {error}; the next session retries"
                logger.warning("%s", self.problem)


def group_by_artifact(
    lines: Sequence[tuple[str, Line]], episodes: Mapping[str, StageEpisodes]
) -> dict[str, list[Line]]:
    """Validate the lines of another file and group them by artifact.

    lines: pairs of position and line. episodes: episodes by digest of their artifact. Raises ResourceError, which lists
    the invalid lines, if any line is invalid.
    """
    problems = []
    by_artifact: dict[str, list[Line]] = {}
    for position, line in lines:
        if line.artifact not in episodes:
            labels = ", ".join(item.label for item in episodes.values())
            problems.append(
                f"{position}: it is about episodes of artifact {line.artifact[:12]}; expected those of {labels}"
            )
        elif (problem := episodes[line.artifact].problem(line)) is not None:
            problems.append(f"{position}: {problem}")
        else:
            by_artifact.setdefault(line.artifact, []).append(line)
    if problems:
        more = [f"… and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise ResourceError("\n".join([*problems[:10], *more]))
    return by_artifact


def _episode_ids(answer: Answer) -> list[str]:
    """Return the ids of the episodes that an answer is about."""
    return [answer.trajectory, answer.other] if isinstance(answer, PairChoice) else [answer.trajectory]


def _side(choices: Sequence[PairChoice], a: str, b: str) -> str | None:
    for choice in choices:
        if {choice.trajectory, choice.other} == {a, b}:
            swapped = choice.trajectory != a and choice.better != "tie"
            return {"a": "b", "b": "a"}[choice.better] if swapped else choice.better
    return None


def _message(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning or "",
        "calls": [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        "cut": message.finish_reason == "length",
    }


def _calls(correction: Correction) -> list[dict[str, str]]:
    return [call.model_dump() for call in correction.calls]


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
