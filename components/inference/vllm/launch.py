"""Runs vLLM's server as `python launch.py OPTIONS...` in vLLM's own environment, for as long as standard input is open.

Whoever started it holds the other end of that pipe, so the server ends with them, however they end, `kill -9` included.
It is started in a session of its own; all processes of the session end together. Uses the standard library alone:
nothing of Espalier is installed in that environment.
"""

import os
import runpy
import signal
import sys
import threading
import time

SERVER = "vllm.entrypoints.openai.api_server"
GRACE = 5.0
"""Seconds in which the server may end by itself."""


def watch() -> None:
    """Waits for the end of standard input, and ends the session."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.path.pop(0)  # our own folder, which is no place to import from
    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
