"""Runs of the models: each model appears in `flows.runs` and MLflow like an experiment, with its losses by step.

A run begins with its model, and ends with the session (finished) or with the process (killed); the next process
continues it with the model's next request. An error of MLflow does not fail the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from flows.execution.tracking import recorded
from flows.experiment.spec import ExperimentSpec
from flows.history.records import RecordWriter

if TYPE_CHECKING:
    from components.tracking.mlflow_tracker import Tracker
    from flows.train_service.entries import ModelEntry

logger = logging.getLogger(__name__)


class ModelRuns:
    """Runs of the models in this process. spec, overrides: of the service."""

    def __init__(self, spec: ExperimentSpec, overrides: Sequence[str]):
        self._spec, self._overrides = spec, overrides
        self._open: dict[str, tuple[ExitStack, Tracker, RecordWriter]] = {}

    def begin(self, entry: ModelEntry) -> None:
        """Begin the run of a model, or continue it. Raises ResourceError if MLflow cannot be used."""
        if entry.id in self._open:
            return
        assert entry.model is not None
        seed, lora = entry.config.seed or 0, entry.model.lora
        model = self._spec.model.model_copy(update={"lora": lora})
        spec = self._spec.model_copy(update={"seed": seed, "model": model})
        overrides = [*self._overrides, f"seed={seed}", f"model.lora.rank={lora.rank}"]
        with ExitStack() as stack:
            tracker, writer = stack.enter_context(recorded(spec, overrides, resumed=entry.run))
            tracker.set_tags({"training_run": entry.id})
            entry.run = tracker.run_id
            self._open[entry.id] = stack.pop_all(), tracker, writer

    def log(self, entry: ModelEntry, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an optimizer step."""
        from mlflow.exceptions import MlflowException

        _, tracker, writer = self._open[entry.id]
        named = {name.replace(":", "_"): value for name, value in metrics.items()}
        run, step = writer.run, entry.steps
        run.result = {**named, "steps": step, "seconds": time.time() - run.started}
        try:
            writer.records.write(run)
            tracker.outbox.put(lambda: tracker.log_metrics({f"train/{name}": named[name] for name in named}, step))
        except (OSError, MlflowException) as error:
            logger.warning("step %d of %s is not logged: %s", step, entry.id, error)

    def end(self, entry: ModelEntry) -> None:
        """End the run of a model, if this process has begun it."""
        if entry.id in self._open:
            self._open.pop(entry.id)[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stack, _, _ in self._open.values():
            stack.__exit__(*error)  # type: ignore[arg-type]
