"""The conversations of an engine, token by token.

What was sampled is remembered with the conversation that it ended. A conversation that goes on from there goes on from
those very tokens: its prompt is they, and the text that the chat template puts after them. Where the template rewrites
what came before, the prompt is rendered whole.

A text that cannot fit the model's context is refused by its length: a token stands for so many characters at most.
Texts that a tokenizer shortens before it reads them (runs of spaces, say) are measured as they came.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from components.errors import ContextOverflow
from components.inference.protocol import ChatRequest
from components.trajectories.chat import ChatFormat

REMEMBERED_ANSWERS = 8192
"""Answers whose exact tokens are kept for conversations that continue them."""


@dataclass(frozen=True)
class _Answer:
    """An answer that was given, with the tokens of the conversation up to its end."""

    message: dict[str, Any]
    conversation: str
    """Its key, this answer included."""
    tokens: list[int]
    closed: bool
    """The tokens end with the end-of-turn token."""


class Conversations:
    """Prompts of requests, and answers that were given. Its methods may be called from several threads.

    most_tokens: longest prompt. A rendered text of more than so many times the characters of the longest token is
    refused before it is tokenised.
    """

    def __init__(self, chat: ChatFormat, most_tokens: int):
        self._chat = chat
        self._most_tokens = most_tokens
        self.most_characters = most_tokens * max(map(len, chat.tokenizer.get_vocab()))
        self._lock = threading.Lock()
        self._answers: OrderedDict[Any, _Answer] = OrderedDict()
        """By identity of the message each one, and the latest by conversation: of each agent in each episode, and of
        all."""

    def prompt(self, request: ChatRequest) -> list[int]:
        """Tokens of the conversation: those of the last answer that was given in it, continued.

        Of answers that read the same, the one whose message is handed back, that very object, is continued; else the
        latest that the same agent was given in the same episode; else the latest. Raises ContextOverflow where the text
        is too long for the model whatever its tokens are, PromptRefused where it cannot be rendered.
        """
        messages = request.messages
        with self._lock:
            for message in messages:
                if id(message) in self._answers:  # what goes on from one of them later shall find it
                    self._answers.move_to_end(id(message))
        for turn in range(len(messages) - 1, -1, -1):
            if messages[turn]["role"] == "assistant":
                key = key_of(messages[: turn + 1], request.tools)
                with self._lock:
                    answer = self._answers.get(id(messages[turn]))
                    if answer is None or answer.conversation != key:
                        answer = self._answers.get((request.episode, request.agent, key)) or self._answers.get(key)
                if answer is None:
                    break
                between = self._chat.continuation(messages, request.tools, turn, closed=answer.closed)
                if between is None:
                    break
                return answer.tokens + self._encode(between)
        return self._encode(self._chat.render(messages, request.tools, generate=True))

    def _encode(self, text: str) -> list[int]:
        if len(text) > self.most_characters:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters; {self._most_tokens} tokens, the longest prompt, are "
                f"{self.most_characters} at most"
            )
        return self._chat.encode(text)

    def answered(self, request: ChatRequest, message: dict[str, Any], tokens: list[int]) -> None:
        """Remembers an answer. tokens: of the conversation, the sampled ones at its end."""
        key = key_of([*request.messages, message], request.tools)
        answer = _Answer(message, key, tokens, tokens[-1] == self._chat.end_id)
        with self._lock:
            for name in (key, id(message), (request.episode, request.agent, key)):
                self._answers.pop(name, None)
                self._answers[name] = answer
            while len(self._answers) > 3 * REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)


def key_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The same for a message whether its sender fills optional fields with nothing or leaves them out."""
    said = [{name: value for name, value in message.items() if value not in (None, "", [])} for message in messages]
    return json.dumps([said, tools], sort_keys=True)
