"""Background work (`collect.overlap`) in a plan: its stages, and the time for which the run waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from flows.execution.overlap import BackgroundResult, Work
from flows.experiment.requests import StageRunner

if TYPE_CHECKING:
    from flows.planning.run_plan import PlannedStage

PLACE = "process"
"""Place of background work."""


class PlannedBackground:
    """`BackgroundRunner` of a plan. It plans a work where the run waits for it. The work runs from the start of the
    stage beside which it is started; what it takes after the end of the stage at whose end the run waits for it counts
    in the time of the run."""

    def __init__(self, planned: list[PlannedStage], call: StageRunner, price: Callable[[str], float | None]):
        self._planned = planned
        self._call = call
        self._price = price
        """Price of an hour of a kind of stage."""
        self._pending: deque[tuple[str, float, Work]] = deque()
        """Works that the run did not wait for, with the label of the stage beside which they start, and its start."""

    @contextmanager
    def __call__(self, label: str, *works: Work) -> Iterator[BackgroundResult]:
        now = self._now()
        self._pending.extend((label, now, work) for work in works)
        result = BackgroundResult()
        yield result
        waited, first = self._now(), len(self._planned)
        beside, begin, work = self._pending.popleft()
        result.value = work(self._call)
        kind = label.partition("[")[0]
        for index, stage in enumerate(self._planned[first:], first):
            seconds = stage.seconds or 0.0
            overlap = min(seconds, max(0.0, waited - begin))
            begin += seconds
            prices = [self._price(name) or 0.0 for name in (stage.stage, kind)] if overlap else [0.0]
            cost = None if stage.cost is None else stage.cost - overlap / 3600 * min(prices)
            self._planned[index] = replace(stage, beside=beside, where=PLACE, overlapped_seconds=overlap, cost=cost)

    def close(self) -> None:
        self._pending.clear()

    def _now(self) -> float:
        """Return the time of the run up to here, in seconds."""
        return sum((stage.seconds or 0.0) - stage.overlapped_seconds for stage in self._planned)
