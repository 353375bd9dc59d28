"""An OpenAI-compatible endpoint that takes its time: what an engine with many requests looks like from outside.

    python tests/benchmarks/stub.py [--latency 0.5] [--turns 4] [--prompt 300] [--answer 30] [--observation 40]
    python tests/benchmarks/stub.py --judge [--latency 0.1]

Prints the address that it listens on, and serves until its standard input ends. Every chat completion is answered
`latency` seconds after it came. A policy answers with token ids and log-probabilities, in bytes that were made at the
start: turn k of an episode, known by the assistant messages in the request, has a prompt that extends the tokens of the
turn before. A judge gives each trajectory of the request the score that stands in its text after `MARK`. Needs uvloop
and nothing else, so that the stub costs little beside who is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

ASSISTANT = b'"assistant"'
TRAJECTORY, MARK = b'<trajectory id=\\"', b"quality "
"""As they stand in the JSON of a request."""


def body(turn: int, turns: int, prompt: int, answer: int, observation: int) -> bytes:
    """The response to the request of a turn."""
    seen = prompt + turn * (answer + observation)
    sampled = [1000 + prompt + turn * (answer + observation) + index for index in range(answer)]
    content = f"Answer {turn + 1} of {turns}. " + "word " * answer
    logprobs = [{"token": "word", "logprob": -0.25, "bytes": None, "top_logprobs": []} for _ in sampled]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, "refusal": None},
        "finish_reason": "stop",
        "logprobs": {"content": logprobs, "refusal": None},
        "token_ids": sampled,
    }
    completion = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
        "usage": {"prompt_tokens": seen, "completion_tokens": answer, "total_tokens": seen + answer},
        "prompt_token_ids": list(range(1000, 1000 + seen)),
    }
    return packed(json.dumps(completion, separators=(",", ":")).encode())


def policy(options: argparse.Namespace) -> Callable[[bytes], bytes]:
    turns, sizes = options.turns, (options.prompt, options.answer, options.observation)
    made = [body(turn, turns, *sizes) for turn in range(turns)]
    return lambda request: made[min(request.count(ASSISTANT), turns - 1)]


def judged(request: bytes) -> bytes:
    """The response of a judge."""
    scores = []
    for part in request.split(TRAJECTORY)[1:]:
        name, _, text = part.partition(b'\\"')
        score = float(text.partition(MARK)[2][:4])
        said = f"It found {score} of what it looked for, and needed four turns for it."
        scores.append({"trajectory_id": name.decode(), "explanation": said, "score": score})
    completion = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": json.dumps({"scores": scores}), "refusal": None},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": len(request) // 4, "completion_tokens": 300, "total_tokens": 300},
    }
    return packed(json.dumps(completion).encode())


def packed(content: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


class Stub(asyncio.Protocol):
    """One connection. Clients do not send a request before the one before is answered."""

    def __init__(self, answer: Callable[[bytes], bytes], latency: float):
        self.answer = answer
        self.latency = latency
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, gap, rest = self.buffer.partition(b"\r\n\r\n")
        if not gap:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return
        self.buffer = b""
        if head.startswith(b"GET"):
            self.transport.write(
                packed(b'{"object":"list","data":[{"id":"policy","object":"model"},{"id":"judge","object":"model"}]}')
            )
            return
        asyncio.get_running_loop().call_later(self.latency, self._send, self.answer(rest))

    def _send(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)


async def serve(options: argparse.Namespace) -> None:
    answer = judged if options.judge else policy(options)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(answer, options.latency), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves chat completions that take their time.")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds until an answer (default: %(default)s)")
    parser.add_argument("--judge", action="store_true", help="answer as a judge, not as a policy")
    for name, default in (("turns", 4), ("prompt", 300), ("answer", 30), ("observation", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    import uvloop

    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
