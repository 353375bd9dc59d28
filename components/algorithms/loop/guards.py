"""Guards: what is done about a gradient step whose numbers left the range in which they make sense.

    non_finite    the loss or the gradient is infinite or no number
    high_kl       the KL to the policy that ratios are taken to (nats a token) is above max_kl
    low_entropy   the mean entropy of the policy (nats a token) is below min_entropy

`warn` takes the step and says so; `skip` leaves weights and optimizer as they are and goes on with the next batch;
`stop` ends the training before a checkpoint is written. Each strike is a line in guards.jsonl of the checkpoint: the
numbers of the step, the trajectories of its batch, and those that did it, the worst first, each measured by itself.
What stopped a training lies in the stage's scratch folder: diverged.json, the same line, and diverged.parquet, the
batch itself.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from components.algorithms.loop import checkpoint, distributed
from components.algorithms.spec import Action
from components.errors import TrainingDiverged
from components.trajectories.schema import Trajectory
from components.trajectories.store import write_trajectories

log = logging.getLogger(__name__)

RECORD, BATCH, STRIKES = "diverged.json", "diverged.parquet", "guards.jsonl"
MOST_NAMED = 5
"""Trajectories that are named as those that did it."""

Measure = Callable[[Trajectory], Mapping[str, float]]
"""The numbers of a step, for one trajectory by itself."""


class Guards:
    """The strikes of one training; those of an earlier try with the same scratch folder are among them."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self._file = scratch / STRIKES

    def strike(
        self,
        guard: str,
        action: Action,
        step: int,
        measured: Mapping[str, float],
        batch: Sequence[Trajectory],
        measure: Measure,
        outlier: Callable[[Trajectory], tuple[int, float]] | None = None,
        *,
        by: str,
        advice: str,
    ) -> bool:
        """Writes the strike down and does what the rule says. by: the measured value that tells who did it; the largest
        did, one that is not finite first. outlier: names the token of the worst trajectory that has moved furthest, and
        by how many nats. Returns whether the step is skipped; raises TrainingDiverged to stop."""
        drawn = checkpoint.random_states()
        each = {trajectory.id: dict(measure(trajectory)) for trajectory in batch}
        checkpoint.set_random_states(drawn)  # a measurement is no draw: what comes after a warning is as without it
        worst = sorted(each, key=lambda name: _size(each[name][by]), reverse=True)[:MOST_NAMED]
        record: dict[str, Any] = {
            "step": step,
            "guard": guard,
            "action": action,
            **_shown(measured),
            "worst": [{"trajectory": name, **_shown(each[name])} for name in worst],
            "trajectories": list(each),
        }
        if outlier is not None:
            token, nats = outlier(next(trajectory for trajectory in batch if trajectory.id == worst[0]))
            record["outlier"] = {"trajectory": worst[0], "token": token, "log_ratio": nats}
            advice = f"Its sampled token {token} has moved furthest, by {nats:+.2f} nats. {advice}"
        if action == "stop":
            self.stop(record, measured, batch, f"{guard}: {worst[0]} did most of it. {advice}")
        if distributed.first():
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        done = "the step is taken" if action == "warn" else "the step is left out"
        log.warning("gradient step %d: %s (%s); %s. %s", step, guard, _listed(measured), done, advice)
        return action == "skip"

    def stop(
        self, record: Mapping[str, Any], measured: Mapping[str, float], batch: Iterable[Trajectory], advice: str
    ) -> NoReturn:
        """Keeps the record and the batch, and raises TrainingDiverged."""
        if distributed.first():
            (self._scratch / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            write_trajectories(self._scratch / BATCH, batch)
        distributed.wait()  # a launcher ends all processes when one of them fails
        raise TrainingDiverged(
            f"gradient step {record['step']}: {_listed(measured)}. No checkpoint was written; the batch is in "
            f"{self._scratch / BATCH}, the numbers in {RECORD} beside it. {advice}"
        )

    def strikes(self) -> list[dict[str, Any]]:
        """Every strike that stopped nothing, by step; of a step that was taken twice, because the training was killed
        after it, the latter."""
        if not self._file.exists():
            return []
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # torn by a kill; the step was not saved either and is taken again
                continue
            found[record["step"], record["guard"]] = record
        return [found[key] for key in sorted(found)]


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _shown(measured: Mapping[str, float]) -> dict[str, float | str]:
    """Values that are not finite as text: JSON has no word for them."""
    return {name: value if math.isfinite(value) else str(value) for name, value in measured.items()}


def _listed(measured: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
