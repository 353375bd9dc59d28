"""Exit of a process when its parent ends: it watches its standard input, a pipe that the parent holds open.

Works however the parent ends, `kill -9` included, on every Unix. Of several processes that share the pipe, one reads
its lines; the others only watch for its end.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable


def watch_parent(
    on_end: Callable[[], None] | None = None,
    grace: float = 3.0,
    on_line: Callable[[str], None] | None = lambda line: None,
) -> None:
    """Start a thread that waits for the end of standard input. Then it calls `on_end`, gives the process `grace`
    seconds to end by itself, and ends it. on_line: called with each line that arrives before; None: another process
    reads them."""

    def watch() -> None:
        partial_line = b""
        if on_line is None:
            poll = select.poll()
            poll.register(sys.stdin.fileno(), 0)
            poll.poll()  # reports the end without being asked for it
        while on_line is not None and (data := os.read(sys.stdin.fileno(), 65536)):
            *lines, partial_line = (partial_line + data).split(b"\n")
            for line in lines:
                on_line(line.decode())
        if on_end is not None:
            on_end()
            time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
