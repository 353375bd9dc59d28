"""Calls from a sandboxed program to its host: lines of JSON over a socket, answered one at a time.

The socket is the program's only connection, and carries only these lines. A function of the host answers each, in a
thread of this module. The input is untrusted. The length of a line and the number of lines (`Limits.calls`) are
bounded, and the time that an answer takes does not count towards the program's time limit.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

FILE = "CALLS"
"""Environment variable of the program that holds the socket's file descriptor."""
LONGEST = 100_000
"""Maximum length of a line in bytes."""

Answer = Callable[[bytes], bytes]
"""Function from a line to its answer, both without the line end. It may block; it must not raise."""


class CallServer:
    """Call server of one program. limit: number of lines that the program may send."""

    def __init__(self, answer: Answer, limit: int):
        self._answer = answer
        self._remaining = limit
        self._host_end, self.inside = socket.socketpair()
        """Host's end and program's end."""
        self._waited = 0.0
        self._since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="calls", daemon=True)
        self.exceeded = False
        """True if the program sent too many lines, or one that is too long. It then gets no more answers."""

    @property
    def waited(self) -> float:
        """Seconds that the program has waited for answers."""
        since = self._since
        return self._waited + (time.monotonic() - since if since is not None else 0.0)

    def begin(self) -> None:
        """Start serving. The program has started and holds its end of the socket."""
        self.inside.close()
        self._thread.start()

    def close(self) -> None:
        """Stop serving after the program has ended. Waits for an answer in progress, so that it is not interrupted."""
        self.inside.close()
        with suppress(OSError):
            self._host_end.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._host_end.close()

    def environment(self) -> dict[str, str]:
        return {FILE: str(self.inside.fileno())}

    def _serve(self) -> None:
        with suppress(OSError), self._host_end.makefile("rb") as lines:  # OSError: the program has ended
            while line := lines.readline(LONGEST + 1):
                self._remaining -= 1
                if self._remaining < 0 or len(line) > LONGEST:
                    self.exceeded = True
                    return
                self._since = time.monotonic()
                try:
                    answer = self._answer(line.rstrip(b"\n"))
                finally:
                    self._waited, self._since = self.waited, None
                self._host_end.sendall(answer + b"\n")
