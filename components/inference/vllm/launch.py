"""Launcher of vLLM's server: `python launch.py OPTIONS...` in vLLM's environment, while standard input is open.

The parent process holds the other end of the pipe, so the server ends with its parent, even after `kill -9`. The server
runs in a separate session, and all processes of the session end together. Only the standard library is used, because
Espalier is not installed in that environment.
"""

import os
import runpy
import signal
import sys
import threading
import time

SERVER = "vllm.entrypoints.openai.api_server"
GRACE = 5.0
"""Grace period in seconds between SIGTERM and SIGKILL."""


def watch() -> None:
    """Wait for the end of standard input, then terminate the session."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder is not an import path
    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
