"""Messages from sampled tokens: reasoning, content and calls."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Self

from components.trajectories.call_forms.harmony import HarmonyForm
from components.trajectories.call_forms.marked import CallForm
from components.trajectories.call_forms.pythonic import (
    attempts_pythonic,
    certain_text_pythonic,
    read_pythonic,
)
from components.trajectories.reasoning import ReasoningForm


def call_id(turn: int, index: int) -> str:
    """Return the id of a call of the response in this turn."""
    return f"call_{turn}_{index}"


class ResponseReader:
    """Reader of a model's responses. `components.trajectories.chat` sets the fields from its chat template."""

    tokenizer: Any
    end: str
    end_id: int
    """Special token with which a response ends."""
    call_end: str
    """Special token with which a response with calls ends: `end`, except in gpt-oss (`<|call|>`) and GLM
    (`<|observation|>`)."""
    closing: str
    """Special tokens of a response before `end`, such as Cohere's `<|END_RESPONSE|>`; empty for most templates."""
    channel: str
    """Special tokens before a final response that the model samples itself; empty for most templates."""
    reasoning: ReasoningForm | None
    """Marks of the model's reasoning, as after a question; None if its template knows none."""
    renders_reasoning: bool
    """True if the template reads reasoning from a field of messages; otherwise it gets it as part of the content."""
    reasoning_end: str
    """Text between reasoning and what follows it: the end mark and white space; empty without reasoning."""
    call_form: CallForm | None
    """Form in which the template writes calls; None for a template without tools, or with another form."""
    single_call: bool
    """True if the template refuses a message with several calls."""

    @property
    def harmony(self) -> bool:
        """True for answers in channels (`components.trajectories.call_forms.harmony`)."""
        return isinstance(self.call_form, HarmonyForm)

    @property
    def end_ids(self) -> list[int]:
        """Special tokens that end a response."""
        return [self.end_id, *self.tokenizer.convert_tokens_to_ids([self.call_end] * (self.call_end != self.end))]

    def id_of_end(self, message: dict[str, Any]) -> int:
        """Return the id of the special token that ends a message."""
        return self.end_ids[-1] if message.get("tool_calls") else self.end_id

    def end_of(self, message: dict[str, Any]) -> str:
        """Return the special token that ends a message."""
        return self.call_end if message.get("tool_calls") else self.end

    def after(self, prompt: Sequence[int]) -> Self:
        """Return the reader of responses to a prompt, which may end with the start of their reasoning."""
        if self.reasoning is None:
            return self
        last = prompt[-2 * len(self.reasoning.start) :]
        reader = copy.copy(self)
        reader.reasoning = self.reasoning.after(str(self.tokenizer.decode(last, skip_special_tokens=False)))
        return reader

    def parse(self, token_ids: list[int], turn: int, tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the assistant message of sampled tokens. An invalid call stays in the content, where the environment
        can report the error. `turn` is part of the calls' ids. tools: the offered ones; some forms need the types of
        their parameters."""
        return self.parse_text(self.text_of(token_ids), turn, tools)

    def text_of(self, token_ids: list[int]) -> str:
        """Return the text of sampled tokens, without the end of the turn."""
        body = token_ids[:-1] if token_ids and token_ids[-1] in self.end_ids else token_ids
        return str(self.tokenizer.decode(body, skip_special_tokens=False)).removesuffix(self.closing)

    def reasoning_tokens(self, token_ids: list[int]) -> int:
        """Return the number of tokens of a response that are reasoning, with the marks around it."""
        ranges = self.reasoning.ranges(self.text_of(token_ids)) if self.reasoning else []

        def length(count: int) -> int:
            return len(self.tokenizer.decode(token_ids[:count], skip_special_tokens=False))

        counts = range(len(token_ids))
        return sum(
            bisect_left(counts, end, key=length) - bisect_left(counts, start, key=length) for start, end in ranges
        )

    def parse_text(self, text: str, turn: int, tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the assistant message of a text (`parse`)."""
        message = self.message_of(text)
        _, answer = self._split(text)
        try:
            content, calls = self.call_form.read(answer, tools) if self.call_form else read_pythonic(answer)
        except (ValueError, RecursionError):
            return message
        if len(calls) > 1 and self.single_call:
            return message
        message["content"] = content
        if calls:
            message["tool_calls"] = [
                {"id": call_id(turn, i), "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
        return message

    def attempts_call(self, text: str, tools: Sequence[dict[str, Any]]) -> bool:
        """Return True for the text of a response that is meant as a call of one of these tools: an invalid one if its
        message has no calls."""
        _, answer = self._split(text)
        return bool(tools) and (
            self.call_form.attempts_call(answer) if self.call_form else attempts_pythonic(answer, tools)
        )

    def message_of(self, text: str) -> dict[str, Any]:
        """Return the assistant message of a text without calls: reasoning and content."""
        reasoning, answer = self._split(text)
        content = self.call_form.plain(answer) if self.call_form else answer
        message: dict[str, Any] = {"role": "assistant", "content": content}
        return message if reasoning is None else message | {"reasoning": reasoning}

    def _split(self, text: str) -> tuple[str | None, str]:
        """Return reasoning, None without any, and the answer after it, without earlier channels."""
        reasoning, answer = self.reasoning.split(text) if self.reasoning else (None, text)
        return reasoning, answer.rpartition(self.channel)[2] if self.channel and not self.harmony else answer

    def certain_text(self, text: str) -> str:
        """Return the part of a growing text with which the content of its message begins, however the text goes on."""
        content = self._certain_answer(text)
        return self.call_form.certain_text(content) if self.call_form else certain_text_pythonic(content)

    def certain_content(self, text: str) -> str:
        """Return the same for a message without calls."""
        answer = self._certain_answer(text)
        return self.call_form.certain_text(answer) if self.harmony and self.call_form else answer

    def _certain_answer(self, text: str) -> str:
        """Return the part of a growing text after its reasoning; empty while it reasons."""
        if self.channel and not self.harmony:
            return ""  # the text so far may belong to an earlier channel
        text = text.partition(self.closing)[0] if self.closing else text
        if self.reasoning is None:
            return text
        start = self.reasoning.answer_start(text)
        return "" if start is None else text[start:].lstrip("\n") if start else text

    def answer_start(self, text: str) -> int | None:
        """Return the place in a growing text after its reasoning; None while it reasons."""
        return self.reasoning.answer_start(text) if self.reasoning else 0
