"""Guards: checks of a gradient step whose metrics left their expected range.

    non_finite    the loss or the gradient is infinite or NaN
    high_kl       the KL divergence from the old policy of the ratios (nats per token) is above max_kl
    low_entropy   the mean entropy of the policy (nats per token) is below min_entropy

`warn` takes the step and logs a warning. `skip` leaves weights and optimizer unchanged and continues with the next
batch. `stop` ends the training before a checkpoint is written. Each strike is a line in guards.jsonl of the checkpoint:
the metrics of the step, the trajectories of its batch, and those that contributed most, the worst first, each measured
separately. A guard that stops the training writes to the stage's scratch folder: diverged.json with the same line, and
diverged.parquet with the batch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from components.algorithms.loop import checkpoint, distributed
from components.algorithms.spec import Action
from components.errors import TrainingDiverged
from components.json_text import parse_json
from components.trajectories.schema import Trajectory
from components.trajectories.store import write_trajectories

log = logging.getLogger(__name__)

RECORD, BATCH, STRIKES = "diverged.json", "diverged.parquet", "guards.jsonl"
MAX_LISTED = 5
"""Largest number of trajectories in the list of the worst ones."""


@dataclass(frozen=True)
class GuardRule:
    """Rule of a guard."""

    guard: str
    action: Action
    by: str
    """Metric that ranks the trajectories of a batch; values that are not finite come first, then the largest."""
    advice: str


Measure = Callable[[Trajectory], Mapping[str, float]]
"""Function that returns the metrics of a step for a single trajectory."""


class TrainingGuards:
    """Strikes of one training, including those of an interrupted run with the same scratch folder."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self._file = scratch / STRIKES

    def strike(
        self,
        rule: GuardRule,
        step: int,
        measured: Mapping[str, float],
        batch: Sequence[Trajectory],
        measure: Measure,
        outlier: Callable[[Trajectory], tuple[int, float]] | None = None,
    ) -> bool:
        """Record the strike and apply the action. Return True if the step is skipped; raise TrainingDiverged to stop.

        outlier: returns the token of the worst trajectory whose log-probability has changed most, and the change in
        nats.
        """
        random_states = checkpoint.random_states()
        measured_alone = {trajectory.id: dict(measure(trajectory)) for trajectory in batch}
        checkpoint.set_random_states(random_states)  # measurements must not change what follows a warning
        worst = sorted(measured_alone, key=lambda name: _size(measured_alone[name][rule.by]), reverse=True)[:MAX_LISTED]
        record: dict[str, Any] = {
            "step": step,
            "guard": rule.guard,
            "action": rule.action,
            **_json_values(measured),
            "worst": [{"trajectory": name, **_json_values(measured_alone[name])} for name in worst],
            "trajectories": list(measured_alone),
        }
        advice = rule.advice
        if outlier is not None:
            token, nats = outlier(next(trajectory for trajectory in batch if trajectory.id == worst[0]))
            record["outlier"] = {"trajectory": worst[0], "token": token, "log_ratio": nats}
            advice = f"Its sampled token {token} has changed most in log-probability, by {nats:+.2f} nats. {advice}"
        if rule.action == "stop":
            self.stop(record, measured, batch, f"{rule.guard}: {worst[0]} contributed most. {advice}")
        if distributed.first():
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        outcome = "the step is taken" if rule.action == "warn" else "the step is skipped"
        log.warning("gradient step %d: %s (%s); %s. %s", step, rule.guard, _listed(measured), outcome, advice)
        return rule.action == "skip"

    def stop(
        self, record: Mapping[str, Any], measured: Mapping[str, float], batch: Iterable[Trajectory], advice: str
    ) -> NoReturn:
        """Write the record and the batch, and raise TrainingDiverged."""
        if distributed.first():
            (self._scratch / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            write_trajectories(self._scratch / BATCH, batch)
        distributed.wait()  # a launcher kills all processes when one of them fails
        raise TrainingDiverged(
            f"gradient step {record['step']}: {_listed(measured)}. No checkpoint was written; the batch is in "
            f"{self._scratch / BATCH}, the numbers in {RECORD} beside it. {advice}"
        )

    def strikes(self) -> list[dict[str, Any]]:
        """Return the strikes that did not stop the training, by step. If a step was taken twice because the training
        was killed after it, only its last strike is returned."""
        if not self._file.exists():
            return []
        records: dict[tuple[int, str], dict[str, Any]] = {}
        for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = parse_json(line)
                records[int(record["step"]), str(record["guard"])] = record
            except (ValueError, TypeError, KeyError):  # truncated by a kill (the step is repeated), or damaged
                continue
        return [records[key] for key in sorted(records)]


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _json_values(measured: Mapping[str, float]) -> dict[str, float | str]:
    """Return the metrics with values that are not finite as text, because JSON cannot represent them."""
    return {name: value if math.isfinite(value) else str(value) for name, value in measured.items()}


def _listed(measured: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
