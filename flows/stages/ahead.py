"""Judging while episodes are collected (`judge.ahead`).

The collect stage passes each finished episode on, and a thread judges a group as soon as all of its episodes have
finished; a reward of single episodes judges each at once. So the answers of a service are in flight while other
episodes are played. The scores are stored beside the trajectories, outside the artifact's content digest, with the
digest of the reward that gave them. The judge stage takes the scores of an equal reward in place of judging again, and
judges what is missing; its key and its result do not depend on judging ahead.

An error of the judge does not end the collection: it is logged, and the judge stage judges the rest, where it is
reported. Judgements of an unfinished stage are kept in its scratch folder, as episodes are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from components.errors import EspalierError
from components.rewards.protocol import GroupReward
from components.rollout.collect_spec import CollectSpec
from components.trajectories.schema import Score, Trajectory
from components.trajectories.versions import PAUSED
from flows.stages.ahead_scores import write_ahead
from flows.stages.base import Context, silent
from flows.stages.judge import JudgeStage, judging, reward_digest

log = logging.getLogger(__name__)

PAID = ("spent", "unpriced_calls")
"""Metrics of the judge's calls that belong to the cost of the collection."""
GRACE = 3.0
"""Seconds that a stopped judge gets to keep its judgements."""


@contextmanager
def judging_ahead(
    spec: JudgeStage | None, context: Context, collect: CollectSpec
) -> Iterator[tuple[Context, JudgeAhead | None]]:
    """Provide the context of a collection whose finished episodes are judged, and their judge; without `spec`, the
    context as it is. At a normal end of the block, wait for the judgements under way."""
    if spec is None:
        yield context, None
        return
    ahead = JudgeAhead(spec, context, collect.group_size, partial=collect.partial is not None)
    try:
        yield replace(context, on_episode=ahead.add), ahead
    except BaseException:
        ahead.stop()
        raise
    ahead.finish()


class JudgeAhead:
    """Judge of the finished episodes of a collection, in a thread."""

    def __init__(self, spec: JudgeStage, context: Context, group_size: int, *, partial: bool = False):
        self.scores: dict[str, Score] = {}
        """Scores by trajectory id."""
        self.metrics: dict[str, float] = {}
        """Cost of the judge's calls, and the number of scores."""
        self._spec = spec
        self._context = replace(context, progress=silent)
        self._reward = spec.build({})
        self._unit = group_size if partial or isinstance(self._reward, GroupReward) else 1
        """Number of episodes that are judged together. With partial rollouts an episode is judged with its group, which
        otherwise gets another name."""
        self._groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
        self._ready: queue.SimpleQueue[list[Trajectory] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="judge ahead")
        self._thread.start()

    def add(self, *trajectories: Trajectory) -> None:
        """Add finished episodes; paused ones are not judged."""
        for trajectory in trajectories:
            if PAUSED in trajectory.metrics:
                continue
            if self._unit == 1:
                self._ready.put([trajectory])
                continue
            group = self._groups[trajectory.group]
            group.append(trajectory)
            if len(group) == self._unit:
                self._ready.put(sorted(self._groups.pop(trajectory.group), key=lambda member: member.sample))

    def finish(self) -> None:
        """Wait for the judgements under way."""
        self._ready.put(None)
        self._thread.join()

    def stop(self) -> None:
        """End without the judgements under way."""
        self._stopped.set()
        self._ready.put(None)
        self._thread.join(GRACE)

    def write(self, folder: Path) -> None:
        """Write the scores into the folder of the collection."""
        write_ahead(folder, self.scores.values(), reward_digest(self._spec))

    def _run(self) -> None:
        spec = self._spec
        try:
            with judging(self._reward, self._context, spec.judge, spec.model, name="ahead") as judged:
                self.scores = judged.finished
                for _ in judged(self._judgeable()):
                    if self._stopped.is_set():
                        break
                paid = {name: value for name, value in judged.figures().items() if name in PAID}
        except EspalierError as error:
            log.warning("judging ahead ended early; the judge stage judges the rest: %s", error)
        else:
            self.metrics = {"judged_ahead": float(len(self.scores)), **paid}

    def _judgeable(self) -> Iterator[Trajectory]:
        while (unit := self._ready.get()) is not None and not self._stopped.is_set():
            yield from unit
