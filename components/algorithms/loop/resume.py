"""State of an unfinished training, saved so that a killed training resumes at the same sample.

    FOLDER/<steps taken>/    a checkpoint (`checkpoint`) and steps.json: the metrics of the steps taken in this stage

A folder is written under a temporary name, synced and renamed; only then is the previous one removed. So whenever the
process dies, there is a complete folder or none yet. Files are checked against the digests in steps.json; a damaged
folder is not used.

Batches are a function of the stage's arguments, so the number of steps taken defines where to resume. Policy, optimizer
and random state are restored as of the last saved step. The result is bitwise identical to that of an uninterrupted
training. Of several processes, which all have the same state, the first one writes and all read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from components.algorithms.loop import checkpoint, distributed
from components.algorithms.loop.guards import STRIKES, TrainingGuards
from components.algorithms.policy.policy import Policy
from components.algorithms.trainer import TrainedModule
from components.artifacts import sync_tree
from components.artifacts.keys import file_digest
from components.errors import ArtifactDamaged, ResourceError
from components.json_text import read_json

log = logging.getLogger(__name__)

STEPS = "steps.json"


class UnfinishedTraining:
    """State of one training in its stage's scratch folder.

    every: seconds between two saves; 0 saves after each gradient step. `steps` contains the metrics of each gradient
    step taken so far, including those of an interrupted run.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        critic: TrainedModule | None = None,
        *,
        algorithm: str,
        every: float,
    ):
        self.steps: list[dict[str, float]] = []
        self._folder = folder
        self._policy = policy
        self._optimizer = optimizer
        self._critic = critic
        self._names = [name for module in (policy, critic) if module is not None for name in module.parameters]
        self._algorithm = algorithm
        self._every = every
        self._saved_at = time.monotonic()
        self._saved_steps = 0
        self._consistent = True
        self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._mark_inconsistent())

    def resume(self, on_step: Callable[[dict[str, float]], None]) -> Callable[[dict[str, float]], None]:
        """Restore the state that an interrupted run saved, and call `on_step` for each of its gradient steps. Return
        the function that records a further step and calls `on_step` for it. Raises ResourceError if the processes of a
        training find different states."""
        self._restore()
        if not distributed.all_equal(self._saved_steps):
            raise ResourceError(
                f"the processes of this training found different saved states in {self._folder}; this process found "
                f"the one after {self._saved_steps} gradient steps. All processes must read the same scratch folder: "
                "put it on a shared disk"
            )
        for metrics in self.steps:
            on_step(metrics)

        def record(metrics: dict[str, float]) -> None:
            self.record_step(metrics)
            on_step(metrics)

        return record

    def write_log(self, folder: Path, guards: TrainingGuards) -> None:
        """Write the metrics of all gradient steps, and the strikes of the guards, to a checkpoint."""
        (folder / "log.jsonl").write_text("".join(json.dumps(metrics) + "\n" for metrics in self.steps))
        if strikes := guards.strikes():
            (folder / STRIKES).write_text("".join(json.dumps(strike) + "\n" for strike in strikes))

    def _restore(self) -> None:
        if self._folder.exists() and not self._folder.is_dir():
            log.warning("%s is no folder of a training; it is removed", self._folder)
            self._folder.unlink(missing_ok=True)  # by all processes of a training
        for folder in sorted(self._folder.glob("[0-9]*"), reverse=True):
            try:
                record = read_json(folder / STEPS)
                if record["files"] != _digests(folder, record["steps"]):
                    raise ValueError("its files do not match their digests")
                last = int(record["steps"][-1]["step"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                log.warning("%s cannot be used, the training resumes from an earlier state: %s", folder, error)
                continue
            try:
                self._policy.load(self._policy.folder(folder))
                if self._critic is not None:
                    self._critic.load(folder / checkpoint.CRITIC)
                state = {"optimizer": self._optimizer, "names": self._names, "loss_scale": self._policy.loss_scale}
                checkpoint.load_state(folder, algorithm=self._algorithm, **state)
            except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
                raise ArtifactDamaged(
                    f"{folder} is no state of this training ({type(error).__name__}: {error}); remove {self._folder} "
                    "to start the training again"
                ) from None
            self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
            self.steps = record["steps"]
            self._saved_steps = len(self.steps)
            log.info("training resumes after gradient step %d", last)
            return

    def record_step(self, metrics: dict[str, float]) -> None:
        """Record a gradient step; save the state if it is due."""
        self.steps.append(metrics)
        self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
        self._consistent = True
        due = time.monotonic() - self._saved_at >= self._every
        if distributed.any_process(due) if self._policy.is_sharded else due:
            self.save()

    @contextlib.contextmanager
    def save_on_interrupt(self) -> Iterator[None]:
        """Save the state on Ctrl-C or SIGTERM within the context, unless they interrupt the update of the weights."""
        try:
            yield
        except KeyboardInterrupt:
            sharded = self._policy.is_sharded  # the other processes may have been stopped at another step
            if (
                not sharded
                and self._consistent
                and self._policy.has_trained_weights
                and len(self.steps) > self._saved_steps
            ):
                self.save()
            raise
        finally:
            self._hook.remove()  # break the reference cycle of hook and optimizer, so that memory is freed

    def save(self) -> None:
        """Write the state after the last gradient step. A full disk causes a warning and does not stop the training."""
        self._saved_at = time.monotonic()
        gathered = self._policy.gather()
        moments = checkpoint.moments(self._optimizer, self._names) if gathered or distributed.first() else ({}, {})
        if not distributed.first():
            return
        part = self._folder / f"part-{os.getpid()}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self._policy.save(self._policy.folder(part), gathered)
            if self._critic is not None:
                self._critic.save(part / checkpoint.CRITIC)
            checkpoint.save_state(
                part,
                algorithm=self._algorithm,
                step=int(self.steps[-1]["step"]),
                moments=moments,
                loss_scale=self._scale,
                random=self._random,
            )
            (part / STEPS).write_text(json.dumps({"files": _digests(part, self.steps), "steps": self.steps}))
            sync_tree(part)
            part.rename(self._folder / f"{len(self.steps):08d}")
        except OSError as error:
            log.warning(
                "the unfinished training could not be saved; if it is killed, it cannot resume from this step: %s",
                error,
            )
            shutil.rmtree(part, ignore_errors=True)
            return
        if self._saved_steps:
            shutil.rmtree(self._folder / f"{self._saved_steps:08d}", ignore_errors=True)
        self._saved_steps = len(self.steps)

    def _mark_inconsistent(self) -> None:
        self._consistent = False


def _digests(folder: Path, steps: list[dict[str, float]]) -> dict[str, str]:
    return {STEPS: hashlib.sha256(json.dumps(steps).encode()).hexdigest()} | {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != STEPS
    }
