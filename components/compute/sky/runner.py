"""Runner of stages on machines that SkyPilot provides; `driver` does the work in a subprocess."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.compute.runners import Event, KeptProcessRunner, StageProcess, StageResult
from components.compute.snapshot import take_snapshot

if TYPE_CHECKING:
    from components.compute.sky.spec import SkyPlace

logger = logging.getLogger(__name__)

DRIVER = (sys.executable, "-m", "components.compute.sky.driver")


class SkyRunner(KeptProcessRunner):
    """Runner of stages on one place, one at a time. Its subprocess launches the machines for the first stage, and takes
    them down when it ends, however this process ends.

    name: name of the cluster, if the place has none. code: folder whose snapshot is uploaded. packages: the user's
    packages. process: the process on the node, which is given each request; its environment, log and limit are those
    of the subprocess here. say: shows a line to the user.
    """

    shares_servers = False

    def __init__(
        self,
        place: SkyPlace,
        name: str,
        code: Path,
        packages: Sequence[str],
        process: StageProcess,
        say: Callable[[str], None] = logger.info,
    ):
        super().__init__(process, [])
        self.name = place.cluster or name
        self._place = place
        self._code = code
        self._packages = packages
        self._say = say

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        """Run one stage, as KeptProcessRunner does. Raise ResourceError if no machine is available."""
        if self.snapshot is None:
            self.snapshot = take_snapshot(self._code, self._packages, self._process.root / "snapshots")
            job = {
                "place": self._place.model_dump(mode="json"),
                "name": self.name,
                "workdir": str(self.snapshot.path),
                "options": list(self._process.options),
                "module": self._process.module,
                "distributed": list(self._process.distributed),
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
        if child is not None:
            self._say(f"{self.name} is shut down" if self._place.cluster is None else f"{self.name} stays up")
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
