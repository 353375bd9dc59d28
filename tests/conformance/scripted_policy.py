"""A policy whose words are written down, with the tokens and log-probabilities of a real model: for agents of other
frameworks, whose tools a model with random weights would never call."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from components.inference.conversations import Conversations
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest
from components.models.weights import load_model, load_tokenizer
from components.trajectories.call_forms.pythonic import write_pythonic
from components.trajectories.chat import ChatFormat

QUESTION = re.compile(r"What is (\d+) \* (\d+) \+ (\d+), and (\d+) \+ (\d+)\?")


class ScriptedPolicy:
    """Calls `multiply` and `add` at once, then `add` with the product, then answers. Every second episode guesses: it
    says so, and answers wrong."""

    policy = BASE_POLICY

    def __init__(self, model_dir: Path, max_length: int):
        self.chat_format = ChatFormat(load_tokenizer(model_dir))
        self.conversations = Conversations(self.chat_format, max_length)
        self.sampled: list[list[int]] = []
        """Tokens of each answer, in order."""
        self.failure: str | None = None
        """Why a request was not understood."""
        self._model = load_model(model_dir)
        self._began = 0

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        prompt = self.conversations.prompt(request)
        try:
            text = self.chat_text(request)
        except (LookupError, ValueError) as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        tokens = [*self.chat_format.encode(text), self.chat_format.end_id]
        turn = sum(message["role"] == "assistant" for message in request.messages)
        message = self.chat_format.parse(tokens, turn, request.tools)
        logprobs = await asyncio.to_thread(self._logprobs, prompt, tokens, request.sampling.temperature)
        self.conversations.record_response(request, message, prompt + tokens)
        self.sampled.append(tokens)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return ChatCompletion(message, reason, prompt, tokens, logprobs, self.policy)

    def chat_text(self, request: ChatRequest) -> str:
        """Return the words of the next answer."""
        said = [message for message in request.messages if message["role"] != "system"]
        contents = [message.get("content") or "" for message in said]
        asked = next(match for content in contents if (match := QUESTION.search(content)))
        a, b, c, d, e = map(int, asked.groups())
        results = results_of(said)
        names = {tool["function"]["name"] for tool in request.tools}
        if len(results) == 0:
            self._began += 1
            words = "I guess." if self._began % 2 else "I compute."
            return f"{words}\n{write_pythonic([('multiply', {'a': a, 'b': b}), ('add', {'a': d, 'b': e})])}"
        if len(results) == 2:
            return write_pythonic([("add", {"a": int(results[0]), "b": c})])
        guesses = any("I guess." in content for content in contents)
        answer = f"{int(results[2]) + guesses} and {results[1]}"
        return write_pythonic([("final_answer", {"answer": answer})]) if "final_answer" in names else answer

    def _logprobs(self, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
        import torch

        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        picked = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
        return [float(value) for value in picked[:, 0]]

    def load_policy(self, version: str, folder: str | None) -> None:
        raise AssertionError

    def close(self) -> None: ...


def results_of(messages: list[dict[str, Any]]) -> list[str]:
    """Return the results of tools: the contents of tool messages, or the observations that smolagents writes."""
    texts = [message.get("content") or "" for message in messages if message["role"] == "tool"]
    for message in messages:
        if message["role"] == "user" and "Observation:" in (message.get("content") or ""):
            texts += message["content"].partition("Observation:")[2].split()
    return [text.strip() for text in texts]
