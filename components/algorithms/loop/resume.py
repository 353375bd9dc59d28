"""State of an unfinished training, saved so that a killed training resumes at the same sample.

    FOLDER/<steps taken>/<process>-of-<processes>/    a part of the state (`parts`), and the critic of PPO (`critic`)

A state is used if all its parts are there and undamaged; the process that completes one removes the earlier ones. So
whenever processes die, the last complete state is there, or none yet. Processes of a training with sharded weights
write a part each; of others, which all have the same state, the first one writes.

The state is copied to host memory and written by a thread while the next steps compute; with `every` = 0 the training
waits until it is written.

Batches are a function of the stage's arguments, so the number of steps taken defines where to resume. Policy, optimizer
and random state are restored as of the last saved step. The result is bitwise identical to that of an uninterrupted
training with the same number of processes; with another one, it differs by the order of summation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from components.algorithms.loop import checkpoint, distributed, parts
from components.algorithms.loop.guards import STRIKES, TrainingGuards
from components.algorithms.policy.policy import Policy
from components.algorithms.trainer import TrainedModule
from components.compute.spec import SaveEvery
from components.errors import ArtifactDamaged, ResourceError
from components.json_text import read_json

log = logging.getLogger(__name__)

SHORTEST = 30.0
"""Smallest number of seconds between two saves with `auto`."""
SHARE = 20.0
"""Times that the seconds of a save pass between two of them with `auto`."""


class UnfinishedTraining:
    """State of one training in its stage's scratch folder.

    every: seconds between two saves; 0 saves after each gradient step, `auto` chooses by the time that a save takes.
    `steps` contains the metrics of each gradient step taken so far, including those of an interrupted run.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        critic: TrainedModule | None = None,
        *,
        every: SaveEvery,
    ):
        self.steps: list[dict[str, float]] = []
        self._folder = folder
        self._policy = policy
        self._optimizer = optimizer
        self._critic = critic
        self._names = [name for module in (policy, critic) if module is not None for name in module.parameters]
        self._every = every
        self._seconds = 0.0
        """Duration of the last save."""
        self._saved_at = time.monotonic()
        self._saved_steps = 0
        self._consistent = True
        self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._mark_inconsistent())
        self._copies = parts.HostCopies()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None

    def resume(self, on_step: Callable[[dict[str, float]], None]) -> Callable[[dict[str, float]], None]:
        """Restore the state that an interrupted run saved, and call `on_step` for each of its gradient steps. Return
        the function that records a further step and calls `on_step` for it. Raises ResourceError if the processes of a
        training find different states."""
        folder = self._newest()
        if folder is not None:
            self._restore(folder)
        if distributed.first():
            self._remove_all_but({folder})
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

    def _newest(self) -> Path | None:
        """Return the folder of the last complete state that no process finds damaged."""
        if self._folder.exists() and not self._folder.is_dir():
            log.warning("%s is no folder of a training; it is removed", self._folder)
            self._folder.unlink(missing_ok=True)  # by all processes of a training
        candidates = iter(list(filter(parts.complete, self._states()))[::-1])
        while True:
            folder = next(candidates, None)
            number = int(folder.name) if folder is not None else 0
            if not distributed.all_equal(number):
                raise ResourceError(
                    f"the processes of this training found different saved states in {self._folder}; this process "
                    f"found the one after {number} gradient steps. All processes must read the same scratch folder: "
                    "put it on a shared disk"
                )
            if folder is None or distributed.smallest(float(self._is_intact(folder))):
                return folder

    def _is_intact(self, folder: Path) -> bool:
        """Return False if one of the parts that this process checks is damaged: each part is checked once."""
        try:
            for part in parts.complete(folder)[distributed.rank() :: distributed.size()]:
                parts.check(part)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s cannot be used, the training resumes from an earlier state: %s", folder, error)
            return False
        return True

    def _restore(self, folder: Path) -> None:
        saved = parts.complete(folder)
        try:
            record: dict[str, Any] = read_json(saved[0] / parts.RECORD)
            if self._critic is not None:
                self._critic.load(saved[0] / checkpoint.CRITIC)
            parts.load(saved, self._optimizer, self._names)
            self._policy.loss_scale.load(record["loss_scale"])
            checkpoint.set_random_states(load_file(saved[0] / parts.RANDOM))
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise ArtifactDamaged(
                f"{folder} is no state of this training ({type(error).__name__}: {error}); remove {self._folder} "
                "to start the training again"
            ) from None
        self._policy.reshard()
        self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
        self.steps = record["steps"]
        self._saved_steps = len(self.steps)
        log.info("training resumes after gradient step %d", int(self.steps[-1]["step"]))

    def record_step(self, metrics: dict[str, float]) -> None:
        """Record a gradient step; save the state if it is due."""
        self.steps.append(metrics)
        self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
        self._consistent = True
        if self._is_due():
            self.save()

    def _is_due(self) -> bool:
        """Return True if the interval has passed and the last state is written, in all processes with sharded
        weights, because a state needs the parts of all."""
        interval = max(SHORTEST, SHARE * self._seconds) if self._every == "auto" else self._every
        waiting = time.monotonic() - self._saved_at < interval or not (self._written is None or self._written.done())
        return not (distributed.any_process(waiting) if self._policy.is_sharded else waiting)

    @contextlib.contextmanager
    def save_on_interrupt(self) -> Iterator[None]:
        """Save the state on Ctrl-C or SIGTERM within the context, unless they interrupt the update of the weights.
        Processes with sharded weights save what they have, which is of use if all were interrupted after the same step.
        At the end, wait until the last state is written."""
        try:
            yield
        except KeyboardInterrupt:
            self._wait()
            if self._consistent and self._policy.has_trained_weights and len(self.steps) > self._saved_steps:
                self.save()
            raise
        finally:
            self._hook.remove()  # break the reference cycle of hook and optimizer, so that memory is freed
            self._wait()
            self._writer.shutdown()
            self._copies = parts.HostCopies()

    def save(self) -> None:
        """Copy the state after the last gradient step, and write it in the background. A full disk causes a warning and
        does not stop the training."""
        self._wait()
        self._saved_at = time.monotonic()
        sharded = self._policy.is_sharded
        if not (sharded or distributed.first()):
            return
        process, processes = (distributed.rank(), distributed.size()) if sharded else (0, 1)
        part = self._folder / f"{len(self.steps):08d}" / f"{process}-of-{processes}"
        self._copies.copy(parts.rows(self._optimizer, self._names, first=distributed.first()))
        record = parts.record(self._optimizer, self._names) | {"loss_scale": self._scale, "steps": list(self.steps)}
        with _warns_of_disk(part):
            draft = parts.begin(part)
            if self._critic is not None:
                self._critic.save(draft / checkpoint.CRITIC)
            self._written = self._writer.submit(self._write, part, self._random, record)
        if not self._every:
            self._wait()

    def _write(self, part: Path, random: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
        with _warns_of_disk(part):
            self._remove_old(part.parent)  # before the disk is filled: states that other processes did not complete
            parts.write(part, self._copies.tensors(), random, record)
            self._saved_steps = len(record["steps"])
            self._remove_old(part.parent)
            self._seconds = time.monotonic() - self._saved_at

    def _remove_old(self, current: Path) -> None:
        """Remove all states but the current one and the last complete one."""
        self._remove_all_but({current, *list(filter(parts.complete, self._states()))[-1:]})

    def _remove_all_but(self, needed: Set[Path | None]) -> None:
        for folder in self._states():
            if folder not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _states(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*"))

    def _wait(self) -> None:
        """Wait until the last state is written; raise an error of the thread that is not one of the disk."""
        if self._written is not None:
            self._written.result()

    def _mark_inconsistent(self) -> None:
        self._consistent = False


@contextlib.contextmanager
def _warns_of_disk(part: Path) -> Iterator[None]:
    """Log a warning for an error of the disk within the context, and remove what was written."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as the latter
        log.warning(
            "the unfinished training could not be saved; if it is killed, it cannot resume from this step: %s", error
        )
        shutil.rmtree(parts.draft_path(part), ignore_errors=True)
        with contextlib.suppress(OSError):
            part.parent.rmdir()  # if no other process writes there
