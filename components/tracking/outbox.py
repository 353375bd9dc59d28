"""What MLflow is to be told, in order, while its server may be away for a while.

A run does not stop because its records cannot be written at the moment: what cannot be said now is kept and said later,
with the next thing or at the end. A request that MLflow refuses as wrong is no such case, and is raised.
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
"""Seconds after a failure in which nothing is tried."""
_REFUSED = {
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "NOT_IMPLEMENTED",
}
"""Error codes of MLflow that another try would meet again."""


class Outbox:
    """where: the store, for messages. One thread after the other says what waits: when a run is interrupted, the one
    that ends it and the one that was working may meet here."""

    def __init__(self, where: str):
        self.where = where
        self._waiting: deque[Callable[[], object]] = deque()
        self._sending = threading.RLock()
        self._failed: float | None = None
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Callable[[], object]) -> None:
        """Says it now, after all that still waits, or keeps it. Work that fails in the middle is done again whole."""
        self._waiting.append(work)
        if self._failed is None or time.monotonic() - self._failed > PAUSE:
            self._send()

    def drain(self, limit: float) -> None:
        """Waits until all is said. Raises ResourceError where the store is still away after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not self._send():
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"waited {limit:.0f} s for MLflow at {self.where} ({mask_text(str(self._error))}). What the stages "
                    "made is in the store: start MLflow, then the same command finds all of it and only writes it down"
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
                    if isinstance(error, MlflowException) and error.error_code in _REFUSED:
                        raise
                    self._waiting.appendleft(work)
                    if self._failed is None:
                        logger.warning(
                            "MLflow at %s is away; the run goes on and tells it later: %s",
                            self.where,
                            mask_text(str(error)),
                        )
                    self._failed, self._error = time.monotonic(), error
                    return False
                except KeyboardInterrupt:
                    self._waiting.appendleft(work)
                    raise
            if self._failed is not None:
                logger.warning("MLflow at %s is back", self.where)
            self._failed = None
            return True
