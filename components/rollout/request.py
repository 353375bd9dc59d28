"""Request of an episode: the task, and what determines its result apart from engine, environment and player."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from components.inference.protocol import Sampling
from components.trajectories.groups import aside
from components.trajectories.schema import Scenario, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to play."""

    scenario: Scenario
    """Task. Its id is also the group of the episode."""
    sample: int
    """Index of the episode in its group, from 0."""
    seed: int
    """Seed from which the seeds of all responses derive."""
    sampling: Sampling
    """Sampling parameters of all responses."""
    max_turns: int
    """Maximum number of assistant messages, or of model calls of a custom agent. The episode is truncated there."""
    timeout: float | None = None
    """Time limit of the episode in seconds; None: no limit."""
    step_timeout: float | None = None
    """Time limit of each environment call of the agent loop in seconds; None: no limit but `timeout`."""
    paused: Trajectory | None = None
    """Paused episode that is continued (`players.partial`); None: the episode begins."""
    raise_unreachable: bool = False
    """True: EnvironmentUnavailable propagates, so that the caller can retry the episode. False: it is recorded as a
    failure."""

    @property
    def id(self) -> str:
        """Identifier of the episode's trajectory."""
        return f"{self.scenario.id}/{self.sample}"

    def aside(self, name: str) -> EpisodeRequest:
        """Return the request of a derived episode in the separate group `name`, with a seed of its own."""
        return replace(self, scenario=aside(self.scenario, name), seed=derived_seed(self.seed, name))

    def trajectory(self, policy: str) -> Trajectory:
        """Return the trajectory of the episode before its first message. policy: version of the acting policy."""
        return Trajectory(
            id=self.id,
            scenario=self.scenario,
            sample=self.sample,
            histories=[],
            policy=policy,
            sampling={**self.sampling.settings(), "seed": self.seed},
        )


def episode_requests(
    scenarios: Sequence[Scenario],
    group_size: int,
    *,
    sampling: Sampling,
    max_turns: int,
    seed: int,
    temperature_step: float = 0.0,
) -> list[EpisodeRequest]:
    """Return the requests of `group_size` episodes of each scenario, ordered by scenario and sample. The seed of an
    episode derives from `seed` and the episode's id. temperature_step: sample k uses temperature + k ·
    temperature_step."""
    return [
        EpisodeRequest(
            scenario=scenario,
            sample=sample,
            seed=derived_seed(seed, f"{scenario.id}/{sample}"),
            sampling=replace(sampling, temperature=sampling.temperature + sample * temperature_step),
            max_turns=max_turns,
        )
        for scenario in scenarios
        for sample in range(group_size)
    ]


def derived_seed(seed: int, name: str) -> int:
    """Return the seed of an episode or of a part of one, derived from the parent seed and the name only."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")
