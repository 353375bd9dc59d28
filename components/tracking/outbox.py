"""Ordered queue of writes to an MLflow server that may be temporarily unreachable.

A run does not stop because its records cannot be written at the moment: failed writes are queued and retried with the
next write or at the end. A request that MLflow rejects as invalid is not retried, but raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from components.errors import ResourceError
from components.redaction import mask_text

logger = logging.getLogger(__name__)

PAUSE = 10.0
"""Seconds after a failure without another attempt."""
_PERMANENT = {
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "NOT_IMPLEMENTED",
}
"""Error codes of MLflow for which a retry would fail in the same way."""


class Outbox:
    """Queue of writes, which a thread sends beside the stages. location: address of the store, for messages. One thread
    at a time sends: at the end of a run, and when it is interrupted, the thread that ends it sends too."""

    def __init__(self, location: str):
        self._location = location
        self._waiting: deque[Callable[[], object]] = deque()
        self._sending = threading.RLock()
        self._changing = threading.RLock()  # a signal may end the run within `put`
        self._in_background = False
        """True while a thread sends what is put. Changed together with the queue."""
        self._failed: float | None = None
        self._error: Exception | None = None
        self._rejected: Exception | None = None
        """Error of the background thread that is not retried, until it is raised."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Callable[[], object]) -> None:
        """Queue `work`, which a thread runs after all queued work. Work that fails halfway is repeated from its start.
        Raise the error of earlier work that MLflow rejected."""
        self._raise_rejection()
        with self._changing:
            self._waiting.append(work)
            if self._in_background or self._pausing():
                return
            self._in_background = True
        threading.Thread(target=self._send_in_background, name="MLflow", daemon=True).start()

    def flush(self) -> None:
        """Send the queue now, unless MLflow failed a moment ago. Raise the error of work that MLflow rejected."""
        self._send()
        self._raise_rejection()

    def drain(self, limit: float) -> None:
        """Wait until the queue is empty. Raise ResourceError if MLflow is still unreachable after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not self._send(again=True):
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"timed out after {limit:.0f} s waiting for MLflow at {self._location} "
                    f"({mask_text(str(self._error))}). The artifacts of the stages are in the store: start MLflow and "
                    "run the same command again; it takes them from the cache and only writes the records"
                )
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        self._raise_rejection()

    def _pausing(self) -> bool:
        return self._failed is not None and time.monotonic() - self._failed <= PAUSE

    def _raise_rejection(self) -> None:
        error, self._rejected = self._rejected, None
        if error is not None:
            raise error

    def _send_in_background(self) -> None:
        reachable = True
        while True:
            with self._changing:
                if not reachable or not self._waiting:
                    self._in_background = False
                    return
            try:
                reachable = self._send()
            except Exception as error:  # noqa: BLE001  `_raise_rejection` raises it in the thread of the run
                self._rejected = error

    def _send(self, *, again: bool = False) -> bool:
        """Send the queue, and return True if it is empty. again: try also within the pause after a failure."""
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException

        with self._sending:
            if self._pausing() and not again:
                return False
            while self._waiting:
                work = self._waiting.popleft()
                try:
                    work()
                except (MlflowException, RequestException, OSError) as error:
                    if isinstance(error, MlflowException) and error.error_code in _PERMANENT:
                        raise
                    self._waiting.appendleft(work)
                    if self._failed is None:
                        logger.warning(
                            "MLflow at %s is unreachable; the run continues and sends its records later: %s",
                            self._location,
                            mask_text(str(error)),
                        )
                    self._failed, self._error = time.monotonic(), error
                    return False
                except KeyboardInterrupt:
                    self._waiting.appendleft(work)
                    raise
            if self._failed is not None:
                logger.warning("MLflow at %s is reachable again", self._location)
            self._failed = None
            return True
