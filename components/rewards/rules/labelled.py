"""Labels of single turns that people gave, or a program, from a file: one JSON object a line,

    {"trajectory_id": "shop-train-3/0", "step": 0, "label": 0.5}
    {"scenario": "shop-train-3", "sample": 0, "step": 1, "label": 1, "policy": "base"}

`step` is the number of the turn, from 0: of the messages that the policy said, over all histories. Several labels of
one turn, as of several people, count by their mean. Other keys, such as an author, are left alone. The next policy
plays other episodes under the same ids, so a line may say whose episode it means: `policy`, as the trajectory has it.

The labels of turn i are the component `NAME/i` of the score: what the head NAME of a process reward model learns.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from components.errors import JudgeError, Problem, SpecError
from components.rewards.judge import judge, reject_running_statistics
from components.rewards.protocol import ModelReward
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory
from components.trajectories.step_labels import written

MOST_NAMED = 10
"""Faulty lines that an error names."""

Labels = dict[tuple[str, str | None], dict[int, list[float]]]
"""By trajectory id and policy (None: any): the labels of each turn."""


@registered("reward.labelled")
class Labelled:
    """Labels of turns from a JSONL file. An episode without a label of each turn is unscored, unless `task` scores it.

    Args:
        path: The file.
        name: Of the labels: the components are NAME/0, NAME/1 and so on.
        task: Reward that scores the episodes, also those without labels, as in evaluations; null: the sum of the
            labels.

    The step rewards are the labels, where every turn has one.
    """

    def __init__(self, path: str, name: Annotated[str, Field(pattern=r"^[\w-]+$")] = "labelled", task: Any = None):
        if isinstance(task, ModelReward):
            message = f"{type(task).__name__} computes with a model; expected a reward that does not, or null"
            raise SpecError([Problem("reward.task", message)])
        self.name = name
        reject_running_statistics(task, "reward.task")
        self.task = task
        self._labels = read_labels(path)

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """For stage keys: what the file says in place of where it is. Raises SpecError as read_labels."""
        said = sorted(
            (name, policy or "", turn, label)
            for (name, policy), turns in read_labels(arguments["path"]).items()
            for turn, labels in turns.items()
            for label in labels
        )
        return {**arguments, "path": hashlib.sha256(json.dumps(said).encode()).hexdigest()}

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Scores each trajectory for itself."""
        tasks: Sequence[Score | None] = [None] * len(group) if self.task is None else list(judge(self.task, group))
        return [self._score(one, task) for one, task in zip(group, tasks, strict=True)]

    def _score(self, one: Trajectory, task: Score | None) -> Score:
        turns = _turns(one)
        labels = {
            turn: fmean([*self._given(one, None).get(turn, ()), *self._given(one, one.policy).get(turn, ())])
            for turn in sorted({*self._given(one, None), *self._given(one, one.policy)})
        }
        if labels and max(labels) >= turns:
            return _unscored(one, f"a label of step {max(labels)}, and the episode has {turns} turns, from step 0")
        parts = {f"{self.name}/{turn}": label for turn, label in labels.items()}
        steps = [labels[turn] for turn in range(turns)] if turns and len(labels) == turns else []
        if task is None:
            if not steps:
                return _unscored(one, f"{len(labels)} of its {turns} turns have a label", parts)
            return Score(one.id, sum(steps), written(self.name, steps), steps)
        parts = {**task.components, **parts}
        return Score(one.id, task.reward, parts, steps or task.step_rewards, task.explanation, task.cost, task.failure)

    def _given(self, one: Trajectory, policy: str | None) -> dict[int, list[float]]:
        return self._labels.get((one.id, policy), {})


def read_labels(path: str) -> Labels:
    """The labels of a file. Raises SpecError where it is not there, is empty, or has lines that are no labels, with
    their numbers."""
    labels: Labels = defaultdict(lambda: defaultdict(list))
    problems: list[str] = []
    for number, line in _lines(path):
        try:
            name, policy, turn, label = _label(line)
            labels[name, policy][turn].append(label)
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}")
    if problems:
        rest = len(problems) - MOST_NAMED
        shown = problems[:MOST_NAMED] + ([f"{path}: {rest} more lines are no labels"] if rest > 0 else [])
        raise SpecError([Problem("reward.path", text) for text in shown])
    if not labels:
        raise SpecError([Problem("reward.path", f"{path} has no label; expected a JSON object in each line")])
    return labels


def _lines(path: str) -> Iterator[tuple[int, str]]:
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8-sig")
    except OSError as error:
        message = f"{path!r} cannot be read ({error.strerror}); expected a file with a JSON object in each line"
        raise SpecError([Problem("reward.path", message)]) from error
    except UnicodeDecodeError as error:
        raise SpecError([Problem("reward.path", f"{path!r} is no UTF-8 text (byte {error.start})")]) from error
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _label(line: str) -> tuple[str, str | None, int, float]:
    """Trajectory id, policy, turn, label. Raises ValueError in words."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.80} is no JSON object")
    by_id, by_sample = "trajectory_id" in data, "scenario" in data or "sample" in data
    if by_id == by_sample:
        which = "both trajectory_id and scenario" if by_id else "neither trajectory_id nor scenario and sample"
        raise ValueError(f"has {which}; expected one of them")
    name = data["trajectory_id"] if by_id else f"{_text(data, 'scenario')}/{_whole(data, 'sample')}"
    if not isinstance(name, str):
        raise ValueError(f"trajectory_id is {name!r:.80}; expected text")
    label = data.get("label")
    if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
        raise ValueError(f"label is {label!r:.80}; expected a finite number")
    return name, _text(data, "policy") if "policy" in data else None, _whole(data, "step"), float(label)


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r:.80}; expected text")
    return value


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key} is {value!r:.80}; expected a whole number from 0 on")
    return value


def _turns(one: Trajectory) -> int:
    """Messages that the policy said: those sampled, or of a written conversation those of the assistant."""
    return sum(
        message.span is not None if history.token_ids else message.role == "assistant"
        for history in one.histories
        for message in history.messages
    )


def _unscored(one: Trajectory, why: str, parts: Mapping[str, float] | None = None) -> Score:
    return Score(one.id, None, dict(parts or {}), failure=Failure(JudgeError.boundary, JudgeError.__name__, why))
