"""Episodes of an evaluation whose reward has changed: the stored ones are judged again.

A reward does not change what a policy does. An evaluation in the store that differs from the requested one in its
reward alone has the requested episodes, so the stage takes them as if an interrupted attempt had finished them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from components.artifacts import MANIFEST, Artifact, stage_key
from components.json_text import read_json
from components.redaction import mask
from flows.stages.base import Context, Inputs, Stage, StageSpec
from flows.stages.finished import FinishedEpisodes

log = logging.getLogger(__name__)


def played_before(stage: Stage, spec: StageSpec, inputs: Inputs, context: Context) -> Artifact | None:
    """Return a stored evaluation with the same version, spec, inputs and seed, except for its reward; None if the
    folder has none."""
    digests = {name: artifact.digest for name, artifact in inputs.items()}
    wanted = _without_reward(mask(spec.key_part()))
    for artifact in context.store.manifests():
        if artifact.stage != stage.name or artifact.inputs.keys() != inputs.keys():
            continue
        part = read_json(artifact.path / MANIFEST)["spec"]
        if part is None:
            continue  # an artifact that no spec describes
        key = stage_key(stage.name, stage.version, part, digests, context.seed)
        if _without_reward(part) == wanted and key == artifact.key:
            return context.store.find(artifact.key)  # verifies the files
    return None


def _without_reward(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "reward"}


def adopt(played: Artifact, ids: Collection[str], context: Context) -> None:
    """Add the episodes with these ids, except failed ones, to the finished episodes of the stage."""
    from components.trajectories.store import read_trajectories

    assert context.scratch is not None
    episodes = FinishedEpisodes(context.scratch)
    missing = set(ids) - set(episodes.finished)
    seconds = read_json(played.path / "times.json")
    count = 0
    for trajectory in read_trajectories(played.path / "trajectories.parquet"):
        if trajectory.id in missing and trajectory.failure is None:
            episodes.add(trajectory, seconds.get(trajectory.id, 0.0))
            count += 1
    episodes.flush()
    if count:
        log.info("judging %d stored episodes of evaluation %s: only the reward differs", count, played.key[:12])
