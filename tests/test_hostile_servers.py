"""Hostile servers: a row for each client, a column for each body. Memory, time and the error are bounded.

Each client asks in a process of its own, whose peak memory is compared with that after a valid reply.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from components.bounded_reply import InvalidReply, parse, typed

ROOT = Path(__file__).resolve().parents[1]
MOST_MEMORY = 64 << 20
DEADLINE = 1.0
"""Seconds that each client gives a reply."""
TRIES = 3
"""Maximum number of tries of an invalid reply."""
ERRORS = {"JudgeError", "EngineError", "EnvironmentFailed", "EnvironmentUnavailable", "RequestRejected"}
SLACK = 20.0
"""Seconds beyond the deadlines of all tries, for a loaded machine."""

CLIENTS = {
    "judge": """
from components.rewards.llm.budget import Meter
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
client = ServedJudge(url=URL, model="m", timeout=DEADLINE, retry_for=0).build(RewardResources(None, None, Meter()))
ask = lambda: client.call([{"role": "user", "content": "x"}], None, "q", True)
""",
    "judge of LiteLLM": """
from components.rewards.llm.models.litellm import LiteLLMJudge
import os
os.environ["OPENAI_API_KEY"] = "sk-hostile"
spec = LiteLLMJudge(model="openai/gpt-4.1-mini", extra={"api_base": URL}, timeout=DEADLINE, retry_for=0)
client = spec.build(None)
ask = lambda: client.call([{"role": "user", "content": "x"}], None, "q", True)
""",
    "remote engine": """
from components.inference.engines.remote import RemoteEngine, RemoteSpec
from components.inference.protocol import ChatRequest, Sampling
engine = RemoteEngine(RemoteSpec(url=URL, model="m", timeout=DEADLINE, retry_for=0, tokens=False))
ask = lambda: engine.chat(ChatRequest([{"role": "user", "content": "x"}], sampling=Sampling(max_tokens=16)))
""",
    "model of an environment": """
from components.environments import language_model
language_model.RETRIES = 0
model = language_model.ServedModel(url=URL, model="m", timeout=DEADLINE)
ask = lambda: model.ask([{"role": "user", "content": "x"}], seed=0, max_tokens=16)
""",
    "OpenEnv": """
from components.environments.adapters.openenv import OpenEnv
ask = OpenEnv("x", URL, timeout=DEADLINE, patience=0).tools
""",
    "AgentGym": """
from components.environments.adapters.agentgym import AgentGym
from components.trajectories.schema import Scenario
gym = AgentGym("textcraft", URL, timeout=DEADLINE, patience=0)
ask = lambda: gym.reset(Scenario("textcraft_0", {"item": 0}, "train"))
""",
    "MCP over HTTP": """
from components.environments.adapters.mcp import Mcp
ask = Mcp(None, url=URL, timeout=DEADLINE, start_timeout=DEADLINE).tools
""",
}
"""Program that defines `ask`, for each client."""

PROGRAM = """
import asyncio, json, os, sys, time, urllib.request
URL, DEADLINE, BODIES = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
{client}
def memory(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
async def once():
    try:
        return type(await ask()).__name__
    except BaseException as error:
        return f"{{type(error).__name__}}: {{error}}"[:2000]
rows = {{}}
for body in ["null", *BODIES]:
    urllib.request.urlopen(f"{{URL}}/serve/{{BODIES.index(body)}}").read()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # resets VmHWM
    before, begun = memory("VmRSS"), time.monotonic()
    error = asyncio.run(once())
    rows[body] = [error, memory("VmHWM") - before, time.monotonic() - begun]
print(json.dumps(rows), flush=True)
os._exit(0)
"""
"""Asks for each body after one for "null", which imports what a client needs."""

BOMB = gzip.compress(b"[" + b" " * (512 << 20) + b"]", 9)


def whole(body: bytes, *headers: str):
    def send(connection: socket.socket) -> None:
        head = ["HTTP/1.1 200 OK", "content-type: application/json", f"content-length: {len(body)}", *headers]
        connection.sendall("\r\n".join([*head, "connection: close", "", ""]).encode() + body)

    return send


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n[")
    for _ in range(1024):
        connection.sendall(b" " * (1 << 20))


def slow(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n[")
    for _ in range(600):
        time.sleep(0.1)
        connection.sendall(b" ")


def slow_head(connection: socket.socket) -> None:
    for character in "HTTP/1.1 200 OK\r\nx-header: " + "x" * 600:
        time.sleep(0.1)
        connection.sendall(character.encode())


BODIES = {
    "gzip": whole(BOMB, "content-encoding: gzip"),
    "nested gzip": whole(gzip.compress(BOMB), "content-encoding: gzip, gzip"),
    "another encoding": whole(b"\x28\xb5\x2f\xfd", "content-encoding: zstd"),
    "endless": endless,
    "a byte at a time": slow,
    "a head at a time": slow_head,
    "many values": whole(b"[" + b"[]," * 1_300_000 + b"[]]"),
    "deep": whole(b"[" * 2_000_000),
    "wide text": whole(b'{"choices":[{"message":{"content":"' + "\U0001f600".encode() + b"x" * 3_900_000 + b'"}}]}'),
    "a list": whole(b"[]"),
    "null": whole(b"null"),
    "a wrong form": whole(b'{"choices": {"0": 1}, "action": [], "id": "no", "done": "no", "data": null}'),
}
"""What a server sends, whatever the request."""


class Hostile:
    """Server that answers each connection with the body of a number, which GET /serve/NUMBER sets."""

    def __init__(self) -> None:
        self._send = next(iter(BODIES.values()))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Hostile:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=self._listener.accept()[:1], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(60)
            head = connection.recv(1 << 16)
            if chosen := re.match(rb"GET /serve/(\d+)", head):
                self._send = list(BODIES.values())[int(chosen[1])]
                whole(b"{}")(connection)
            elif head:
                self._send(connection)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass


@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", CLIENTS)
def test_each_body_is_a_bounded_failure_that_names_the_server(client):
    code = PROGRAM.format(client=CLIENTS[client])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Hostile() as server:
        done = subprocess.run(
            [sys.executable, "-c", code, server.url, str(DEADLINE), json.dumps(list(BODIES))],
            capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    for body, (error, memory, seconds) in rows.items():
        print(f"{client:24} {body:18} {memory / 2**20:6.1f} MB {seconds:6.2f} s  {error[:120]}")
    for body, (error, memory, seconds) in rows.items():
        assert memory < MOST_MEMORY, body
        if body == "wide text" and error.partition(":")[0] not in ERRORS:
            continue  # a valid answer
        assert error.partition(":")[0] in ERRORS, (body, error)
        assert "127.0.0.1" in error or "gpt-4.1-mini" in error, (body, error)
        assert seconds < TRIES * DEADLINE + SLACK, (body, error)


class Inner(BaseModel):
    done: bool
    reward: float | None = None


class Outer(BaseModel):
    data: Inner
    names: list[str] = []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["data", "done", "reward", "names", "x"]), inner),
)


@given(JSON)
def test_a_typed_value_has_its_form_or_is_invalid(value):
    try:
        read = typed(Outer, value)
    except InvalidReply:
        return
    assert type(read.data.done) is bool
    assert value["data"]["done"] is read.data.done
    assert all(type(name) is str for name in read.names)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_text_is_a_json_value_or_is_invalid(text):
    try:
        value = parse(text)
    except InvalidReply:
        return
    assert json.loads(json.dumps(value, allow_nan=False)) == value


@pytest.mark.parametrize("done", ["no", 1, [], {}])
def test_a_text_or_a_number_is_no_boolean(done):
    with pytest.raises(InvalidReply, match=r"as data\.done"):
        typed(Outer, {"data": {"done": done}})
