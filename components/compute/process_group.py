"""Group of processes that run one stage together; each finds the others through its environment (`launch`).

Rank 0 does what a single process would: it locks, reports and commits. The other ranks compute along: rank 0 sends them
their folders, and they send it their errors. This uses a key-value store, so these waits have their own timeout;
computation uses `torch.distributed`, where every wait ends after `timeout` seconds.
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
"""Seconds within which the launcher, which knows how a process died, ends the processes that wait for it."""

_REQUEST, _WORK, _FAILURE, _REPORTED = "request", "work", "failure", "reported"


class ProcessGroup:
    """Process group, created by all of its processes at the same time. timeout: seconds that a process waits for the
    others."""

    def __init__(self, timeout: float):
        from torch import distributed
        from torch.distributed.rendezvous import rendezvous

        self.timeout = timeout
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._all, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=timedelta(seconds=timeout)))
        self._number = 0
        self._store = distributed.PrefixStore("stage 0", self._all)

    def join(self, device: str) -> None:
        """Join the process group of `torch.distributed`. device: `auto`, `cuda` or `cpu`. Raise ResourceError if the
        machine has fewer GPUs than processes, WaitTimeout if the others do not join in time."""
        import torch
        from torch import distributed

        backend, local_processes, limit = "gloo", int(os.environ["LOCAL_WORLD_SIZE"]), timedelta(seconds=self.timeout)
        if device != "cpu" and torch.cuda.is_available():
            if local_processes > torch.cuda.device_count():
                raise ResourceError(
                    f"processes = {local_processes}: this machine has {torch.cuda.device_count()} GPUs; expected at "
                    "most one process per GPU, or model.device=cpu"
                )
            backend = "nccl"
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            distributed.init_process_group(
                backend, store=self._all, rank=self.rank, world_size=self.size, timeout=limit
            )
        except distributed.DistError as error:
            raise WaitTimeout(
                f"rank {self.rank} of {self.size} timed out after {self.timeout:g} s joining the other ranks: {error}"
            ) from None

    def next_stage(self) -> None:
        """Begin another stage; messages of the one before are not received any more."""
        from torch import distributed

        self._number += 1
        self._store = distributed.PrefixStore(f"stage {self._number}", self._all)

    def send_request(self, request: str) -> None:
        """Send the request of the stage to the other ranks, from rank 0."""
        self._store.set(_REQUEST, request)

    def receive_request(self) -> str:
        """Return the request of the stage, sent by rank 0. Waits for as long as rank 0 waits for it."""
        while not self._store.check([_REQUEST]):  # torch logs a wait that times out, and handles no signals
            time.sleep(0.1)
        return str(self._store.get(_REQUEST).decode())

    @property
    def first(self) -> bool:
        """True for rank 0, which reports and writes."""
        return self.rank == 0

    def send_work(self, work: dict[str, Any]) -> None:
        """Send the work of the other ranks, from rank 0. Only the first call has an effect."""
        self._store.compare_set(_WORK, "", json.dumps(work))

    def receive_work(self, limit: float) -> dict[str, Any]:
        """Return the work sent by rank 0. Raise WaitTimeout after `limit` seconds."""
        from torch import distributed

        try:
            self._store.wait([_WORK], timedelta(seconds=limit))
        except distributed.DistError:
            raise WaitTimeout(f"rank {self.rank} timed out after {limit:g} s waiting for rank 0") from None
        return json.loads(self._store.get(_WORK))

    def report_failure(self, error: dict[str, Any], say: Callable[[dict[str, Any]], None], *, awaited: bool) -> None:
        """Report an error of this process. Rank 0 reports it, or the earlier error of another rank; the other ranks
        send theirs to rank 0. awaited: True if the cause may be the death of another process. The launcher then reports
        that and ends this process meanwhile."""
        until = time.monotonic() + GRACE
        while awaited and self.failure() is None and time.monotonic() < until:
            time.sleep(0.05)
        with contextlib.suppress(RuntimeError):  # the launcher, which holds the store, has ended
            if self.first:
                say({"error": self.failure() or error})
                self._store.set(_REPORTED, "1")
            else:
                self._store.compare_set(_FAILURE, "", json.dumps(error))
                self._store.wait([_REPORTED], timedelta(seconds=GRACE))

    def failure(self) -> dict[str, Any] | None:
        """Return the error of another process; None without one."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_FAILURE]):
                return json.loads(self._store.get(_FAILURE))
        return None
