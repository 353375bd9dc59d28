"""Supervisor of a background job: a process that ends the job's command, with all of its children, once its standard
input ends.

    python -m flows.agent_tools.supervisor FOLDER COMMAND…

The server holds the other end of the standard input. It closes it to stop the job; if the server ends or is killed, the
kernel closes it, so no job outlives its server. The command gets SIGTERM, which saves its state, and `GRACE` seconds;
then it and every process that it has started are killed. Its output goes to `stdout` and `stderr` in FOLDER; the
supervisor prints its process id. At module level this file imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL; `flows.terminal.interrupt` ends a run within 25."""
STOPPED = 130
"""Exit code of a stopped job."""


def main(argv: Sequence[str]) -> int:
    """Run the command until it ends or standard input ends. Return its exit code, or `STOPPED`."""
    folder = Path(argv[0])
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as error:
        child = subprocess.Popen(argv[1:], stdin=subprocess.DEVNULL, stdout=out, stderr=error, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the end of the input stops a job
    print(child.pid, flush=True)
    stopped = threading.Event()
    watch = threading.Thread(target=_stop_at_end_of_input, args=(child, stopped), daemon=True)
    watch.start()
    code = child.wait()
    if stopped.is_set():
        watch.join()
        return STOPPED
    return code if code >= 0 else 128 - code


def _stop_at_end_of_input(child: subprocess.Popen[bytes], stopped: threading.Event) -> None:
    import psutil

    while os.read(0, 4096):
        pass
    if child.poll() is not None:
        return
    stopped.set()
    processes = []
    with contextlib.suppress(psutil.Error):
        processes = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    with contextlib.suppress(psutil.Error):
        processes += psutil.Process(child.pid).children(recursive=True)
    if child.poll() is None:
        child.kill()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
