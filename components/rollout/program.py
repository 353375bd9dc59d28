"""Episodes of a program of one's own, as components that stages build.

The coroutines and the data of a loop in Python (`flows.loop`) exist in its process only. The specs of stages name them
by digests of their content (`ProgramScenarios`, `play`), and the stages take them from `PROGRAM`. In another process
the episodes cannot be played, only read from the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from components.environments.protocol import Messages, Step
from components.errors import JudgeError, ResourceError
from components.trajectories.schema import Scenario, Score, Trajectory


class RolloutProgram(Protocol):
    """Episodes of one collection or evaluation."""

    @property
    def digest(self) -> str:
        """Digest of the content of the scenarios."""
        ...

    @property
    def scenarios(self) -> Sequence[Scenario]: ...

    async def play(self, scenario: Scenario, sample: int, base_url: str, api_key: str) -> Any:
        """Play one episode and return what a custom agent returns (`components.rollout.own_agent`)."""
        ...

    async def score(self, group: Sequence[Trajectory]) -> Sequence[float]:
        """Return the rewards of a group by the program's own function."""
        ...

    def wake(self) -> None:
        """Wake the event loop that waits for `play`, after an interrupt of its thread."""
        ...


PROGRAM: ContextVar[RolloutProgram | None] = ContextVar("program", default=None)
"""Program whose episodes the current stage plays."""


class ProgramScenarios:
    """Scenarios of a program. Its rollouts play them without an environment.

    Args:
        digest: Digest of the content of the scenarios.
    """

    def __init__(self, digest: str):
        self._digest = digest

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return _running(self._digest).scenarios

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Scenario) -> Messages:
        raise _elsewhere()

    def step(self, action: dict[str, Any]) -> Step:
        raise _elsewhere()

    def close(self) -> None:
        pass


async def play(
    scenario: Scenario, sample: int, base_url: str, api_key: str, *, digest: str, name: str, source: str
) -> Any:
    """Play an episode of a program, as `agent.function`. digest: of its scenarios. name, source: name of the rollout
    function, and digest of its source. Raises ResourceError outside of the program."""
    return await _running(digest).play(scenario, sample, base_url, api_key)


play.must_call = True  # type: ignore[attr-defined]  # without a call of the policy an episode has failed


class ProgramReward:
    """Reward of a group by a function of a program.

    Args:
        name: Name of the function.
        source: Digest of its source.
    """

    waits = True

    def __init__(self, name: str, source: str):
        self._name = name

    async def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each trajectory. Raises ResourceError outside of the program."""
        rewards = await _running().score(group)
        if len(rewards) != len(group):
            raise JudgeError(f"{self._name} returned {len(rewards)} rewards for {len(group)} trajectories")
        return [Score(episode.id, float(reward)) for episode, reward in zip(group, rewards, strict=True)]


def _running(digest: str | None = None) -> RolloutProgram:
    program = PROGRAM.get()
    if program is None or digest not in (None, program.digest):
        raise _elsewhere()
    return program


def _elsewhere() -> ResourceError:
    return ResourceError(
        "these episodes are played by a Python program (flows.loop), whose rollout function exists in its process "
        "only; run the program again: finished stages come from the cache"
    )
