"""Stages on machines that SkyPilot provides, as a runner: what `driver` does in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.compute.runners import Event, KeptProcessRunner, Result
from components.compute.sky.snapshot import Snapshot, take
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import STAGE

DRIVER = (sys.executable, "-m", "components.compute.sky.driver")


class SkyRunner(KeptProcessRunner):
    """Runs stages on one place, one at a time. Its process launches the machines for the first stage, and has them
    taken down when it ends, however we end.

    name: of the cluster, where the place names none. code: the folder whose snapshot travels. packages: of the user.
    options: of `module` on the node, which is given each request. The rest is as for ProcessRunner.
    """

    def __init__(
        self,
        place: SkyPlace,
        name: str,
        code: Path,
        packages: Sequence[str],
        options: Sequence[str],
        root: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        limit: float = 7 * 24 * 3600.0,
        module: str = STAGE,
    ):
        super().__init__([], root, log, environment, limit)
        self.place = place
        self.name = place.cluster or name
        self.snapshot: Snapshot | None = None
        """What travels; None before the first stage."""
        self._code = code
        self._packages = packages
        self._options = options
        self._module = module

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> Result:
        """As that of KeptProcessRunner. Raises ResourceError where there is no machine to be had."""
        if self.snapshot is None:
            self.snapshot = take(self._code, self._packages, self._root / "snapshots")
            job = {
                "place": self.place.model_dump(mode="json"),
                "name": self.name,
                "workdir": str(self.snapshot.path),
                "module": self._module,
                "options": list(self._options),
                "environment": {},
            }
            self._command = [*DRIVER, "--job", json.dumps(job)]
        return super().run(request, on_event)

    def stop(self) -> None:
        """As that of ProcessRunner, but the machines are taken down first, also when we are gone by then."""
        with self._lock:
            self._stopped.set()
            running = list(self._running)
        for child in running:
            child.terminate()

    def close(self, wait: float = 1.0) -> None:
        """Has the machines taken down; waits so many seconds for it. It goes on, if need be, without us."""
        child = self._kept
        super().close()
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait)

    def _end(self, child: subprocess.Popen) -> None:
        child.terminate()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._running.discard(child)
