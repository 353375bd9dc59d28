"""Labels of single turns, by people or programs, from a file with one JSON object per line:

    {"trajectory_id": "shop-train-3/0", "step": 0, "label": 0.5}
    {"scenario": "shop-train-3", "sample": 0, "step": 1, "label": 1, "policy": "base"}

`step` is the number of the turn, from 0, counting the policy's messages over all histories. Several labels of one turn,
such as from several people, are averaged. Other keys, such as an author, are ignored. The next policy plays other
episodes under the same ids, so a line may name the policy of its episode: `policy`, as in the trajectory.

The label of turn i is the component `NAME/i` of the score, which the head NAME of a process reward model learns.
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
from components.specs.marks import FILES
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory
from components.trajectories.step_labels import written

MOST_NAMED = 10
"""Maximum number of invalid lines that an error lists."""

Labels = dict[tuple[str, str | None], dict[int, list[float]]]
"""Labels of each turn, by trajectory id and policy (None: any policy)."""


@registered("reward.labelled")
class Labelled:
    """Labels of turns from a JSONL file. An episode without a label for each turn is unscored, unless `task` scores it.

    Args:
        path: The JSONL file.
        name: Name of the labels: the components are NAME/0, NAME/1 and so on.
        task: Reward that scores the episodes, including those without labels, as in evaluations; null scores by the
            sum of the labels.

    If every turn has a label, the labels are the step rewards.
    """

    def __init__(
        self,
        path: Annotated[str, FILES],
        name: Annotated[str, Field(pattern=r"^[\w-]+$")] = "labelled",
        task: Any = None,
    ):
        if isinstance(task, ModelReward):
            message = f"{type(task).__name__} computes with a model; expected a reward that does not, or null"
            raise SpecError([Problem("reward.task", message)])
        self.name = name
        reject_running_statistics(task, "reward.task")
        self.task = task
        self._labels = read_labels(path)

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: the digest of the labels in place of the path. Raises SpecError as
        `read_labels`."""
        rows = sorted(
            (name, policy or "", turn, label)
            for (name, policy), turns in read_labels(arguments["path"]).items()
            for turn, labels in turns.items()
            for label in labels
        )
        return {**arguments, "path": hashlib.sha256(json.dumps(rows).encode()).hexdigest()}

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each trajectory."""
        tasks: Sequence[Score | None] = [None] * len(group) if self.task is None else list(judge(self.task, group))
        return [self._score(trajectory, task) for trajectory, task in zip(group, tasks, strict=True)]

    def _score(self, trajectory: Trajectory, task: Score | None) -> Score:
        turns = _turns(trajectory)
        labels = {
            turn: fmean(
                [
                    *self._labels_of(trajectory, None).get(turn, ()),
                    *self._labels_of(trajectory, trajectory.policy).get(turn, ()),
                ]
            )
            for turn in sorted({*self._labels_of(trajectory, None), *self._labels_of(trajectory, trajectory.policy)})
        }
        if labels and max(labels) >= turns:
            return _unscored(
                trajectory, f"a label of step {max(labels)}, and the episode has {turns} turns, from step 0"
            )
        parts = {f"{self.name}/{turn}": label for turn, label in labels.items()}
        steps = [labels[turn] for turn in range(turns)] if turns and len(labels) == turns else []
        if task is None:
            if not steps:
                return _unscored(trajectory, f"{len(labels)} of its {turns} turns have a label", parts)
            return Score(trajectory.id, sum(steps), written(self.name, steps), steps)
        parts = {**task.components, **parts}
        return Score(
            trajectory.id, task.reward, parts, steps or task.step_rewards, task.explanation, task.cost, task.failure
        )

    def _labels_of(self, trajectory: Trajectory, policy: str | None) -> dict[int, list[float]]:
        return self._labels.get((trajectory.id, policy), {})


def read_labels(path: str) -> Labels:
    """Return the labels of a file. Raises SpecError if it is missing or empty, or has invalid lines, which the error
    lists by number."""
    labels: Labels = defaultdict(lambda: defaultdict(list))
    problems: list[str] = []
    for number, line in _lines(path):
        try:
            name, policy, turn, label = _label(line)
            labels[name, policy][turn].append(label)
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}")
    if problems:
        unlisted = len(problems) - MOST_NAMED
        messages = problems[:MOST_NAMED] + ([f"{path}: {unlisted} more lines are no labels"] if unlisted > 0 else [])
        raise SpecError([Problem("reward.path", text) for text in messages])
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
    """Return trajectory id, policy, turn and label of a line. Raises ValueError with a message for the user."""
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


def _turns(trajectory: Trajectory) -> int:
    """Return the number of the policy's messages: sampled ones, or in a conversation without tokens, assistant
    messages."""
    return sum(
        message.span is not None if history.token_ids else message.role == "assistant"
        for history in trajectory.histories
        for message in history.messages
    )


def _unscored(trajectory: Trajectory, reason: str, parts: Mapping[str, float] | None = None) -> Score:
    return Score(
        trajectory.id, None, dict(parts or {}), failure=Failure(JudgeError.boundary, JudgeError.__name__, reason)
    )
