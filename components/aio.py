"""Coroutines from plain functions, plain functions in coroutines, many coroutines in the order of what they are for;
and processes that end with the coroutine that started them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import uvloop

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 4
"""Items that `in_order` holds, as a multiple of those under way: one that takes long holds up so many others."""
PATIENCE = 10.0
"""Seconds in which what is cancelled must end."""
_POLL = 0.01
"""Seconds between two looks whether a killed process has ended."""
_started: ContextVar[list[asyncio.SubprocessTransport] | None] = ContextVar("started", default=None)
"""Processes that were started in the current `ending_processes`."""


class _Loop(asyncio.SelectorEventLoop):
    """A loop that notes the processes which are started on it inside `ending_processes`."""

    async def subprocess_exec(self, *arguments: Any, **options: Any) -> Any:
        return _noted(await super().subprocess_exec(*arguments, **options))

    async def subprocess_shell(self, *arguments: Any, **options: Any) -> Any:
        return _noted(await super().subprocess_shell(*arguments, **options))


def _noted(pair: tuple[asyncio.SubprocessTransport, Any]) -> Any:
    started = _started.get()
    if started is not None:
        started.append(pair[0])
    return pair


@contextlib.asynccontextmanager
async def ending_processes() -> AsyncIterator[None]:
    """Kill, at the end of the block, the processes that its coroutines have started through asyncio on a loop of `run`
    and that still run, and close their pipes: later, the loop is closed, and asyncio's transports cannot be."""
    started: list[asyncio.SubprocessTransport] = []
    token = _started.set(started)
    try:
        yield
    finally:
        _started.reset(token)
        for transport in started:
            transport.close()  # kills the process
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while any(transport.get_returncode() is None for transport in started):
                    await asyncio.sleep(_POLL)
        await asyncio.sleep(0)  # the transports hear of it


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs to its end, on a loop of its own; in a thread where this one has a loop already, as a notebook has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = queue.SimpleQueue()

    async def told() -> Result:
        task = asyncio.current_task()
        assert task is not None
        started.put((task.get_loop(), task))
        return await work

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(_run, told())
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
    """The result of `work`, in a thread of its own that nobody waits for where this is cancelled: it may never end, and
    must hold up neither the engine's passes nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:  # a future does not take this one
            future.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  whatever it is, it is raised where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="in-thread").start()
    return await future


def in_order(work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int) -> Iterator[Result]:
    """work(item) of each item, in the order of the items: at most `at_once` under way at once, on one loop in a thread
    of its own, which goes on while the results are used. What one raises is raised in its place, and whenever this
    ends, the rest is cancelled."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="in-order")
    turns = asyncio.Semaphore(at_once)

    async def one(item: Item) -> Result:
        async with turns:
            return await work(item)

    async def cancel_all() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=PATIENCE)
        await loop.shutdown_asyncgens()

    thread.start()
    waiting: deque[concurrent.futures.Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(asyncio.run_coroutine_threadsafe(one(item), loop))
            while waiting and (waiting[0].done() or len(waiting) == AHEAD * at_once):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
