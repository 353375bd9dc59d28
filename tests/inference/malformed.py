"""Malformed requests, by number: the same number is always the same request.

A request is made from a valid one by mutations of its fields, of its JSON text and of its bytes, or is rubbish from the
start. Some mutations change nothing that matters: what is answered then is a valid request.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Finds an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "find_order", "arguments": '{"order": "K1"}'}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Where is it?"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "In Bern."},
        {"role": "user", "content": "And now?", "name": "Ann"},
    ],
    "tools": [TOOL],
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "n": 1,
    "seed": 3,
    "stream": False,
    "logprobs": True,
    "return_token_ids": True,
    "user": "u",
    "metadata": {"k": "v"},
    "stop": None,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "frequency_penalty": 0,
}
SHORT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
STREAM = {**SHORT, "stream": True, "stream_options": {"include_usage": True}}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where is it?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "find_order", "arguments": '{"order": "K1"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "In Bern."},
        {"role": "user", "content": "And now?"},
    ],
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "find_order", "description": "x", "parameters": {"properties": {}}}],
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "max_output_tokens": 2,
    "seed": 3,
    "stream": False,
    "store": False,
    "include": ["message.output_text.logprobs"],
    "metadata": {"k": "v"},
    "user": "u",
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Where is it?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "c1", "name": "find_order", "input": {"order": "K1"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "In Bern."}]},
    ],
    "tools": [{"name": "find_order", "description": "x", "input_schema": {"type": "object", "properties": {}}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["END"],
    "max_tokens": 2,
    "temperature": 1.0,
    "stream": False,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "disabled"},
    "output_config": {"format": None},
}
WORDS = {"model": "tiny", "input": "Hello", "max_output_tokens": 2}

RAW = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-320", "1e-45", "1e308", "-0.0", "9" * 400, "9" * 5000,
    "-" + "9" * 5000, "1" + "0" * 30, "0.1e-400", "1E400", "tru", "undefined", "'x'", "01", "+1", ".5", "0x10", "",
]  # fmt: skip
"""Texts in the place of a value, JSON or not."""
STRINGS = [
    "", " ", "\x00", "a\x00b", "\ud800", "x\udfff", "\udc80\ud800", "\ufffe\uffff", "\u202e", "\n" * 500, "x" * 10_000,
    "😀" * 2000, "e\u0301" * 500, "<|im_end|>", "<|im_start|>system\n", "{{ 7 * 7 }}", "{% for x in",
    "../../etc/passwd", "/etc", "/", ".", "~", "/proc/self/mem", "tiny@", "tiny@base", "tiny@none", "tiny@\ud800", "@",
    "tiny:agent",
    "http://user:pass@host/", "auto", "none", "function", "message", "assistant", "tool", "system", "developer", "NaN",
    "true", "1", "-1", "1e-320", "0" * 4400, "\\", '"', "%s%n", "[" * 3000, "a.b.c://" * 500,
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 3, 5, 127, 128, 129, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**64),
    10**30, 10**400, -(10**400), 0.0, -0.0, 0.1, 0.5, 0.999999, 1.0, 1.5, 2.0, 1e-7, 1e-30, 1e-39, 1e-45, 1e-310,
    1e-320, 5e-324, 1e30, 1e38, 1e39, 1e308, -1e308, -1e-320,
]  # fmt: skip
KEYS = ["", "\x00", "\ud800", "a" * 5000, "__class__", "model_config", "role", "type", "content", "a.b", "0", "\n", "é"]
PATHS = [
    "/v1/chat/completions", "/v1/responses", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models",
    "/v1/models/tiny", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/%ed%a0%80", "/v1/models/" + "x" * 5000,
    "/v1/models/tiny@base/../..", "/health", "/", "//", "/v1", "/v1/completions", "/v1/embeddings",
    "/%2e%2e/etc/passwd", "/v1/chat/completions/", "/v1/chat/completions?x=" + "y" * 5000, "/docs", "/openapi.json",
    "*",
    "http://127.0.0.1/",
]  # fmt: skip


@dataclass
class Malformed:
    number: int
    kind: str
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""
    """The whole request, where it is no HTTP request that a client writes."""
    close: bool = False

    def __str__(self) -> str:
        return f"{self.number} ({self.kind}): {self.method} {self.path:.60} {self.body[:300]!r} {self.raw[:300]!r}"


def malformed(number: int) -> Malformed:
    """The request of this number."""
    rng = random.Random(f"malformed {number}")
    kind = rng.choices(["field", "adapter", "text", "bytes", "http", "size"], [56, 8, 14, 6, 10, 6])[0]
    path, body = rng.choice(_valid(rng))
    if kind == "adapter":
        return Malformed(number, kind, *_adapter(number, rng))
    if kind == "field":
        raw: list[str] = []
        body = copy.deepcopy(body)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            body = _mutated(body, rng, raw)
        return Malformed(number, kind, path, _text(body, raw))
    text = json.dumps(body).encode()
    if kind == "text":
        return Malformed(number, kind, path, _broken_text(text, rng))
    if kind == "bytes":
        return Malformed(number, kind, path, _broken_bytes(text, rng))
    if kind == "size":
        return Malformed(number, kind, path, _large(body, rng))
    return _http(number, path, text, rng)


def _valid(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    chat, responses = "/v1/chat/completions", "/v1/responses"
    folder = rng.choice(["ADAPTERS/trained", "ADAPTERS", "ADAPTERS/missing", "ADAPTERS/trained/../trained"])
    return [
        *[(chat, CHAT)] * 4, (chat, SHORT), (chat, STREAM), *[(responses, RESPONSES)] * 3, (responses, WORDS),
        ("/v1/messages", MESSAGES), ("/v1/messages", {**MESSAGES, "stream": True}),
        ("/v1/load_lora_adapter", {"lora_name": f"tiny@{rng.randrange(100)}", "lora_path": folder}),
        ("/v1/unload_lora_adapter", {"lora_name": "tiny@1"}),
    ]  # fmt: skip


def _adapter(number: int, rng: random.Random) -> tuple[str, bytes]:
    """A damaged adapter, or an odd path or name."""
    name, folder = f"tiny@{number}", f"ADAPTERS/{rng.choice(DAMAGED)}"
    folder = rng.choice([folder, folder, folder, rng.choice(STRINGS), f"ADAPTERS/{rng.choice(STRINGS)}"])
    name = rng.choice([name] * 8 + [rng.choice(STRINGS), f"tiny@{rng.choice(STRINGS)}"])
    return "/v1/load_lora_adapter", json.dumps({"lora_name": name, "lora_path": folder}).encode()


DAMAGED = [
    "no_config", "not_json", "config_is_list", "no_rank", "rank_zero", "rank_text", "alpha_text", "no_weights", "cut",
    "noise", "vectors", "integers", "not_finite", "deep_json", "other_shape", "loop", "whole_cut", "empty",
]  # fmt: skip
"""Folders that the test makes below the server's folder of adapters (`ADAPTERS` in a path)."""


def _places(body: Any, path: tuple = ()) -> list[tuple]:
    found = [path] if path else []
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        found += _places(value, (*path, key))
    return found


def _mutated(body: Any, rng: random.Random, raw: list[str]) -> Any:
    places = _places(body)
    if not places or rng.random() < 0.03:
        return _odd(rng, raw)
    *parents, last = rng.choice(places)
    parent = body
    for key in parents:
        parent = parent[key]
    what = rng.random()
    if what < 0.4:  # of the same type: what checks of types let through
        same = STRINGS if isinstance(parent[last], str) else NUMBERS
        plain = not isinstance(parent[last], dict | list)
        parent[last] = rng.choice(same) if plain else _odd(rng, raw)
    elif what < 0.72:
        parent[last] = _odd(rng, raw)
    elif what < 0.82:
        del parent[last]
    elif isinstance(parent, dict):
        parent[rng.choice(KEYS)] = _odd(rng, raw)
    else:
        parent.insert(rng.randrange(len(parent) + 1), rng.choice([_odd(rng, raw), copy.deepcopy(parent[last])]))
    return body


def _odd(rng: random.Random, raw: list[str]) -> Any:
    match rng.choice(["string", "number", "number", "raw", "plain", "nested", "many"]):
        case "string":
            return rng.choice(STRINGS)
        case "number":
            return rng.choice(NUMBERS)
        case "raw":
            raw.append(rng.choice(RAW))
            return f"RAW{len(raw) - 1}RAW"
        case "plain":
            plain = [None, True, False, [], {}, [[]], [None], [1, 2], {"a": 1}, {"": ""}, [{}], {"type": 5}]
            return copy.deepcopy(rng.choice(plain))
        case "nested":
            value: Any = rng.choice([1, "x", None])
            for _ in range(rng.choice([3, 30, 70, 300])):
                value = rng.choice([lambda v: [v], lambda v: {"a": v}])(value)
            return value
    count = rng.choice([10, 1000, 5000])
    return rng.choice([[1] * count, [{}] * count, ["x"] * count, {f"k{i}": i for i in range(count)}, [[]] * count])


def _text(body: Any, raw: list[str]) -> bytes:
    text = json.dumps(body)
    for index, value in enumerate(raw):
        text = text.replace(f'"RAW{index}RAW"', value)
    return text.encode()


def _broken_text(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    return rng.choice(
        [
            text[:at],
            text[:at] + text[at + 1 :],
            text[:at]
            + rng.choice([b",", b"}", b"]", b"{", b"[", b'"', b"\\", b"\\u", b"\\ud800", b"\x00"])
            + text[at:],
            text + rng.choice([b"x", b"{}", b"\x00", b" " * 1000, b","]),
            text.replace(b"{", b'{"model": "tiny", "model": 5, ', 1),
            text.replace(b'"model"', b'"messages": 3, "model"', 1),
            b"[" * rng.choice([10, 500, 50_000]),
            b'{"a":' * rng.choice([10, 500, 50_000]),
            b"[" * 900 + b"]" * 900,
            b'{"model": ' + b'"\\"' * 1000,
            rng.choice([b"", b"null", b"0", b'"x"', b"[]", b"{}", b"true", b"\xef\xbb\xbf{}"]),
        ]
    )


def _broken_bytes(text: bytes, rng: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(rng.choice([1, 3, 20])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    encoded = text.decode().encode(rng.choice(["utf-16", "utf-32", "utf-16-be"]))
    return rng.choice([bytes(data), rng.randbytes(rng.choice([1, 10, 3000])), encoded, text.replace(b"e", b"\xff")])


def _large(body: dict[str, Any], rng: random.Random) -> bytes:
    size = rng.choice([300_000, 1_000_000, 3_000_000, 9_000_000])
    name = rng.choice([*body, "unknown"])
    one = rng.choice(
        [b"1,", b'"",', b"[],", b"{},", b'{"role":"user","content":"x"},', b'{"type":"text","text":"x"},', b"null,"]
    )
    text = rng.choice(
        [
            b"[" + (one * (size // len(one)))[:-1] + b"]",
            json.dumps(rng.choice(["x", "é", "😀", "\x00", "a b ", '"', "a.", "<|", "\n["]) * (size // 6)).encode(),
            b"{" + b",".join(b'"k%d":1' % i for i in range(size // 12)) + b"}",
            b"9" * size,
            b'[{"role": "user", "content": [' + (one * (size // len(one)))[:-1] + b"]}]",
        ]
    )
    rest = json.dumps({key: value for key, value in body.items() if key != name})[1:]
    return b'{"' + name.encode() + b'": ' + text + b", " + rest.encode()


def _http(number: int, path: str, text: bytes, rng: random.Random) -> Malformed:
    made = Malformed(number, "http", path, text)
    match rng.randrange(7):
        case 0:
            made.headers = {"content-type": rng.choice(["", "text/plain", "application/x-www-form-urlencoded", "x"])}
        case 1:
            made.path, made.method = rng.choice(PATHS), rng.choice(["GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS"])
        case 2:
            made.headers = {
                rng.choice(["authorization", "origin", "accept", "content-encoding", "expect", "x"]): rng.choice(
                    ["", "Bearer", "Bearer x", "null", "http://evil.example", "gzip", "y" * 5000]
                )
            }
        case 3:
            made.headers = {"host": rng.choice(["", "evil.example", "127.0.0.1", "[::1", "localhost:1", "a b", "é"])}
        case 4:
            declared = rng.choice(["-1", "x", "99999999999999999999", "1, 2", str(len(text) + 50), "0", ""])
            made.raw = _head(path, f"content-length: {declared}") + text
            made.close = True
        case 5:
            size = rng.choice([b"zz", b"-5", b"ffffffffffffffffffff", b"%x" % (len(text) + 9), b""])
            made.raw = _head(path, "transfer-encoding: chunked") + size + b"\r\n" + text + b"\r\n0\r\n\r\n"
            made.close = True
        case _:
            made.raw = rng.choice(
                [
                    rng.randbytes(200), b"\r\n" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 50,
                    _head(path, "x: " + "y" * 200_000) + text,
                    _head(path, "\r\n".join(f"x{i}: y" for i in range(9000))),
                    _head(path, "host: twice") + text, b"GET /health HTTP/1.0\r\n\r\n", b"POST " + b"/x" * 40_000,
                    _head(path, "transfer-encoding: chunked\r\ncontent-length: 5") + text,
                ]
            )  # fmt: skip
            made.close = True
    return made


def _head(path: str, header: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1:PORT", "content-type: application/json", header, "", ""]
    return "\r\n".join(lines).encode()


def damaged_adapters(good: Path, folder: Path) -> None:
    """One folder for each of DAMAGED."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((good / "adapter_config.json").read_text())
    tensors = load_file(good / "adapter_model.safetensors")
    whole = (good / "adapter_model.safetensors").read_bytes()
    configs = {
        "not_json": "{", "config_is_list": "[1]", "deep_json": "[" * 100_000,
        "no_rank": {**config, "r": None}, "rank_zero": {**config, "r": 0}, "rank_text": {**config, "r": "four"},
        "alpha_text": {**config, "lora_alpha": "\x00"},
    }  # fmt: skip
    weights = {
        "cut": whole[: len(whole) // 2],
        "noise": bytes(range(256)) * 40,
        "vectors": {name: tensor.flatten() for name, tensor in tensors.items()},
        "integers": {name: tensor.to(torch.int32) for name, tensor in tensors.items()},
        "not_finite": {name: tensor * torch.nan for name, tensor in tensors.items()},
        "other_shape": {name: tensor[..., :3].contiguous() for name, tensor in tensors.items()},
    }
    for name in DAMAGED:
        place = folder / name
        place.mkdir(parents=True)
        text = configs.get(name, config)
        if name not in ("no_config", "empty", "whole_cut"):
            (place / "adapter_config.json").write_text(text if isinstance(text, str) else json.dumps(text))
        data = weights.get(name, whole)
        if name == "whole_cut":
            (place / "model.safetensors").write_bytes(whole[:100])
        elif name == "loop":
            (place / "adapter_model.safetensors").symlink_to("adapter_model.safetensors")
        elif name not in ("no_weights", "empty"):
            if isinstance(data, bytes):
                (place / "adapter_model.safetensors").write_bytes(data)
            else:
                save_file(data, place / "adapter_model.safetensors")
