"""Source of episodes for programs of others: a configured environment, its scenarios, its reward and its turn limit.

    source = load(["environment=shop", "environment.train=64", "reward=outcome"])

The overrides are those of `flows.run`. A scenario is chosen by its id or by a seed: seed N is scenario N modulo the
number of scenarios of the split. An episode ends after `agent.max_turns` actions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.environments.protocol import ACT_TOOL, Environment
from components.errors import JudgeError, Problem, SpecError
from components.rewards.judge import RewardCaller, reject_running_statistics
from components.rewards.protocol import ModelReward
from components.specs.base import nearest
from components.specs.registered import registered_name
from components.trajectories.schema import Scenario, Trajectory
from flows.interop.actions import InvalidRequest

if TYPE_CHECKING:
    from flows.experiment.spec import ExperimentSpec


class EpisodeReward:
    """Scores finished episodes, as `reward` of the configuration defines it.

    The reward of training scores a whole episode, so its value belongs to the last step; the steps before have reward
    0. With `reward=returned` each step has the environment's own reward. In both cases the rewards of an episode sum to
    its score. Raises SpecError for a reward that needs a model or statistics of other episodes."""

    def __init__(self, reward: Any):
        self._caller = RewardCaller(reward)
        reject_running_statistics(reward, "reward")
        if isinstance(reward, ModelReward):
            message = (
                f"{type(reward).__name__} asks a model; expected a reward that is computed by rules, such as outcome"
            )
            raise SpecError([Problem("reward", message)])
        self.of_steps = bool(getattr(reward, "of_steps", False))
        """True if the rewards of the environment's steps are the rewards of the steps."""

    async def score(self, trajectory: Trajectory) -> float:
        """Return the score of an episode. Raises JudgeError if the reward cannot score it."""
        (score,) = await self._caller.call_group_async([trajectory])
        if score.reward is None:
            reason = score.failure.message if score.failure else "no reason given"
            raise JudgeError(f"reward: {trajectory.scenario.id} is unscored: {reason}")
        return score.reward


SPLIT = "train"
"""Default split."""
Inspected = tuple[tuple[Scenario, ...], tuple[dict[str, Any], ...], int | None]


@dataclass(frozen=True)
class EpisodeSource:
    """Configured environment with the scenarios of one split."""

    name: str
    """Name of the environment: `shop`."""
    description: str
    """First paragraph of its documentation."""
    make: Callable[[], Environment]
    """Factory of instances; each serves one episode at a time."""
    make_reward: Callable[[], Any]
    """Factory of the reward that scores an episode."""
    split: str
    scenarios: tuple[Scenario, ...]
    tools: tuple[dict[str, Any], ...]
    """Tools of the first scenario, in OpenAI's format; other scenarios may have others."""
    max_turns: int
    """Maximum number of actions of an episode."""
    step_timeout: float | None = None
    """Time limit of a reset or step in seconds; None: no limit."""
    instances: int | None = None
    """Maximum number of instances that the environment allows at once (`components.rollout.pool`); None: no limit."""

    @property
    def takes_text(self) -> bool:
        """True if actions are text: the environment has no tools, or only the tool `act`."""
        return [tool["function"]["name"] for tool in self.tools] in ([], [ACT_TOOL])

    def scenario(self, *, id: str | None = None, seed: int | None = None) -> Scenario:
        """Return a scenario by id, or by seed modulo the number of scenarios. Raises InvalidRequest for an unknown
        id."""
        if id is None:
            return self.scenarios[(seed or 0) % len(self.scenarios)]
        for scenario in self.scenarios:
            if scenario.id == id:
                return scenario
        close = nearest(id, [scenario.id for scenario in self.scenarios])
        hint = f". Did you mean {close!r}?" if close else ""
        raise InvalidRequest(f"scenario = {id!r:.100}: {self.name} has no such scenario in split {self.split}{hint}")


def load(overrides: Sequence[str], split: str = SPLIT, config_dir: str | Path | None = None) -> EpisodeSource:
    """Return the source that overrides describe, such as `environment=shop`. Raises SpecError, ResourceError, and
    EnvironmentFailed if the environment cannot start an episode."""
    from flows.experiment.compose import check

    return of_spec(check(list(overrides), config_dir=config_dir)[0], split)


def of_spec(spec: ExperimentSpec, split: str = SPLIT) -> EpisodeSource:
    """Return the source of an experiment's environment, reward and turn limit."""
    from flows.interop.source import EpisodeReward

    environment = spec.required_environment
    factory = environment.factory()
    name = (registered_name(factory) or environment.target).rpartition(".")[2]
    EpisodeReward(spec.reward.build())  # raises SpecError for a reward that scores no single episode
    scenarios, tools, instances = _inspect(environment.build, name, split)
    return EpisodeSource(
        name=name,
        description=" ".join((inspect.getdoc(factory) or name).split("\n\n")[0].split()),
        make=environment.build,
        make_reward=spec.reward.build,
        split=split,
        scenarios=scenarios,
        tools=tools,
        max_turns=spec.agent.max_turns,
        step_timeout=spec.collect.step_timeout,
        instances=instances,
    )


def _inspect(make: Callable[[], Environment], name: str, split: str) -> Inspected:
    """Return the scenarios of a split, the tools of the first one, and the limit of instances, from an instance that is
    closed afterwards."""
    from components.aio import run
    from components.rollout.agent import ask
    from flows.qualification.recording import TestedInstance

    async def inspect_instance() -> Inspected:
        instance = TestedInstance(await ask(make))
        try:
            scenarios = tuple(await instance.scenarios(split))
            if not scenarios:
                message = f"{split!r}: {name} has no scenarios in it; expected train or heldout"
                raise SpecError([Problem("--split", message)])
            tools = tuple((await instance.reset(scenarios[0], "interop")).tools)
            return scenarios, tools, getattr(instance.environment, "instances", None)
        finally:
            await instance.close()

    return run(inspect_instance())
