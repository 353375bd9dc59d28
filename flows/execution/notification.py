"""Delivery of a run's events to a webhook and to Prefect.

A delivery never fails the run: each attempt has a time limit, a failed one is retried once, then the log gets a
warning. The URL of the webhook is a secret, so no message contains it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from components.errors import ResourceError
from components.exceptions import described
from components.redaction import mask_text, secret_variable
from flows.experiment.sections import Event
from flows.experiment.spec import ExperimentSpec
from flows.history.records import RunRecord, headline

logger = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Time limit of one attempt, in seconds."""
ATTEMPTS = 2
VERSION = 1
"""Version of the JSON body."""


def webhook_url(variable: str) -> str:
    """Return the webhook's URL. Raises ResourceError if the variable is not set or holds no URL, without repeating
    it."""
    url = secret_variable(variable)
    if not url:
        raise ResourceError(
            f"notify.url_variable: the environment variable {variable} is not set; set it to the webhook's URL"
        )
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid:
        raise ResourceError(
            f"notify.url_variable: the environment variable {variable} holds no URL; expected https://HOST/PATH"
        )
    return url


def lacking(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message for each missing prerequisite of `notify`."""
    if spec.notify.url_variable is not None:
        try:
            webhook_url(spec.notify.url_variable)
        except ResourceError as error:
            yield str(error)
    if spec.notify.prefect and not os.environ.get("PREFECT_API_URL"):
        yield "notify.prefect = true: needs your own Prefect server; set PREFECT_API_URL, or notify.prefect=false"


class Notifier:
    """Notifier of one run."""

    def __init__(self, spec: ExperimentSpec, run: RunRecord):
        self._spec = spec
        self._run = run

    def send(self, event: Event, message: str, step: int | None = None) -> None:
        """Report an event, if the experiment wants it. Waits at most two attempts."""
        notify = self._spec.notify
        if event not in notify.events:
            return
        body = self.body(event, message, step)
        if notify.url_variable is not None:
            self._post(notify.url_variable, body)
        if notify.prefect:
            self._emit(body)

    def body(self, event: Event, message: str, step: int | None) -> dict[str, Any]:
        """Return the JSON body of an event."""
        run, text = self._run, mask_text(message)
        return {
            "version": VERSION,
            "event": event,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "experiment": run.name,
            "run": run.id,
            "seed": run.seed,
            "step": step,
            "message": text,
            "result": run.result if event == "ended" else None,
            "text": f"{run.name}, run {run.short}: {event}{f': {text}' if text else ''}",
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Report the end or the failure of the block."""
        try:
            yield
        except KeyboardInterrupt:
            self.send("failed", "interrupted")
            raise
        except BaseException as error:
            self.send("failed", described(error))
            raise
        self.send("ended", headline(self._run.result or {}))

    def _post(self, variable: str, body: dict[str, Any]) -> None:
        problem = ""
        for _ in range(ATTEMPTS):
            problem = _attempt(webhook_url(variable), body)
            if not problem:
                return
        logger.warning("cannot deliver the event %s to the webhook in %s: %s", body["event"], variable, problem)

    def _emit(self, body: dict[str, Any]) -> None:
        try:
            from prefect.events import emit_event

            resource = {"prefect.resource.id": f"espalier.run.{body['run']}", "espalier.experiment": body["experiment"]}
            emit_event(event=f"espalier.run.{body['event']}", resource=resource, payload=body)
        except Exception as error:  # noqa: BLE001  the run does not depend on the event
            logger.warning("cannot emit the event %s to Prefect: %s", body["event"], type(error).__name__)


def _attempt(url: str, body: dict[str, Any]) -> str:
    """Post a body; return the problem, or an empty string. A thread limits the time, since a server that sends slowly
    never exceeds the limits of single reads."""
    import httpx

    problems = [f"no answer within {TIMEOUT:g} s"]

    def post() -> None:
        try:
            response = httpx.post(url, json=body, timeout=TIMEOUT, follow_redirects=False)
            problems[0] = "" if response.is_success else f"HTTP {response.status_code}"
        except Exception as error:  # noqa: BLE001  a message could contain the URL
            problems[0] = type(error).__name__

    thread = threading.Thread(target=post, name="webhook", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return problems[0]
