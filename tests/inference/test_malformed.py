"""Tests of malformed requests to a real server over a socket: no 5xx, no hang, bounded memory."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.inference.malformed import SHORT, Malformed, malformed
from tests.inference.victim import Pulse, Victim

pytestmark = pytest.mark.security
EXTRA_MB = 500
AT_ONCE = 4


def sent(server: Victim, request: Malformed, adapters: Path) -> tuple[int, bytes]:
    body = request.body.replace(b"ADAPTERS", str(adapters).encode())
    if request.raw:
        raw = request.raw.replace(b"127.0.0.1:PORT", b"127.0.0.1:%d" % server.port)
        return server.send_raw(raw, close=request.close)
    try:
        return server.send(request.method, request.path, body, request.headers)
    except UnicodeEncodeError:
        return 0, b""  # the client's own library refuses to send it


def attack(server: Victim, adapters: Path, numbers: range) -> Counter:
    """Sends them, and valid requests in between; returns how often each status came."""
    valid = json.dumps(SHORT).encode()
    for _ in range(3):
        assert server.send("POST", "/v1/chat/completions", valid)[0] == 200
    before = server.reset_peak()
    failed: list[str] = []

    def one(number: int) -> int:
        request = malformed(number)
        try:
            status, answer = sent(server, request, adapters)
        except OSError as error:
            failed.append(f"{type(error).__name__} of {request}")
            return -1
        if status >= 500:
            failed.append(f"{status} {answer[:300]!r} of {request}")
        if status == 0 and request.kind != "http":  # only what is no request may end without an answer
            failed.append(f"no answer to {request}")
        if number % 20 == 0 and (again := server.send("POST", "/v1/chat/completions", valid))[0] != 200:
            failed.append(f"{again[0]} {again[1][:300]!r} of a valid request after {request}")
        return status

    with Pulse(server) as pulse, ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = Counter(pool.map(one, numbers))
    extra = server.memory("VmHWM") - before
    print(f"\n{dict(sorted(statuses.items()))}; {extra:.0f} MB more; /health within {pulse.slowest:.2f} s at most")
    assert failed == []
    assert server.process.poll() is None
    assert pulse.failed == []
    assert pulse.answers > 3
    assert extra < EXTRA_MB
    return statuses


def test_the_generator_repeats_itself():
    assert [str(malformed(number)) for number in range(50)] == [str(malformed(number)) for number in range(50)]


@pytest.mark.timeout(1800)
def test_250_malformed_requests(attacked, adapters):
    assert attack(attacked, adapters, range(250))[400] > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_2000_malformed_requests(attacked, adapters):
    assert attack(attacked, adapters, range(2000))[400] > 800
