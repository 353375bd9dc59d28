"""Tests of attacks on the inference server: size, slowness, origins, missing keys, rows that affect their batch."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable

import pytest
import torch

from components.errors import ContextOverflow, EngineError, PromptRefused, ResourceError, SpecError
from components.inference import chat_completions, connection
from components.inference import server as server_module
from components.inference.access import check_key
from components.inference.protocol import ChatRequest, Sampling
from components.inference.request_bodies import RequestContext
from components.inference.server import ListenOptions, ModelServer
from components.specs.served import SERVER_KEY_VARIABLE
from components.strict_json import MAX_DEPTH, MAX_VALUES, parse
from tests.inference.exact import ask, assert_exact
from tests.inference.malformed import SHORT
from tests.inference.test_server import EchoEngine
from tests.inference.victim import ROOT, Pulse, Victim

pytestmark = [pytest.mark.security, pytest.mark.timeout(1800)]
CHAT = "/v1/chat/completions"
KEY = "k3y-of-sixteen-and-more"


def chat_body(text: str) -> bytes:
    return json.dumps({**SHORT, "messages": [{"role": "user", "content": text}]}).encode()


def list_of(name: str, item: bytes, size: int) -> bytes:
    return b'{"model": "tiny", "' + name.encode() + b'": [' + (item * (size // len(item)))[:-1] + b"]}"


LARGE = {
    "prompt of 8 MB": (CHAT, lambda: chat_body("word " * 1_600_000), 413),
    "prompt just below the limit": (CHAT, lambda: chat_body("word " * 800_000), 400),
    "16 kB of numbers as messages": (CHAT, lambda: list_of("messages", b"1,", 16_000), 400),
    "2 MB of numbers as messages": (CHAT, lambda: list_of("messages", b"1,", 2_000_000), 400),
    "4000 messages without a role": (CHAT, lambda: list_of("messages", b'{"x":1},', 32_000), 400),
    "2 MB of empty parts": (
        CHAT, lambda: b'{"model":"tiny","messages":[{"role":"user","content":[' + b"{}," * 66_000 + b"{}]}]}", 400,
    ),
    "items of responses": ("/v1/responses", lambda: list_of("input", b'{"role":1},', 500_000), 400),
    "tools": (CHAT, lambda: list_of("tools", b'{"type":1},', 500_000), 400),
    "a key of 3 MB": (CHAT, lambda: b'{"' + b"k" * 3_000_000 + b'": 1}', 400),
    "60,000 unknown keys": (CHAT, lambda: b"{" + b",".join(b'"k%d":1' % i for i in range(60_000)) + b"}", 400),
    "URL marks in an error": (CHAT, lambda: b'{"model": ["' + b"a." * 1_000_000 + b'"]}', 400),
    "escaped quotes without an end": (CHAT, lambda: b'{"model": "' + b'\\"' * 1_500_000, 400),
    "opened lists": (CHAT, lambda: b"[" * 1_000_000, 400),
}  # fmt: skip


def test_large_requests_are_refused_at_once(attacked: Victim):
    """A prompt of 8 MB took 40 s and 1.9 GB, 16 kB of numbers 9 s, and `/health` waited for them."""
    with Pulse(attacked) as pulse:
        for name, (path, body, expected) in LARGE.items():
            data = body()
            before = attacked.reset_peak()
            began = time.monotonic()
            status, answer = attacked.send("POST", path, data, timeout=100)
            seconds = time.monotonic() - began
            assert status == expected, (name, answer[:500])
            assert len(answer) < 5_000, name
            assert attacked.memory("VmHWM") - before < 300, name
            assert seconds < 20, name
    assert pulse.failed == []


def _properties(names: Iterable[str], schema: dict) -> dict:
    return {"type": "object", "properties": dict.fromkeys(names, schema), "additionalProperties": False}


COSTLY = {
    "a large multiple": {"type": "integer", "multipleOf": 123456789, "minimum": 0, "maximum": 10**15},
    "a multiple with many digits": {"anyOf": [{"type": "number", "multipleOf": 1.23456789}]},
    "multiples that hold together": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]},
    "many multiples": {"anyOf": [{"type": "integer", "multipleOf": n, "minimum": -1e15} for n in range(9000, 9200)]},
    "a bound of 400 digits": {"type": "number", "minimum": 10**399},
    "2,000 optional properties": _properties([f"k{n}" for n in range(2000)], {"type": "string"}),
    "variants of variants": {"allOf": [{"anyOf": [_properties("abcdefghi"[:n], {}) for n in range(10)]}] * 12},
    "patterns that hold together": {
        "allOf": [{"type": "string", "pattern": f"([ab]*a[ab]{{{n}}}c)+"} for n in range(40)]
    },
}


@pytest.mark.parametrize(
    ("name", "place"), [*((name, "response_format") for name in COSTLY), ("many multiples", "tool_choice")]
)
def test_a_costly_schema_is_refused_without_harm_to_other_requests(attacked: Victim, name, place):
    """A multiple of nine digits took 17 GB and stopped the engine for 20 minutes."""
    pytest.importorskip("llguidance")
    schema = COSTLY[name]
    demand: dict = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    if place == "tool_choice":
        function = {"name": "f", "parameters": {**_properties(["a"], schema), "required": ["a"]}}
        demand = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    assert attacked.send("POST", CHAT, chat_body("And now?"))[0] == 200
    before = attacked.family_memory()
    with Pulse(attacked, body=chat_body("And now?")) as pulse:
        began = time.monotonic()
        status, answer = attacked.send("POST", CHAT, json.dumps({**SHORT, **demand}).encode(), timeout=100)
        seconds = time.monotonic() - began
    more = pulse.most_memory - before
    print(f"\n{name}: {status} after {seconds:.1f} s; {more:.0f} MB more; others within {pulse.slowest:.2f} s")
    assert status == 400, answer[:500]
    assert json.loads(answer)["error"]["param"] == place
    assert pulse.failed == []
    assert more < 300
    assert seconds < 30


def test_a_prompt_longer_than_the_context_is_refused_before_it_is_tokenised(attacked: Victim):
    status, answer = attacked.send("POST", CHAT, chat_body("word " * 700_000))
    assert status == 400
    error = json.loads(answer)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "characters" in error["message"]


@pytest.mark.parametrize("declared", [None, 10, 10**12])
def test_a_body_is_counted_as_it_arrives(attacked: Victim, declared):
    """Chunked without an end, and with a Content-Length that is too small or too large."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{attacked.port}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {declared}\r\n\r\n" if declared else "transfer-encoding: chunked\r\n\r\n"
    before = attacked.reset_peak()
    chunk = b'{"a": "' + b"x" * 65_529
    framed = chunk if declared else b"10000\r\n" + chunk + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=60) as client, contextlib.suppress(OSError):
        client.sendall(head.encode())
        while sent < 256 << 20:
            client.sendall(framed)
            sent += len(framed)
    status, _ = attacked.send("GET", "/health")
    assert status == 200
    assert attacked.memory("VmHWM") - before < 100


def test_an_honest_client_reads_why_its_body_is_refused(attacked: Victim):
    status, answer = attacked.send("POST", CHAT, b" " * (connection.MAX_BODY_BYTES + 1))
    assert (status, json.loads(answer)["error"]["type"]) == (413, "invalid_request_error")


def test_headers_are_bounded(attacked: Victim):
    before = attacked.reset_peak()
    head = f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{attacked.port}\r\nx: ".encode()
    status, _ = attacked.send_raw(head + b"y" * 50_000_000)
    assert status in (0, 400)  # 0: the connection was reset while we were sending
    assert attacked.memory("VmHWM") - before < 50


def calls_made(work) -> int:
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        with contextlib.suppress(SpecError):
            work()
    finally:
        sys.setprofile(None)
    return count


def test_validation_is_linear():
    for item in (1, {}, {"role": "user", "content": [1]}, {"role": "user", "content": 5, "x": 1}):

        def validate(count: int, item: object = item):
            body = {"model": "tiny", "messages": [item] * count}
            return lambda: chat_completions.read_request(body, RequestContext(lambda model: "base"))

        calls_made(validate(10))  # what is cached is cached now
        assert calls_made(validate(2000)) < 6 * calls_made(validate(500)) + 2000, item


NO_JSON = {
    "NaN": b'{"model": "tiny", "temperature": NaN}',
    "overflow": b'{"model": "tiny", "temperature": 1e999}',
    "digits": b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}",
    "twice": b'{"model": "tiny", "model": "tiny", "messages": [{"role": "user", "content": "x"}]}',
    "surrogate": b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "surrogate in a label": b'{"model": "tiny", "input": "x", "user": "\\udfff"}',
    "deep": b'{"model": ' + b"[" * 500 + b"]" * 500 + b"}",
    "not UTF-8": b'{"model": "\xff"}',
    "null byte": b'{"model": "\x00"}',
}


def test_json_that_not_everything_can_carry_is_refused(attacked: Victim):
    for name, body in NO_JSON.items():
        for path in (CHAT, "/v1/responses", "/v1/load_lora_adapter"):
            status, answer = attacked.send("POST", path, body)
            assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error"), (name, path)


def test_the_bounds_of_json_are_no_narrower_than_they_say():
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    text = json.dumps({"a": '[{,\\"' * 100_000, "b": "😀\ud83d\ude00", "c": -1.5e300, "d": 10**300})
    assert parse(text.encode()) == json.loads(text)
    assert len(parse(json.dumps([1] * (MAX_VALUES - 1)).encode())) == MAX_VALUES - 1
    with pytest.raises(ValueError, match="more than"):
        parse(json.dumps([1] * (MAX_VALUES + 1)).encode())
    with pytest.raises(ValueError, match="deeper"):
        parse(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


# Who may ask


@pytest.fixture(scope="module")
def echo():
    with ModelServer(EchoEngine(), "shop") as server:
        yield server


@pytest.fixture(scope="module")
def locked():
    with ModelServer(EchoEngine(), "shop", listen=ListenOptions(key=KEY)) as server:
        yield server


def get(server: ModelServer, path: str = "/v1/models", address: str = "127.0.0.1", **headers: str):
    link = http.client.HTTPConnection(address, server.port, timeout=600)
    try:
        link.putrequest("GET", path, skip_host=True)
        for name, value in ({"host": f"127.0.0.1:{server.port}"} | headers).items():
            link.putheader(name, value)
        link.endheaders()
        response = link.getresponse()
        response.read()
        return response
    finally:
        link.close()


HOSTS = {
    **dict.fromkeys(["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT", "[::1]:PORT"], 200),
    **dict.fromkeys(["127.0.0.1", "127.0.0.1:1", "evil.example", "evil.example:PORT", "[::1", ""], 421),
    **dict.fromkeys(["127.0.0.1.evil.example:PORT", "localhost.evil.example:PORT", "127.0.0.1:PORT/x"], 421),
    **dict.fromkeys(["evil.example@127.0.0.1:PORT", "127.0.0.1:PORT@evil.example"], 421),
}


def test_host_must_name_this_server(echo):
    for path in ("/health", "/v1/models", "/nothing"):
        passed = 404 if path == "/nothing" else 200
        statuses = {host: get(echo, path, host=host.replace("PORT", str(echo.port))).status for host in HOSTS}
        assert statuses == {host: passed if status == 200 else status for host, status in HOSTS.items()}


def test_further_hosts_may_be_allowed():
    with ModelServer(
        EchoEngine(), "shop", listen=ListenOptions(allowed_hosts=("models.example", "tunnel:9000"))
    ) as server:
        hosts = {"models.example": 200, "models.example:7": 200, "tunnel:9000": 200, "tunnel:1": 421, "evil": 421}
        assert {host: get(server, host=host).status for host in hosts} == hosts


def test_pages_of_other_origins_are_refused_and_cors_allows_none(echo):
    own = f"http://127.0.0.1:{echo.port}"
    for origin in (own, "http://evil.example", "null", "http://127.0.0.1:1", "file://", "x", ""):
        response = get(echo, origin=origin)
        assert response.status == (200 if origin == own else 403), origin
        assert not [name for name, _ in response.getheaders() if name.lower().startswith("access-control-")]


def test_a_key_is_asked_for_on_every_route_but_health(locked):
    wrong = ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer é"]
    for authorization in (f"Bearer {KEY}", f"bearer {KEY}", *wrong):
        paths = {path: get(locked, path, authorization=authorization).status for path in ("/v1/models", "/v1/none")}
        refused = authorization in wrong
        assert paths == {"/v1/models": 401 if refused else 200, "/v1/none": 401 if refused else 404}, authorization
        assert get(locked, "/health", authorization=authorization).status == 200


def test_two_keys_are_none(locked):
    raw = f"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:{locked.port}\r\n" + f"authorization: Bearer {KEY}\r\n" * 2
    with socket.create_connection(("127.0.0.1", locked.port), timeout=20) as client:
        client.sendall(f"{raw}\r\n".encode())
        assert b" 401 " in client.recv(1000)


def test_without_a_key_only_this_machine_is_served():
    expected = r"requires an API key. Set the environment variable ESPALIER_SERVER_KEY"
    for host in ("0.0.0.0", "::", "", "192.0.2.1", "models.example"):
        with pytest.raises(ResourceError, match=expected):
            ModelServer(EchoEngine(), "shop", listen=ListenOptions(host=host))


def test_a_key_that_is_weak_or_no_header_is_refused():
    for key in ("short", "with a space in it", "x" * 15, "é" * 20):
        with pytest.raises(ResourceError, match="at least 16 printable ASCII characters") as caught:
            ModelServer(EchoEngine(), "shop", listen=ListenOptions(key=key))
        assert key not in str(caught.value)
    with pytest.raises(ResourceError, match="which begin with tml-") as caught:
        check_key("127.0.0.1", KEY, prefix="tml-")
    command = shlex.split(str(caught.value).partition("Generate one: ")[2])
    check_key("0.0.0.0", subprocess.check_output(command, text=True).strip(), prefix="tml-")


def test_on_all_addresses_the_key_is_asked_for_and_any_host_passes():
    with ModelServer(EchoEngine(), "shop", listen=ListenOptions(host="0.0.0.0", key=KEY)) as server:
        for host in ("10.0.0.7:8000", "models.example"):
            assert get(server, host=host).status == 401
            assert get(server, host=host, authorization=f"Bearer {KEY}").status == 200
            assert get(server, "/health", host=host).status == 200
        assert get(server, authorization=f"Bearer {KEY}", origin="http://evil.example").status == 403


def test_the_command_refuses_to_start_without_a_key(base_dir):
    environment = {name: value for name, value in os.environ.items() if name != SERVER_KEY_VARIABLE}
    command = [sys.executable, "-m", "components.inference.server", str(base_dir), "--host", "0.0.0.0", "--port", "0"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2
    assert "--host 0.0.0.0" in ended.stderr
    assert SERVER_KEY_VARIABLE in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_command_takes_the_key_from_the_environment_only(base_dir, monkeypatch, caplog):
    received = {}

    @contextlib.contextmanager
    def serve_model(**options):
        received.update(options)
        raise ResourceError("stop here")
        yield

    monkeypatch.setattr(server_module, "serve_model", serve_model)
    monkeypatch.setenv(SERVER_KEY_VARIABLE, KEY)
    assert server_module.main([str(base_dir), "--host", "0.0.0.0", "--allowed-host", "a", "--allowed-host", "b:1"]) == 2
    assert (received["listen"].key, received["listen"].allowed_hosts) == (KEY, ("a", "b:1"))
    assert KEY not in caplog.text


# Slow clients


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 8)
    with ModelServer(EchoEngine(), "shop") as server:
        yield server


def closed(client: socket.socket) -> bytes:
    """What was received up to where the other side closes the connection."""
    client.settimeout(30)
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(65536):
            received += chunk
    return received


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: a\r\nx: "])
def test_slow_headers_end_their_connection(hasty, sent):
    with socket.create_connection(("127.0.0.1", hasty.port)) as client:
        client.sendall(sent)
        assert get(hasty, "/health").status == 200
        assert closed(client) == b""


def test_a_slow_second_request_ends_its_connection(hasty):
    with socket.create_connection(("127.0.0.1", hasty.port)) as client:
        client.sendall(f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{hasty.port}\r\n\r\n".encode())
        assert b" 200 " in client.recv(10_000)
        client.sendall(b"GET /he")
        closed(client)


def test_a_slow_body_ends_with_its_reason(hasty):
    with socket.create_connection(("127.0.0.1", hasty.port)) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{hasty.port}\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: 100\r\n\r\n".encode() + b"{")
        assert get(hasty, "/health").status == 200
        assert b" 408 " in client.recv(1000)


def test_connections_are_bounded_and_free_again(hasty):
    idle = [socket.create_connection(("127.0.0.1", hasty.port)) for _ in range(8)]
    try:
        with socket.create_connection(("127.0.0.1", hasty.port)) as client:
            assert b" 503 " in closed(client)
        assert [closed(connection) for connection in idle] == [b""] * 8  # their headers did not come
        assert get(hasty, "/health").status == 200
    finally:
        for connection in idle:
            connection.close()


def test_an_answer_that_is_not_read_ends_its_connection(monkeypatch):
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.5)

    class Talkative(EchoEngine):
        async def chat(self, request):
            answer = await super().chat(request)
            answer.message["content"] = "x" * 20_000_000
            return answer

    with ModelServer(Talkative(), "shop") as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = json.dumps({**SHORT, "model": "shop"}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        deadline = time.monotonic() + 600
        while not server._uvicorn.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while server._uvicorn.server_state.connections:
            assert time.monotonic() < deadline, "the connection is still held"
            time.sleep(0.05)


def test_large_bodies_that_never_end_are_bounded_together(monkeypatch):
    monkeypatch.setattr(connection, "MAX_PENDING_BYTES", 1 << 20)
    with ModelServer(EchoEngine(), "shop") as server, contextlib.ExitStack() as stack:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
        answers = []
        for _ in range(4):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=2))
            client.sendall(f"{head}content-length: 900000\r\n\r\n".encode() + b" " * 800_000)
            with contextlib.suppress(TimeoutError):
                answers.append(client.recv(1000)[:12])
        assert answers == [b"HTTP/1.1 503"] * 3
        body = json.dumps({**SHORT, "model": "shop"}).encode()
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert b" 200 " in client.recv(1000)  # small ones are answered all the same


# Rows of one batch


def together(engine, *requests):
    async def all_at_once():
        return await asyncio.gather(*(engine.chat(request) for request in requests), return_exceptions=True)

    return asyncio.run(all_at_once())


ODD = {
    "temperature of 1e-320": {"temperature": 1e-320},
    "temperature of 1e-40": {"temperature": 1e-40},
    "temperature of 1e308": {"temperature": 1e308},
    "top_p of 1e-320": {"top_p": 1e-320},
    "top_p of 0": {"top_p": 0.0},
    "min_p of 1e-320": {"min_p": 1e-320},
    "min_p of 1": {"min_p": 1.0},
    "top_k of 10**30": {"top_k": 10**30},
    "all cuts": {"top_p": 1e-300, "top_k": 1, "min_p": 1.0, "temperature": 1e-300},
    "many tokens": {"max_tokens": 10**400},
    "a great seed": {"seed": 10**400},
    "a negative seed": {"seed": -(10**400)},
}


def test_an_odd_request_does_not_harm_the_others(engine, reference):
    for name, sampling in ODD.items():
        text = "x" * 490 if "max_tokens" in sampling else "Hello"  # little room is left
        before, odd, after = together(
            engine, ask("Where is my order?", seed=1), ask(text, **sampling), ask("And mine?", seed=2)
        )
        assert_exact(reference, before)
        assert_exact(reference, after)
        if isinstance(odd, Exception):
            assert isinstance(odd, EngineError), name
            assert "not finite" in str(odd) or isinstance(odd, ContextOverflow), name
        again = together(engine, ask("Where is my order?", seed=1))
        assert again[0].token_ids == before.token_ids, name


def test_an_odd_request_among_others_over_http(attacked: Victim):
    """Regression: every request in flight got a 500."""
    from concurrent.futures import ThreadPoolExecutor

    valid = json.dumps({**SHORT, "max_tokens": 60, "seed": 4, "return_token_ids": True}).encode()
    odd = [{**SHORT, name: value} for name in ("temperature", "top_p") for value in (1e-320, 5e-324, 1e-40)]
    (alone,) = [json.loads(attacked.send("POST", CHAT, valid)[1])["choices"][0]["token_ids"]]
    with ThreadPoolExecutor(12) as pool:
        good = [pool.submit(attacked.send, "POST", CHAT, valid) for _ in range(6)]
        bad = [pool.submit(attacked.send, "POST", CHAT, json.dumps(body).encode()) for body in odd]
    assert {response.result()[0] for response in bad} == {400}
    for response in good:
        status, answer = response.result()
        assert status == 200, answer
        assert json.loads(answer)["choices"][0]["token_ids"] == alone


def tools_with(**keys: object) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f", **keys}}]}


def test_values_that_break_a_sampler_or_a_template_are_refused(attacked: Victim):
    for extra, param in (
        ({"temperature": 1e-320}, "temperature"),
        ({"temperature": 9.9e-4}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 1e-320}, "top_p"),
        ({"top_k": 2**31}, "top_k"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        (tools_with(parameters=5), "tools.0.function.parameters"),
        (tools_with(parameters={"properties": [1]}), "tools.0.function.parameters.properties"),
        (tools_with(name=""), "tools.0.function.name"),
        (tools_with(description=5), "tools.0.function.description"),
    ):
        status, answer = attacked.send("POST", CHAT, json.dumps({**SHORT, **extra}).encode())
        assert (status, json.loads(answer)["error"]["param"]) == (400, param), param


def test_the_lowest_values_and_a_tool_without_parameters_are_answered(attacked: Victim):
    lowest = ({"temperature": 1e-3}, {"top_p": 1e-9}, {"temperature": 0, "top_p": 1e-9})
    for extra in (*lowest, tools_with(parameters=None)):
        assert attacked.send("POST", CHAT, json.dumps({**SHORT, **extra}).encode())[0] == 200, extra


def test_a_row_without_finite_logits_leaves_nothing_behind(engine, reference, monkeypatch):
    """Its keys and values are not finite either, and masked ones would still spread to the next row in its slot."""
    forward = engine.batch._forward

    def spoiled(tokens, positions, rows, **options):
        logits = forward(tokens, positions, rows, **options)
        if isinstance(rows, slice):
            for place, row in enumerate(engine.batch.active):
                if row.request.seed == 666:
                    engine.batch.cache.kv[:, :, place, :, :100] = torch.nan
                    logits[place] = torch.nan
        return logits

    monkeypatch.setattr(engine.batch, "_forward", spoiled)
    first, bad, last = together(engine, ask("a" * 30), ask("b" * 30, seed=666), ask("c" * 30, seed=2))
    assert isinstance(bad, EngineError)
    assert_exact(reference, first)
    assert_exact(reference, last)
    monkeypatch.setattr(engine.batch, "_forward", forward)
    assert torch.isfinite(engine.batch.cache.kv).all()
    for answer in together(engine, *(ask("b" * 30, seed=seed) for seed in range(5))):
        assert_exact(reference, answer)


def test_a_prompt_that_cannot_be_computed_fails_without_those_under_way(engine, reference, monkeypatch):
    prefill = engine.batch.prefill

    def failing(batch):
        if any("b" * 30 in str(row.request.messages) for row in batch):
            raise RuntimeError("out of memory")
        prefill(batch)

    monkeypatch.setattr(engine.batch, "prefill", failing)

    async def one_after_the_other():
        first = asyncio.create_task(engine.chat(ask("a" * 30, max_tokens=60)))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(engine.chat(ask("b" * 30)))
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = asyncio.run(one_after_the_other())
    assert_exact(reference, first)
    assert (type(second), str(second)) == (EngineError, "RuntimeError: out of memory")


def test_conversations_that_cannot_be_tokenised_fail_alone(engine, reference):
    bad = [
        ChatRequest([{"role": "user", "content": "\ud800"}]),
        ChatRequest([]),
        ChatRequest([{"role": "user", "content": "x" * 10**6}]),
        ChatRequest(
            [{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "f", "parameters": 5}}]
        ),
        ChatRequest([{"nothing": 1}]),
        ChatRequest([{"role": "user", "content": "x" * 600}]),
    ]
    good, *errors = together(engine, ask("Hello", seed=3), *bad)
    assert_exact(reference, good)
    assert all(isinstance(error, EngineError) for error in errors)
    assert isinstance(errors[0], PromptRefused)
    assert "not valid Unicode and cannot be tokenized" in str(errors[0])
    assert isinstance(errors[2], ContextOverflow)
    assert isinstance(errors[5], ContextOverflow)


def test_a_token_that_the_model_does_not_have_fails_alone(engine, reference, monkeypatch):
    encode = engine.format.encode
    monkeypatch.setattr(engine.format, "encode", lambda text: encode(text) + ([99_999] if "zz" in text else []))
    good, bad = together(engine, ask("Hello", seed=3), ask("zz"))
    assert_exact(reference, good)
    assert isinstance(bad, PromptRefused)


def test_a_long_prompt_is_tokenised_beside_the_event_loop(make_engine):
    """The event loop continues while the prompt is tokenized."""
    engine = make_engine(max_length=4096)
    encode, ticks = engine.format.encode, 0

    def slowly(text):
        before = ticks
        deadline = time.monotonic() + 600
        while ticks < before + 5:
            assert time.monotonic() < deadline, "the event loop stands still"
            time.sleep(0.001)
        return encode(text)

    async def beside():
        nonlocal ticks
        engine.format.encode = slowly
        task = asyncio.create_task(
            engine.chat(ChatRequest([{"role": "user", "content": "x"}], sampling=Sampling(max_tokens=2)))
        )
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return await task

    assert len(asyncio.run(beside()).token_ids) > 0
