"""Child side of `components.json_process`: calls one function with the arguments of each request.

    python -P json_worker.py '{"target": "MODULE:NAME or FILE.py:NAME", "imports": [MODULE, ...], ...}'

Requests and responses are lines of JSON. The first response, with the id 0, says that the process is ready:

    {"id": 1, "arguments": {...}}  →  {"id": 1, "result": ...}  or  {"id": 1, "error": [type, text]}

A target that is a class is instantiated once; its instance is called, and closed at the end if it has `close`. Calls of
an async target run concurrently, other calls one after the other. Code that prints writes to stderr, and reads an empty
stdin. The process ends with its parent: a call in progress then has GRACE seconds, or as long as it takes
(`completes_calls`). This module imports only the standard library, so any interpreter can run it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

GRACE = 3.0
"""Time that the target has to end after the parent has closed the connection, in seconds."""
LONGEST_ERROR = 10_000
"""Maximum length of an error message in characters."""


class ParentConnection:
    """The request and response pipes of this process."""

    def __init__(self) -> None:
        self.requests: IO[bytes] = os.fdopen(os.dup(0), "rb")
        self._responses: IO[bytes] = os.fdopen(os.dup(1), "wb")
        with open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
        os.dup2(2, 1)

    @contextlib.contextmanager
    def reporting(self, request: int) -> Iterator[None]:
        """Send an exception of the block as the response."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  reported to the parent
            self._send({"id": request, "error": [type(error).__name__, str(error)[:LONGEST_ERROR]]})

    def respond(self, request: int, result: Any) -> None:
        """Send a result; NumPy's scalars become floats. Raises TypeError if it is no JSON data."""
        try:
            self._send({"id": request, "result": result})
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the result is not JSON-serializable: {error}") from None

    def _send(self, response: dict[str, Any]) -> None:
        line = json.dumps(response, default=float).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the parent has ended
            self._responses.write(line)
            self._responses.flush()

    def exit_with_parent(self) -> None:
        """Wait for the end of the connection; exit GRACE seconds later."""
        poll = select.poll()
        poll.register(self.requests, 0)  # reports only the end of the connection
        poll.poll()
        time.sleep(GRACE)
        os._exit(0)


def load(target: str) -> Callable[..., Any]:
    """Return the callable `MODULE:NAME` or `FILE.py:NAME`; an instance if it is a class."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    value = getattr(module, name)
    return value() if isinstance(value, type) else value


def set_limit(name: str, value: int) -> None:
    """Set a resource limit, unless a lower one holds. Raises OSError if the system refuses it."""
    if sys.platform == "darwin" and name == "RLIMIT_AS":  # macOS refuses every value
        return
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY and hard < value:
        return
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError) as error:
        raise OSError(f"the system refuses the resource limit {name} = {value}: {error}") from None


def serve(answer: Callable[..., Any], connection: ParentConnection, seconds: float) -> None:
    """Answer requests one after the other until the parent closes the connection. seconds: CPU time limit of a call,
    enforced by a signal that ends the process, also within C code; 0: no limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in connection.requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        with connection.reporting(request["id"]):
            connection.respond(request["id"], answer(**request["arguments"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
    if hasattr(answer, "close"):
        answer.close()


async def serve_concurrently(answer: Callable[..., Any], connection: ParentConnection) -> None:
    """Answer requests concurrently until the parent closes the connection; then cancel the unfinished ones."""
    import asyncio

    async def handle(request: dict[str, Any]) -> None:
        with connection.reporting(request["id"]):
            connection.respond(request["id"], await answer(**request["arguments"]))

    tasks: set[asyncio.Task[None]] = set()
    while line := await asyncio.get_running_loop().run_in_executor(None, connection.requests.readline):
        task = asyncio.create_task(handle(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    unfinished = list(tasks)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)
    if hasattr(answer, "close"):
        await answer.close()


def main(options: dict[str, Any]) -> None:
    """Set the limits, import the target, and answer requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    connection = ParentConnection()
    if not options["completes_calls"]:
        threading.Thread(target=connection.exit_with_parent, daemon=True).start()
    for name, value in options["limits"].items():
        set_limit(name, value)
    answer = load(options["target"])
    for module in options["imports"]:
        importlib.import_module(module)
    connection.respond(0, None)
    if inspect.iscoroutinefunction(answer) or inspect.iscoroutinefunction(type(answer).__call__):
        import asyncio

        asyncio.run(serve_concurrently(answer, connection))
    else:
        serve(answer, connection, options["seconds_per_call"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
