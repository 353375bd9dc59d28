"""A training that is not finished yet, kept so that a killed one goes on at the same sample.

    FOLDER/<steps taken>/    a checkpoint (`checkpoint`) and steps.json: the metrics of the steps taken in this stage

A folder is written aside, synced and renamed; only then the one before it is removed. So whenever the process dies, a
whole one is there, or none yet. What is read is checked against the sums in steps.json; a damaged one is not used.

Batches are a function of the stage's arguments, so the number of steps taken says where to go on; the policy, the
optimizer and the random state are those after the last of them. The result is that of a training which was never
stopped, bit for bit. Of several processes, which all hold the same, the first one writes and all read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from components.algorithms.loop import checkpoint, distributed
from components.algorithms.policy.policy import Policy
from components.algorithms.ppo.critic import Critic
from components.artifacts import sync_tree
from components.errors import ResourceError
from components.json_text import read_json

log = logging.getLogger(__name__)

STEPS = "steps.json"


class Unfinished:
    """The state of one training in its stage's scratch folder.

    every: seconds between two saves; 0 saves after each gradient step. `steps` holds the metrics of each gradient step
    taken so far, those of an earlier try included.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        critic: Critic | None = None,
        *,
        algorithm: str,
        start: int,
        every: float,
    ):
        self.steps: list[dict[str, float]] = []
        self._folder = folder
        self._policy = policy
        self._optimizer = optimizer
        self._critic = critic
        self._names = [name for one in (policy, critic) if one is not None for name in one.parameters]
        self._algorithm = algorithm
        self._start = start
        self._every = every
        self._saved = time.monotonic()
        self._kept = 0
        self._whole = True
        self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._tear())

    def restore(self) -> int:
        """Takes up the training where an earlier try left it; returns the gradient steps it had taken, 0 for none.
        Raises ResourceError where the processes of a training find different states."""
        self._restore()
        if not distributed.alike(self._kept):
            raise ResourceError(
                f"the processes of this training found different states in {self._folder}, this one that after "
                f"{self._kept} gradient steps: expected one scratch folder that all of them read. Put it on a disk "
                "that they share"
            )
        return self._kept

    def _restore(self) -> None:
        for folder in sorted(self._folder.glob("[0-9]*"), reverse=True):
            try:
                record = read_json(folder / STEPS)
                if record["files"] != _sums(folder, record["steps"]):
                    raise ValueError("its files do not match their sums")
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("%s cannot be used, the training goes on from an earlier state: %s", folder, error)
                continue
            self._policy.load(self._policy.folder(folder))
            if self._critic is not None:
                self._critic.load(folder / checkpoint.CRITIC)
            state = {"optimizer": self._optimizer, "names": self._names, "loss_scale": self._policy.loss_scale}
            checkpoint.load_state(folder, algorithm=self._algorithm, **state)
            self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
            self.steps = record["steps"]
            self._kept = len(self.steps)
            log.info("training goes on after gradient step %d", self.steps[-1]["step"])
            return

    def took(self, metrics: dict[str, float]) -> None:
        """A gradient step is done; saves where it is time to."""
        self.steps.append(metrics)
        self._random, self._scale = checkpoint.random_states(), self._policy.loss_scale.state()
        self._whole = True
        due = time.monotonic() - self._saved >= self._every
        if distributed.any_of(due) if self._policy.in_parts else due:
            self.save()

    @contextlib.contextmanager
    def saved_when_stopped(self) -> Iterator[None]:
        """Inside, Ctrl-C or SIGTERM save what was reached, unless they fell into the very update of the weights."""
        try:
            yield
        except KeyboardInterrupt:
            together = self._policy.in_parts  # nobody knows where the others were stopped
            if not together and self._whole and self._policy.itself and len(self.steps) > self._kept:
                self.save()
            raise
        finally:
            self._hook.remove()  # it holds this, and this the optimizer: nothing would be freed

    def save(self) -> None:
        """Writes the state after the last gradient step. A disk that is full costs a warning, not the training."""
        self._saved = time.monotonic()
        learned = self._policy.gather()
        moments = checkpoint.moments(self._optimizer, self._names) if learned or distributed.first() else ({}, {})
        if not distributed.first():
            return
        part = self._folder / f"part-{os.getpid()}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self._policy.save(self._policy.folder(part), learned)
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
            (part / STEPS).write_text(json.dumps({"files": _sums(part, self.steps), "steps": self.steps}))
            sync_tree(part)
            part.rename(self._folder / f"{len(self.steps):08d}")
        except OSError as error:
            log.warning("the unfinished training could not be saved, if it is killed it starts over: %s", error)
            shutil.rmtree(part, ignore_errors=True)
            return
        if self._kept:
            shutil.rmtree(self._folder / f"{self._kept:08d}", ignore_errors=True)
        self._kept = len(self.steps)

    def _tear(self) -> None:
        self._whole = False


def _sums(folder: Path, steps: list[dict[str, float]]) -> dict[str, str]:
    return {STEPS: hashlib.sha256(json.dumps(steps).encode()).hexdigest()} | {
        path.relative_to(folder).as_posix(): _sum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != STEPS
    }


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
