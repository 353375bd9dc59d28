"""The watchdog ends a wait without progress and reports the stacks of all threads and tasks."""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
import time

import pytest

from components.compute.watchdog import SIGNAL, stack_dump, watch
from components.errors import WaitTimeout


def hang_in_a_sleep() -> None:
    time.sleep(30)


def hang_in_a_lock() -> None:
    queue.SimpleQueue[int]().get()


def hang_in_a_loop() -> None:
    async def episode() -> None:
        await asyncio.Event().wait()

    async def all_episodes() -> None:
        await asyncio.create_task(episode(), name="episode shop-A1/0")

    asyncio.run(all_episodes())


def test_strikes_in_any_wait_of_the_main_thread():
    for hang in (hang_in_a_sleep, hang_in_a_lock, hang_in_a_loop):
        reports: list[str] = []
        with (
            pytest.raises(WaitTimeout, match=r"collect\[1\]: no progress for 0.5 s \(in .*compute.stall_timeout"),
            watch("collect[1]", 0.5, reports.append),
        ):
            hang()
        assert f"in {hang.__name__}" in reports[0]
        assert ("task episode shop-A1/0" in reports[0]) == (hang is hang_in_a_loop)


def test_progress_prevents_a_strike():
    with watch("train", 0.6, pytest.fail) as watchdog:
        for _ in range(6):
            time.sleep(0.2)
            watchdog.touch()


def test_rest_prevents_a_strike():
    with watch("train", 0.3, pytest.fail) as watchdog:
        watchdog.pause()
        time.sleep(0.8)


@pytest.mark.parametrize("limit", [0, 0.2])
def test_without_a_limit_or_in_another_thread_nothing_is_watched(limit):
    def work() -> None:
        with watch("train", limit, pytest.fail):
            time.sleep(0.6)

    if limit:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()


def test_signal_handler_is_restored():
    before = signal.getsignal(SIGNAL)
    with watch("train", 10, pytest.fail):
        assert signal.getsignal(SIGNAL) != before
    assert signal.getsignal(SIGNAL) == before


def test_failing_report_does_not_prevent_the_strike(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def broken(text: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WaitTimeout), watch("train", 0.3, broken):
        hang_in_a_lock()


def test_stack_dump_ignores_proxies():
    class Proxy:
        @property
        def __class__(self):
            raise RuntimeError("there is nothing behind this proxy")

    proxy = Proxy()
    assert "thread MainThread" in stack_dump()
    del proxy
