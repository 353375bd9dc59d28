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
    """Queue of writes. location: address of the store, for messages. One thread at a time sends: when a run is
    interrupted, the thread that ends it and the thread that was working may both send."""

    def __init__(self, location: str):
        self._location = location
        self._waiting: deque[Callable[[], object]] = deque()
        self._sending = threading.RLock()
        self._failed: float | None = None
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Callable[[], object]) -> None:
        """Run `work` now, after all queued work, or queue it. Work that fails halfway is repeated from its start."""
        self._waiting.append(work)
        if self._failed is None or time.monotonic() - self._failed > PAUSE:
            self._send()

    def drain(self, limit: float) -> None:
        """Wait until the queue is empty. Raise ResourceError if MLflow is still unreachable after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not self._send():
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"timed out after {limit:.0f} s waiting for MLflow at {self._location} "
                    f"({mask_text(str(self._error))}). The artifacts of the stages are in the store: start MLflow and "
                    "run the same command again; it takes them from the cache and only writes the records"
                )
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))

    def _send(self) -> bool:
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException

        with self._sending:
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
