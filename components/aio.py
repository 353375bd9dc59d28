"""Helpers for asyncio: event loops, threads, ordered concurrent work, and subprocess cleanup."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import uvloop

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 4
"""Limit on items buffered by `in_order`, as a multiple of the concurrency. One slow item delays at most this many."""
PATIENCE = 10.0
"""Seconds that cancelled tasks and killed processes have to end."""
_POLL = 0.01
"""Seconds between two checks for the end of a killed process."""
_started: ContextVar[list[asyncio.SubprocessTransport] | None] = ContextVar("started", default=None)
"""Transports of the processes started inside the current `ending_processes`."""


class _Loop(asyncio.SelectorEventLoop):
    """Event loop that records the processes started on it inside `ending_processes`."""

    async def subprocess_exec(self, *arguments: Any, **options: Any) -> Any:
        return _recorded(await super().subprocess_exec(*arguments, **options))

    async def subprocess_shell(self, *arguments: Any, **options: Any) -> Any:
        return _recorded(await super().subprocess_shell(*arguments, **options))


def _recorded(transport_and_protocol: tuple[asyncio.SubprocessTransport, Any]) -> Any:
    started = _started.get()
    if started is not None:
        started.append(transport_and_protocol[0])
    return transport_and_protocol


@contextlib.asynccontextmanager
async def ending_processes() -> AsyncIterator[None]:
    """Kill, at the end of the block, the subprocesses that its coroutines started, and close their pipes.

    Covers processes started through asyncio on a loop of `run`. The transports must close before the loop does."""
    started: list[asyncio.SubprocessTransport] = []
    token = _started.set(started)
    try:
        yield
    finally:
        _started.reset(token)
        # Not by the transport, whose `close` and `kill` would collect the exit status of a process that has just ended:
        # asyncio's child watcher then finds no process, and warns.
        for transport in started:
            if transport.get_returncode() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(transport.get_pid(), signal.SIGKILL)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    while any(transport.get_returncode() is None for transport in started):
                        await asyncio.sleep(_POLL)
        finally:  # also if this task is cancelled while it waits
            for transport in started:
                transport.close()
        for _ in range(3):  # of a pipe, of the process, and of its end
            await asyncio.sleep(0)  # lets the transports process their closing callbacks


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on an event loop of its own. Uses a new thread if this thread already runs a loop, as
    in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = queue.SimpleQueue()

    async def work_with_handle() -> Result:
        task = asyncio.current_task()
        assert task is not None
        started.put((task.get_loop(), task))
        return await work

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(_run, work_with_handle())
        loop, task = started.get()
        try:
            return result.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, called in a thread of its own.

    A cancelled caller does not wait for the thread: `work` may never end, and must block neither the engine nor the
    exit of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:  # a future rejects StopIteration
            future.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  re-raised in the awaiting coroutine
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="in-thread").start()
    return await future


async def stoppable(
    work: Callable[[], Result], stop: threading.Event, pool: concurrent.futures.Executor | None = None
) -> Result:
    """Return the result of `work`, run in a thread. On cancellation, set `stop` and wait for the work to end. pool:
    separate threads, for work that waits for the results of other threads."""
    task = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(Exception):
            await task
        raise


def in_order(work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int) -> Iterator[Result]:
    """Yield work(item) of each item, in the order of the items.

    At most `at_once` run concurrently, on one event loop in a thread of its own, which keeps running while the caller
    consumes results. An exception is raised at the position of its item. When the generator ends, unfinished work is
    cancelled."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="in-order")
    turns = asyncio.Semaphore(at_once)

    async def bounded_work(item: Item) -> Result:
        async with turns:
            return await work(item)

    async def cancel_all() -> None:
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=PATIENCE)
        await loop.shutdown_asyncgens()

    thread.start()
    waiting: deque[concurrent.futures.Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(asyncio.run_coroutine_threadsafe(bounded_work(item), loop))
            while waiting and (waiting[0].done() or len(waiting) == AHEAD * at_once):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
