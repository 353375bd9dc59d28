"""Server of OpenAI's chat completions that answers each conversation with the next message of a script.

The script of a conversation is chosen by its first user message; the position in it is the number of assistant messages
so far. A conversation without a script, or beyond its end, gets the text "no more answers".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.http_server import HttpServer

Message = dict[str, Any]


@contextmanager
def serving_script(scripts: Mapping[str, Sequence[Message]]) -> Iterator[str]:
    """Serve scripts by first user message; yield the base URL."""

    def answer(method: str, path: str, body: bytes, headers: object) -> tuple[int, Any]:
        return 200, completion(json.loads(body), scripts)

    with HttpServer(answer) as server:
        yield f"{server.url}/v1"


def completion(body: Mapping[str, Any], scripts: Mapping[str, Sequence[Message]]) -> dict[str, Any]:
    """Return the response to a request."""
    messages = body["messages"]
    first = next((text_of(message) for message in messages if message["role"] == "user"), "")
    script = scripts.get(first, ())
    position = sum(message["role"] == "assistant" for message in messages)
    message = dict(script[position]) if position < len(script) else {"role": "assistant", "content": "no more answers"}
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "chat-1",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", "scripted"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message whose content is text or a list of parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
