"""What a program in the sandbox may ask of whoever runs it: lines of JSON over a socket, answered one after the other.

The socket is the only way out, and carries nothing but these lines: each is answered by a function of the one who runs
the program, in a thread of this module. What comes is untrusted. A line has a greatest length, the number of lines is
bounded (`Limits.calls`), and the time that an answer takes does not count as the program's.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

FILE = "CALLS"
"""The environment variable of a program that names the socket: a number of a file."""
LONGEST = 1_000_000
"""Bytes of one line."""

Answer = Callable[[bytes], bytes]
"""From a line to its answer, both without the end of the line. It may block; it must not raise."""


class Calls:
    """Serves one program. most: lines that it may send."""

    def __init__(self, answer: Answer, most: int):
        self._answer = answer
        self._left = most
        self._ours, self.inside = socket.socketpair()
        """Our end, and the program's."""
        self._waited = 0.0
        self._since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="calls", daemon=True)
        self.exceeded = False
        """Whether the program asked too often, or too much at once. It is then not answered any more."""

    @property
    def waited(self) -> float:
        """Seconds for which the program has waited for answers."""
        since = self._since
        return self._waited + (time.monotonic() - since if since is not None else 0.0)

    def begin(self) -> None:
        """The program runs, and has its end."""
        self.inside.close()
        self._thread.start()

    def close(self) -> None:
        """The program has ended. An answer under way is waited for: whoever gives it is not left in the middle."""
        self.inside.close()
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._ours.close()

    def environment(self) -> dict[str, str]:
        return {FILE: str(self.inside.fileno())}

    def _serve(self) -> None:
        with suppress(OSError), self._ours.makefile("rb") as lines:  # OSError: the program is gone
            while line := lines.readline(LONGEST + 1):
                self._left -= 1
                if self._left < 0 or len(line) > LONGEST:
                    self.exceeded = True
                    return
                self._since = time.monotonic()
                try:
                    answer = self._answer(line.rstrip(b"\n"))
                finally:
                    self._waited, self._since = self.waited, None
                self._ours.sendall(answer + b"\n")
