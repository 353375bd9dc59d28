"""GatheredGroups of a loop: rollouts that are about to be played, and the episodes that they became.

`group` takes coroutines of a rollout function that have not begun. Their function, with its source, and their arguments
identify the episodes (`flows.loop.source`); a coroutine whose episode is in the store is closed without running.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from components.artifacts import Artifact
from components.artifacts.keys import json_digest
from components.data.examples import RowProblem
from components.data.messages import read_messages, read_tools
from components.errors import SpecError
from components.trajectories import schema
from components.trajectories.groups import ASIDE
from components.trajectories.parts import IMPORTED
from flows.loop.policy import LoopPolicy
from flows.loop.source import argument, content, global_names, source_of

_STARTED = {inspect.CORO_RUNNING: "is running", inspect.CORO_SUSPENDED: "has begun", inspect.CORO_CLOSED: "has ended"}


@dataclass
class Transcript:
    """Episode of one's own, as messages.

    Returned by a rollout whose calls were captured, its messages are ignored: the captured tokens are exact. Otherwise
    the messages are tokenized for training."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Conversation in OpenAI's format."""
    reward: float | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools offered, in OpenAI's format."""
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def episode(self, scenario: schema.Scenario | None = None, sample: int = 0) -> schema.Trajectory:
        """Return the episode in the project's own schema, without tokens. Raises SpecError for invalid messages."""
        try:
            messages, tools = (read_messages(self.messages) if self.messages else []), read_tools(self.tools)
        except RowProblem as error:
            raise SpecError.at("Transcript", f"{error}") from None
        if scenario is None:
            scenario = schema.Scenario(json_digest(content(self.messages))[:12], {}, "train")
        outcome = {name: value for name in ("reward", "success") if (value := getattr(self, name)) is not None}
        histories = [schema.History(messages)] if messages else []
        identifier = f"{scenario.id}/{sample}"
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return schema.Trajectory(
            identifier, scenario, sample, histories, tools, [], outcome, metrics, policy=IMPORTED, reward=self.reward
        )


@dataclass
class Call:
    """Call of a rollout function that has not begun."""

    coroutine: Coroutine[Any, Any, Any]
    name: str
    """Name of the function."""
    arguments: dict[str, Any]
    """Content of the arguments by name, without the model."""
    source: str
    """Digest of the source of the function."""
    model: LoopPolicy | None
    """Model among the arguments and the variables of the function."""

    @classmethod
    def of(cls, coroutine: Any, sources: dict[CodeType, str]) -> Call:
        """Return the call of a coroutine. sources: digests of functions that were read before. Raises SpecError."""
        if not inspect.iscoroutine(coroutine):
            hint = "expected coroutines, loop.group(rollout(model, scenario) for _ in range(8)), or trajectories"
            raise SpecError.at("loop.group", f"{type(coroutine).__name__}: {hint}")
        code, name = coroutine.cr_code, coroutine.__qualname__.rpartition(".")[2]
        if (state := inspect.getcoroutinestate(coroutine)) != inspect.CORO_CREATED:
            text = f"{name}: the coroutine {_STARTED[state]}; expected one that was neither awaited nor made a task"
            raise SpecError.at("loop.group", text)
        frame = coroutine.cr_frame
        assert frame is not None  # of a coroutine that has not begun
        values = frame.f_locals
        free = {variable: values[variable] for variable in code.co_freevars if variable in values}
        parameters = {variable: value for variable, value in values.items() if variable not in free}
        names = [frame.f_globals[variable] for variable in global_names(code) if variable in frame.f_globals]
        models = [value for value in [*_flat(parameters), *free.values(), *names] if isinstance(value, LoopPolicy)]
        if code not in sources:
            sources[code] = source_of(code, frame.f_globals, free)
        data = {variable: _without_model(value) for variable, value in parameters.items()}
        data = {variable: value for variable, value in data.items() if not isinstance(value, LoopPolicy)}
        arguments = {variable: argument(name, variable, value) for variable, value in data.items()}
        return cls(coroutine, name, arguments, sources[code], models[0] if models else None)

    def scenario(self, split: str) -> schema.Scenario:
        """Return the scenario that the arguments describe: an only argument with keys is the scenario itself."""
        values = list(self.arguments.values())
        data = values[0] if len(values) == 1 and isinstance(values[0], dict) else self.arguments
        identifier = data.get("id")
        usable = isinstance(identifier, int | str) and ASIDE not in str(identifier) and str(identifier)
        kind, difficulty = data.get("type"), data.get("difficulty")
        return schema.Scenario(
            str(identifier) if usable else json_digest(data)[:12],
            data,
            split,
            kind if isinstance(kind, str) else "",
            difficulty if isinstance(difficulty, int) and difficulty >= 0 else 0,
        )


def _flat(values: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the arguments, those of a decorated function (`*args`, `**kwargs`) one by one."""
    for value in values.values():
        yield from value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else [value]


def _without_model(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(item for item in value if not isinstance(item, LoopPolicy))
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if not isinstance(item, LoopPolicy)}
    return value


class RolloutGroup(list[Any]):
    """Members of a group: calls of a rollout before `gather`, and trajectories with their rewards after it."""

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each trajectory; None if it failed or could not be scored."""
        return [trajectory.reward for trajectory in self]

    @property
    def failures(self) -> list[schema.Failure]:
        return [trajectory.failure for trajectory in self if trajectory.failure is not None]


def group(members: Iterable[Any]) -> RolloutGroup:
    """Return a group: the attempts at one task, which are compared with each other.

    members: coroutines of a rollout function that have not begun, or trajectories (`loop.Transcript`, or those of a
    group of `gather`). Raises SpecError for anything else, and for an empty group."""
    sources: dict[CodeType, str] = {}
    listed = [
        member if isinstance(member, Transcript | schema.Trajectory) else Call.of(member, sources) for member in members
    ]
    if not listed:
        raise SpecError.at("loop.group", "no members; expected at least one, such as rollout(model, scenario)")
    return RolloutGroup(listed)


class GatheredGroups(Sequence[RolloutGroup]):
    """GatheredGroups that `gather` returned, with their artifacts."""

    def __init__(self, groups: Sequence[RolloutGroup], trajectories: Artifact, scores: Artifact, policy: str):
        self._groups = list(groups)
        self._digest = digest_of(groups)
        self.trajectories = trajectories
        """Artifact of the stage `collect`."""
        self.scores = scores
        """Artifact of the stage `judge`."""
        self.policy = policy
        """Key of the checkpoint that played; empty for the base model."""

    def __getitem__(self, index: Any) -> Any:
        return self._groups[index]

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def unchanged(self) -> bool:
        """True if the trajectories are those of the artifacts, with the rewards of the judge."""
        return digest_of(self._groups) == self._digest

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the episodes and of their scores."""
        return {**self.trajectories.metrics, **self.scores.metrics}

    @property
    def reward(self) -> float | None:
        """Mean reward."""
        return self.scores.metrics.get("reward")


def digest_of(groups: Iterable[Iterable[Any]]) -> str:
    """Return the digest of trajectories with their rewards."""
    return json_digest([[repr(trajectory) for trajectory in group] for group in groups])
