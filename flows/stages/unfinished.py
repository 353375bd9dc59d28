"""Return of shards with failed episodes to the unfinished state, so that the next attempt plays them again."""

from __future__ import annotations

from collections.abc import Sequence

from components.artifacts import Artifact, Store
from components.json_text import read_json


def forget_failures(shards: Sequence[Artifact], store: Store, reason: str) -> None:
    """Remove the artifacts of shards with failed episodes; their finished episodes stay for the next attempt."""
    from components.trajectories.store import read_trajectories
    from flows.stages.episodes import FinishedEpisodes

    for shard in shards:
        trajectories = list(read_trajectories(shard.path / "trajectories.parquet"))
        if all(trajectory.failure is None for trajectory in trajectories):
            continue
        seconds = read_json(shard.path / "times.json")
        episodes = FinishedEpisodes(store.scratch(shard.key))
        for trajectory in trajectories:
            if trajectory.failure is None:
                episodes.add(trajectory, seconds.get(trajectory.id, 0.0))
        episodes.flush()
        store.discard(shard.key, reason)
