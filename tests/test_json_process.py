"""Child processes that answer requests as lines of JSON."""

from __future__ import annotations

import asyncio
import resource
import sys
import time

import psutil
import pytest

from components import json_process, json_worker
from components.json_process import JsonProcess, JsonProgram, ProcessExited, RequestFailed, wait_for

LIMIT = 300.0
"""Time limit of a response in seconds; no test reaches it."""


def program(name, **options) -> JsonProgram:
    return JsonProgram(f"tests.json_targets:{name}", **options)


@pytest.fixture
def start():
    processes = []

    def started(name, **options) -> JsonProcess:
        processes.append(JsonProcess(program(name, **options)))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        assert not process.alive


def test_results_are_those_of_the_function_and_printed_text_is_no_response(start):
    process = start("echo")
    responses = [process.request({"number": number, "text": "ä\n\u2028\ud800"}) for number in range(20)]
    assert [response.result(LIMIT)["number"] for response in responses] == list(range(20))
    assert responses[0].result()["text"] == "ä\n\u2028\ud800"
    with pytest.raises(TypeError, match="not JSON serializable"):
        process.request({"a": {1, 2}})
    assert process.request({}).result(LIMIT) == {}


def test_exception_of_the_function_fails_only_its_request(start):
    process = start("fail")
    with pytest.raises(RequestFailed, match=r"^ValueError: no such thing$") as caught:
        process.request({"text": "no such thing"}).result(LIMIT)
    assert (caught.value.kind, caught.value.text) == ("ValueError", "no such thing")
    with pytest.raises(RequestFailed, match="unexpected keyword argument 'other'"):
        process.request({"other": 1}).result(LIMIT)
    with pytest.raises(RequestFailed, match="the result is not JSON-serializable"):
        program("unserializable").call({}, LIMIT)


def test_death_fails_all_requests_with_the_end_of_stderr(start):
    process = start("die")
    pending = [process.request({"code": 7}), process.request({"code": 8})]
    for response in [*pending, process.request({"code": 9})]:
        with pytest.raises(ProcessExited, match=r"^exit code 7; stderr: the last words$") as caught:
            response.result(LIMIT)
        assert caught.value.code == 7
    assert not process.alive


def test_target_that_cannot_be_imported_is_named():
    process = JsonProcess(JsonProgram("tests.nowhere:nothing"))
    with pytest.raises(ProcessExited, match=r"No module named 'tests\.nowhere'"):
        process.ready.result(LIMIT)
    with pytest.raises(OSError, match="no/such/python"):
        JsonProcess(JsonProgram("tests.nowhere:nothing", python=("/no/such/python",)))


@pytest.mark.parametrize(
    "line", ["garbage", "[1, 2]", "{}", '{"id": 99, "result": 1}', '{"id": [], "result": 1}', '{"id": 1, "error": 5}']
)
def test_child_that_violates_the_protocol_is_killed(start, line):
    with pytest.raises(ProcessExited, match="signal 9"):
        start("intrude").request({"line": line}).result(LIMIT)


def test_response_that_cannot_be_read_fails_all_requests(start, monkeypatch):
    def settle(self, line):
        raise MemoryError

    monkeypatch.setattr(json_process._Responses, "settle", settle)
    process = start("hang")
    for response in (process.ready, process.request({})):
        with pytest.raises(ProcessExited, match="signal 9"):
            response.result(LIMIT)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # pipes without a thread are garbage-collected
@pytest.mark.parametrize("work", ["_collect", "_write", "_read"])
def test_child_is_killed_if_no_thread_can_be_started(monkeypatch, work):
    start_thread, children = json_process._start_thread, []

    def start_some(function, *arguments):
        children.extend(child for child in psutil.Process().children() if child not in before)
        if function.__name__ == work:
            raise RuntimeError("can't start new thread")
        return start_thread(function, *arguments)

    before = psutil.Process().children()
    monkeypatch.setattr(json_process, "_start_thread", start_some)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        JsonProcess(program("hang"))
    assert children
    assert not any(child.is_running() for child in children)


def test_memory_limit():
    limits = {"RLIMIT_AS": 1 << 30}
    assert program("allocate", limits=limits).call({"megabytes": 1}, LIMIT) == 1 << 20
    with pytest.raises(RequestFailed, match="MemoryError"):
        program("allocate", limits=limits).call({"megabytes": 2000}, LIMIT)


@pytest.mark.parametrize("closed", [False, True])
def test_session_ends_with_the_child(start, closed):
    process = start("Leader", new_session=True)
    member = psutil.Process(process.request({"code": 0}).result(LIMIT))
    if closed:
        process.close(LIMIT)
    else:
        with pytest.raises(ProcessExited, match="exit code 7"):
            process.request({"code": 7}).result(LIMIT)
    deadline = time.monotonic() + LIMIT
    while member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lower_limits_hold(start):
    python = ("sh", "-c", 'ulimit -n 64; exec "$0" "$@"', sys.executable)
    process = start("limit", python=python, limits={"RLIMIT_NOFILE": 65, "RLIMIT_CORE": 0})
    assert process.request({"name": "RLIMIT_NOFILE"}).result(LIMIT) == [64, 64]
    assert process.request({"name": "RLIMIT_CORE"}).result(LIMIT) == [0, 0]


def test_refused_limit_is_named(monkeypatch):
    def refuse(kind, limits):
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(OSError, match=r"refuses the resource limit RLIMIT_CORE = 0: not allowed"):
        json_worker.set_limit("RLIMIT_CORE", 0)
    monkeypatch.setattr(sys, "platform", "darwin")
    json_worker.set_limit("RLIMIT_AS", 1 << 30)


def test_time_limits_of_the_caller(start):
    with pytest.raises(TimeoutError):
        program("hang").call({}, 0.1)
    calls = []

    def expired() -> str:
        calls.append(time.monotonic())
        return "it was stopped" if len(calls) == 3 else ""

    with pytest.raises(TimeoutError, match="it was stopped"):
        wait_for(start("hang").request({}), expired)
    assert len(calls) == 3


def test_calls_of_an_async_target_run_concurrently_and_it_is_closed(start, tmp_path):
    process = start("Meeting")
    path = tmp_path / "closed"

    async def meet():
        requests = [process.request({"name": name, "path": str(path)}) for name in "abc"]
        return await asyncio.gather(*map(asyncio.wrap_future, requests))

    assert asyncio.run(meet()) == [["a", "b", "c"]] * 3
    process.close(LIMIT)
    assert path.read_text() == "closed"


def test_abandoned_request_does_not_disturb_the_next(start):
    process = start("hang")

    async def impatient():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.wrap_future(process.request({"seconds": 1.0}))
        return await asyncio.wrap_future(process.request({"seconds": 0.0}))

    assert asyncio.run(impatient()) is None
