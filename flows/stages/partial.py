"""Partial rollouts in the collect stage (`collect.partial`): what continues, what is complete, and what is paused.

A group is compared as a whole, so it leaves a collection only when all of its episodes have ended. The episodes of an
incomplete group, paused and ended ones, are in `paused.parquet` of the collection; the collection of a later round has
it as an input, continues the paused ones, and contains the group when it is complete. Such a group has the round in
which it began in its name, `SCENARIO@round-R`, because a later round may draw the same scenario.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from components.artifacts import Artifact
from components.inference.protocol import Sampling
from components.rollout.request import EpisodeRequest
from components.rollout.usage import PROVIDER_COST
from components.trajectories.groups import begun, by_scenario
from components.trajectories.schema import Trajectory
from components.trajectories.versions import PAUSED

FILE = "paused.parquet"
"""File of the incomplete groups."""


class Carried:
    """Episodes of the incomplete groups of an earlier collection; none without one."""

    def __init__(self, collection: Artifact | None):
        from components.trajectories.store import read_trajectories

        episodes = list(read_trajectories(collection.path / FILE)) if collection is not None else []
        self.paused = [trajectory for trajectory in episodes if PAUSED in trajectory.metrics]
        """Episodes to continue."""
        self.ended = [trajectory for trajectory in episodes if PAUSED not in trajectory.metrics]

    def requests(self, max_turns: int) -> list[EpisodeRequest]:
        """Return the requests of the paused episodes, with the seed and the sampling parameters of their begin."""
        names = [field.name for field in fields(Sampling)]
        return [
            EpisodeRequest(
                scenario=trajectory.scenario,
                sample=trajectory.sample,
                seed=trajectory.sampling["seed"],
                sampling=Sampling(**{name: trajectory.sampling[name] for name in names if name in trajectory.sampling}),
                max_turns=max_turns,
                paused=trajectory,
            )
            for trajectory in self.paused
        ]

    @property
    def sampled_tokens(self) -> float:
        """Number of tokens that earlier collections sampled of the paused episodes."""
        return sum(trajectory.metrics["sampled_tokens"] for trajectory in self.paused)

    def join(
        self, played: Sequence[Trajectory], round_: int, folder: Path
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the episodes of complete groups, and metrics; write those of incomplete groups into the folder of the
        collection.

        played: episodes of this collection, ended or paused. round_: its round, from 1, which names the groups that
        begin in it and are incomplete."""
        from components.trajectories.store import write_trajectories

        complete: list[Trajectory] = []
        incomplete: list[Trajectory] = []
        for group in by_scenario([*self.ended, *played]).values():
            members = sorted(group, key=lambda member: member.sample)
            if any(PAUSED in member.metrics for member in members):
                incomplete += [begun(member, round_) for member in members]
            else:
                complete += members
        write_trajectories(folder / FILE, incomplete)
        metrics = {
            "paused": float(sum(PAUSED in member.metrics for member in incomplete)),
            "continued": float(len(self.paused)),
            "waiting": float(sum(PAUSED not in member.metrics for member in incomplete)),
        }
        if any(PROVIDER_COST in trajectory.metrics for trajectory in played):
            metrics[PROVIDER_COST] = sum(trajectory.metrics.get(PROVIDER_COST, 0.0) for trajectory in played)
        return complete, metrics
