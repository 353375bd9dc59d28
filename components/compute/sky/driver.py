"""`python -m components.compute.sky.driver`: runs stages through SkyPilot, one after the other.

It is a subprocess of `SkyRunner`: SkyPilot's import and its side effects stay in it, and it outlives its parent until
the machines are taken down. Requests are lines on standard input; the report is JSON lines on standard output, as that
of `flows.stage`; the logs of SkyPilot and of the jobs go to standard error.

A cluster is launched for the first stage and reused for the following ones. If it is preempted during a stage, it is
launched again and the stage resumes from its last checkpoint, if that outlived the machine. SkyPilot itself relaunches
a managed job.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.compute.lifeline import watch_parent
from components.compute.runners import error_from_json, error_to_json, request_name
from components.compute.sky.failures import LOST_ERRORS, RESUME_HINT, SERVER_ERRORS, explain, full_disk
from components.compute.sky.report import JobLog, LineLog
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import TaskTemplate, render
from components.errors import EspalierError, ResourceError, WaitTimeout

logger = logging.getLogger(__name__)

Say = Callable[[Mapping[str, Any]], None]
OUTAGE_LIMIT = 300.0
"""Seconds for which a cluster that runs a stage may be unreachable."""
NODE_GRACE = 30.0
"""Seconds that a preempted node may take to disappear."""
LAUNCHES = 4
"""Maximum launches of machines for one stage, if they are preempted."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequence that colours the text of a terminal."""
SHUTDOWN_TIMEOUT = 120.0
"""Seconds for taking the machines down after the parent has ended."""


class MachinesLost(Exception):
    """Loss of the machines, such as a preemption."""


class Driver:
    """Driver of stages on one place. sdk: SkyPilot's module `sky`. patience: seconds for which the cluster may be
    unreachable."""

    def __init__(self, sdk: Any, template: TaskTemplate, patience: float = OUTAGE_LIMIT):
        self._sdk = sdk
        self._template = template
        self._place = template.place
        self._name = template.name
        self._patience = patience
        self._up = False
        self._launching: str | None = None
        self._job: int | None = None
        self._ending = threading.Lock()
        self._ended = False

    def run(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Run a stage and return its last event. `say` is called with the others. Raises EspalierError."""
        stage = request_name(request)
        secrets = _secrets(self._place)
        config = render(self._template, request)
        for last in (*[False] * (LAUNCHES - 1), True):
            task = self._sdk.Task.from_yaml_config(dict(config), secrets_overrides=secrets)
            try:
                return self._attempt(stage, task, say)
            except MachinesLost as lost:
                self._up = False
                if last:
                    raise ResourceError(
                        f"{self._name} lost its machines {LAUNCHES} times: {lost}; {RESUME_HINT}"
                    ) from None
                say({"waiting": f"{stage}: {self._name} lost its machines ({lost}); continuing on another machine"})
            except EspalierError:
                raise
            except Exception as error:
                logger.exception("SkyPilot, %s", self._name)
                raise explain(error, self._place, self._name) from error
        raise AssertionError

    def end(self) -> None:
        """Stop running jobs and take the machines down, except a cluster that the place names."""
        with self._ending:  # a second caller waits for the first
            if not self._ended:
                self._ended = True
                self._take_down()

    def _take_down(self) -> None:
        if self._launching is not None:
            self._try(lambda: self._sdk.get(self._sdk.api_cancel([self._launching], silent=True)))
        if self._place.managed:
            if self._job is not None:
                self._try(lambda: self._sdk.get(self._sdk.jobs.cancel(job_ids=[self._job])))
        elif self._place.cluster is None:
            if self._up or self._launching is not None:
                self._try(lambda: self._sdk.get(self._sdk.down(self._name)))
                logger.info("%s is down", self._name)
        elif self._job is not None:
            self._try(lambda: self._sdk.get(self._sdk.cancel(self._name, job_ids=[self._job])))

    def _attempt(self, stage: str, task: Any, say: Say) -> dict[str, Any]:
        start = time.monotonic()
        sdk = self._sdk
        if self._place.managed:
            say({"waiting": f"{stage} waits for {self._place.describe()}, as a managed job"})
            jobs, _ = self._await(sdk.jobs.launch(task, name=f"{self._name}-{re.sub('[^a-z0-9]+', '-', stage)}"))
            self._job = jobs[0] if isinstance(jobs, Sequence) else jobs
        elif self._up:
            self._job, _ = self._await(sdk.exec(task, cluster_name=self._name))
        else:
            say({"waiting": f"{stage} waits for {self._place.describe()}, as the cluster {self._name}"})
            self._job, _ = self._await(sdk.launch(task, cluster_name=self._name, fast=True))
            self._up = True
        logger.info("%s is job %s of %s after %.1f s", stage, self._job, self._name, time.monotonic() - start)
        try:
            return self._follow(stage, say)
        except Exception:
            self._job = None
            raise

    def _await(self, request_id: str) -> Any:
        """Return the result of a launch; its log goes to ours. Raise WaitTimeout."""
        self._launching = request_id
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            self._try(lambda: self._sdk.get(self._sdk.api_cancel([request_id], silent=True)))

        timer = threading.Timer(self._place.launch_timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            result = self._sdk.stream_and_get(request_id, output_stream=LineLog())
        except Exception as error:
            self._launching = None  # not after an interruption, which leaves it to be cancelled
            if self._up and not self._place.managed and self._is_lost(error):
                raise MachinesLost(_line(error)) from error
            if expired.is_set():
                raise WaitTimeout(
                    f"{self._place.describe()} was not available within {self._place.launch_timeout:g} s "
                    f"(compute.places.*.launch_timeout); {RESUME_HINT}"
                ) from None
            raise
        finally:
            timer.cancel()
        self._launching = None
        return result

    def _follow(self, stage: str, say: Say) -> dict[str, Any]:
        """Follow the job's log to the end of the job and return the last event. Reconnects after a broken connection,
        without repeating events."""
        reported = 0
        deadline = None
        while True:
            log = JobLog(say, reported)
            try:
                self._tail(log)
                deadline = None
            except Exception as error:
                if not self._is_unreachable(error):
                    raise
                deadline = deadline or time.monotonic() + self._patience
                logger.warning("%s is unreachable: %s", self._name, _line(error))
            reported = max(reported, log.events)
            if log.last is not None:
                if "error" in log.last:
                    raise self._failed(log.last["error"])
                return log.last
            try:
                if self._has_ended(stage, log):
                    raise self._no_result(stage, log)
            except (MachinesLost, EspalierError):
                raise
            except Exception as error:
                if not self._is_unreachable(error):
                    raise
                deadline = deadline or time.monotonic() + self._patience
            if deadline is not None and time.monotonic() > deadline:
                raise ResourceError(
                    f"{self._name} was unreachable for {self._patience:g} s while {stage} ran there; {RESUME_HINT}"
                )
            time.sleep(min(5.0, self._patience / 10))

    def _is_unreachable(self, error: Exception) -> bool:
        """Return True if only the server could not be reached. Raises MachinesLost if the cluster is gone."""
        if type(error).__name__ in SERVER_ERRORS:
            return True
        if not self._place.managed and self._is_lost(error):
            raise MachinesLost(_line(error)) from error
        return False

    def _tail(self, log: JobLog) -> None:
        if self._place.managed:
            self._sdk.jobs.tail_logs(job_id=self._job, follow=True, output_stream=log)
        else:
            self._sdk.tail_logs(self._name, self._job, follow=True, output_stream=log)
        log.finish()

    def _has_ended(self, stage: str, log: JobLog) -> bool:
        """Return True if the job has ended. Raises MachinesLost if its machines are gone."""
        status = self._status()
        logger.info("%s: job %s of %s is %s", stage, self._job, self._name, status)
        if self._place.managed:
            return status is None or status.startswith("FAILED") or status in ("SUCCEEDED", "CANCELLED")
        if status is None:
            raise MachinesLost("its jobs no longer exist")
        if status in ("FAILED", "FAILED_DRIVER", "CANCELLED") and not self._alive():
            raise MachinesLost("its machines no longer exist")
        return status.startswith("FAILED") or status in ("SUCCEEDED", "CANCELLED")

    def _status(self) -> str | None:
        if self._place.managed:
            result = self._sdk.get(self._sdk.jobs.queue_v2(refresh=False, job_ids=[self._job]))
            rows = result[0] if isinstance(result, tuple) else result
            states = [row["status"] for row in rows]
        else:
            result = self._sdk.get(self._sdk.job_status(self._name, job_ids=[self._job]))
            states = list(result.values())
        return None if not states or states[0] is None else str(getattr(states[0], "value", states[0]))

    def _is_lost(self, error: Exception) -> bool:
        """Return True if an error was caused by the loss of the cluster. Without the node, job requests fail in many
        ways."""
        return type(error).__name__ in LOST_ERRORS or not self._alive()

    def _alive(self) -> bool:
        """Return True if the cluster stays up according to the cloud. A node that is being preempted counts as up until
        its processes have ended."""
        end = time.monotonic() + min(NODE_GRACE, self._patience)
        while (up := self._is_up()) and time.monotonic() < end:
            time.sleep(min(2.0, self._patience / 10))
        return up

    def _is_up(self) -> bool:
        refresh = self._sdk.StatusRefreshMode.FORCE
        clusters = self._sdk.get(self._sdk.status([self._name], refresh=refresh))
        return bool(clusters) and str(getattr(clusters[0]["status"], "value", clusters[0]["status"])) == "UP"

    def _failed(self, data: Mapping[str, Any]) -> EspalierError:
        """Return the stage's own error."""
        return full_disk(str(data.get("message")), self._place, self._name) or error_from_json(data)

    def _no_result(self, stage: str, log: JobLog) -> EspalierError:
        last = "\n".join(log.lines)
        if (full := full_disk(last, self._place, self._name)) is not None:
            return full
        return EspalierError(
            f"{stage} ended on {self._name} as {self._status()} without a result; {RESUME_HINT}. "
            f"Its last output:\n{last}"
        )

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  it may be gone already, and autostop is the fallback
            logger.warning("%s: %s: %s", self._name, type(error).__name__, _line(error))


def _secrets(place: SkyPlace) -> list[tuple[str, str]]:
    for message in place.prerequisites():
        raise ResourceError(message)
    return [(name, os.environ[name]) for name in place.secrets]


def _line(error: BaseException) -> str:
    """Return the message of an error in one line, without the colours of a terminal."""
    return " ".join(COLOUR.sub("", str(error)).split())[:300] or type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m components.compute.sky.driver")
    parser.add_argument("--job", required=True, help="JSON: fields of components.compute.sky.task.TaskTemplate")
    parser.add_argument("--requests", action="store_true", required=True, help="as lines on standard input")
    parser.add_argument("root", metavar="root=DIR", help="run root on this machine; not used")
    options = parser.parse_args(arguments)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # SkyPilot prints to standard output
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    job = json.loads(options.job)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    drivers: list[Driver] = []
    watch_parent(lambda: _shut_down(drivers), 0.0, lines.put)
    try:
        while True:
            request = json.loads(lines.get())
            if not drivers:
                drivers.append(_driver(job))
            last = _answer(drivers[0], request, lambda line: print(json.dumps(line), file=out))
            print(json.dumps(last), file=out)
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    finally:
        _shut_down(drivers)


def _shut_down(drivers: Sequence[Driver]) -> None:
    for driver in drivers:
        ending = threading.Thread(target=driver.end, daemon=True)
        ending.start()
        ending.join(SHUTDOWN_TIMEOUT)


def _driver(data: Mapping[str, Any]) -> Driver:
    import sky

    place, workdir = SkyPlace.model_validate(data["place"]), Path(data["workdir"])
    return Driver(sky, TaskTemplate(**{**data, "place": place, "workdir": workdir}))


def _answer(driver: Driver, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    try:
        return driver.run(request, say)
    except EspalierError as error:
        return {"error": error_to_json(error)}


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
