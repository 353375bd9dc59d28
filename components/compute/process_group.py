"""The processes that run one stage together, each of which knows the others by its environment (`launch`).

The first one does what one process would: it locks, reports, commits. The others compute along: they hear from it in
which folders, and it hears from them why they failed. That goes through a store of small values, so that a wait has a
limit of its own; what is computed goes through `torch.distributed`, where every wait ends after `timeout` seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from components.errors import ResourceError, WaitTimeout

GRACE = 3.0
"""Seconds in which those that wait for a process that died have been ended by the launcher, which knows how it died."""

_WORK, _FAILURE, _SAID = "work", "failure", "said"


class Group:
    """timeout: seconds that a process waits for the others. Made by all of them at the same time."""

    def __init__(self, timeout: float):
        from torch import distributed
        from torch.distributed.rendezvous import rendezvous

        self.timeout = timeout
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._all, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=timedelta(seconds=timeout)))
        self._store = distributed.PrefixStore("stage", self._all)

    def join(self, device: str) -> None:
        """Meets the others for what is computed together. device: `auto`, `cuda` or `cpu`. Raises ResourceError where
        the machine has fewer GPUs than processes, WaitTimeout where the others do not come."""
        import torch
        from torch import distributed

        backend, here, limit = "gloo", int(os.environ["LOCAL_WORLD_SIZE"]), timedelta(seconds=self.timeout)
        if device != "cpu" and torch.cuda.is_available():
            if here > torch.cuda.device_count():
                raise ResourceError(
                    f"processes: {here} on this machine, which has {torch.cuda.device_count()} GPUs: expected at most "
                    "one for each, or model.device=cpu"
                )
            backend = "nccl"
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            distributed.init_process_group(
                backend, store=self._all, rank=self.rank, world_size=self.size, timeout=limit
            )
        except distributed.DistError as error:
            raise WaitTimeout(
                f"process {self.rank} of {self.size} did not meet the others in {self.timeout:g} s: {error}"
            ) from None

    @property
    def first(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.rank == 0

    def tell(self, work: dict[str, Any]) -> None:
        """The first one: what the others are to do. Only what is told first is heard."""
        self._store.compare_set(_WORK, "", json.dumps(work))

    def hear(self, limit: float) -> dict[str, Any]:
        """The others: what they are told. Raises WaitTimeout after `limit` seconds."""
        from torch import distributed

        try:
            self._store.wait([_WORK], timedelta(seconds=limit))
        except distributed.DistError:
            raise WaitTimeout(f"process {self.rank} has heard nothing of the first one for {limit:g} s") from None
        return json.loads(self._store.get(_WORK))

    def failed(self, error: dict[str, Any], say: Callable[[dict[str, Any]], None], *, awaited: bool) -> None:
        """Of an error of this process: the first one says it, or with what another failed before; the others leave it
        to the first one. awaited: whether it may be that another has died, of which the launcher then tells: it ends
        this process meanwhile."""
        until = time.monotonic() + GRACE
        while awaited and self.failure() is None and time.monotonic() < until:
            time.sleep(0.05)
        with contextlib.suppress(RuntimeError):  # the launcher keeps the store, and is gone
            if self.first:
                say({"error": self.failure() or error})
                self._store.set(_SAID, "1")
            else:
                self._store.compare_set(_FAILURE, "", json.dumps(error))
                self._store.wait([_SAID], timedelta(seconds=GRACE))

    def failure(self) -> dict[str, Any] | None:
        """With what another process has failed."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_FAILURE]):
                return json.loads(self._store.get(_FAILURE))
        return None
