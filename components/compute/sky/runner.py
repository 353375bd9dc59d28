"""Runner of stages on machines that SkyPilot provides; `driver` does the work in a subprocess."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.compute.runners import Event, KeptProcessRunner, StageResult
from components.compute.sky.snapshot import Snapshot, take_snapshot
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import STAGE

DRIVER = (sys.executable, "-m", "components.compute.sky.driver")


class SkyRunner(KeptProcessRunner):
    """Runner of stages on one place, one at a time. Its subprocess launches the machines for the first stage, and takes
    them down when it ends, however this process ends.

    name: name of the cluster, if the place has none. code: folder whose snapshot is uploaded. packages: the user's
    packages. options: options of `module` on the node, which is given each request. Others as for ProcessRunner.
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
        """Uploaded code; None before the first stage."""
        self._code = code
        self._packages = packages
        self._options = options
        self._module = module

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        """Run one stage, as KeptProcessRunner does. Raise ResourceError if no machine is available."""
        if self.snapshot is None:
            self.snapshot = take_snapshot(self._code, self._packages, self._root / "snapshots")
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
        """Stop as ProcessRunner does, but take the machines down first, even if this process ends before that."""
        with self._lock:
            self._stopped.set()
            running = list(self._running)
        for child in running:
            child.terminate()

    def close(self, wait: float = 1.0) -> None:
        """Take the machines down and wait up to `wait` seconds. Taking down continues without this process."""
        child = self._child
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
