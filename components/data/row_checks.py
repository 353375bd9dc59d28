"""Checks of one row: its messages and calls, its tokens, and its repetition of an earlier row.

Tokens are those of the tokenizer and the chat template of the model that trains on the row. Each response is rendered
as training renders it, after its own prompt. Most examples need no tokens, because a text has at most as many tokens as
bytes. Only an example near the limit is tokenized exactly as in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.data.examples import Candidate, DataExample, RowProblem
from components.data.fingerprints import Fingerprints, fingerprint
from components.data.forms import FORMS
from components.data.logs.joining import form_rows
from components.data.spec import DataSpec
from components.errors import Problem, PromptRefused, ResourceError, SpecError
from components.trajectories.chat import ChatFormat, missing_part
from components.trajectories.convert import to_openai
from components.trajectories.reasoning import THINK

_PROBE = "Zażółć 漢字 😀 \u0001\t\n\u2028 ∑ \U0001f9ff"
"""Text that only a tokenizer with all bytes in its vocabulary preserves."""
_CERTAIN = 0.9
"""Share of the maximum length up to which the length of the rendered text decides."""


class TokenChecks:
    """Checks whether a model can train on a conversation."""

    def __init__(self, chat: ChatFormat, max_length: int):
        self._chat = chat
        self._max_length = max_length
        self._lossless = self._preserved(_PROBE)
        self._as_text = chat.reasoning is None or chat.reasoning.start == THINK.start
        """True if reasoning as text has the marks of the model, or the model has none."""

    def require_place(self, reasoning: str) -> None:
        """Raise SpecError if reasoning is to be text between other marks than the model's. reasoning: of the spec."""
        if reasoning == "text" and not self._as_text:
            start = self._chat.reasoning and self._chat.reasoning.start
            text = f"text: it begins with {THINK.start!r}, but the model's reasoning with {start!r}"
            ways = "expected field, which writes the model's marks, or drop"
            raise SpecError([Problem("data.reasoning", f"{text}; {ways}")])

    def check(self, candidate: Candidate, tools: list[dict[str, Any]]) -> None:
        """Raise RowProblem if the template or the tokenizer cannot express a history, or if it is too long."""
        for history in candidate.histories:
            messages = [to_openai(message) for message in history.messages]
            try:
                responses = self._chat.responses(messages, tools)
                text = max((prompt + response for _, prompt, response in responses), key=len, default="")
                size = len(text.encode(errors="surrogatepass"))
                if size >= _CERTAIN * self._max_length or not self._lossless:
                    tokens = len(self._chat.encode(text))
                    if tokens > _CERTAIN * self._max_length:
                        streams = self._chat.streams(messages, tools, final=True)
                        tokens = max((len(stream.token_ids) for stream in streams), default=0)
                    if tokens > self._max_length:
                        raise RowProblem(f"{tokens} tokens; model.max_length is {self._max_length}", "too_long")
            except (PromptRefused, ResourceError) as error:
                raise RowProblem(str(error)[:300], "tokenizer") from None
            for number, _, response in responses:
                self._check_complete(number, messages[number], response)
            for number, message in enumerate(history.messages):
                arguments = [_written(call.arguments) for call in message.tool_calls]
                for part in (message.reasoning or "", message.content, *arguments):
                    self._check_text(number, message.role, part)

    def _check_complete(self, number: int, message: dict[str, Any], response: str) -> None:
        if (part := missing_part(response, message)) is not None:
            ways = "data.reasoning=text or data.reasoning=drop" if self._as_text else "data.reasoning=drop"
            advice = f". Set {ways}" if part == "reasoning" else ""
            raise RowProblem(f"message {number} has {part} that the chat template leaves out{advice}", "tokenizer")

    def _check_text(self, number: int, role: str, text: str) -> None:
        if role == "assistant" and (token := self._chat.special_tokens.first(text)) is not None:
            raise RowProblem(f"message {number} contains the special token {token}", "tokenizer")
        if not self._lossless and not self._preserved(text):
            raise RowProblem(f"message {number} has characters that the tokenizer cannot hold", "tokenizer")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowProblem(f"message {number} is not valid Unicode", "tokenizer") from None

    def _preserved(self, text: str) -> bool:
        """Return True if the tokenizer gives the text back, apart from space at its ends."""
        tokenizer = self._chat.tokenizer
        try:
            ids = self._chat.encode(text)
        except PromptRefused:
            return False
        return tokenizer.decode(ids, skip_special_tokens=False).strip() == text.strip()


def _written(arguments: str) -> str:
    """Return arguments of a call as templates write them: with characters in place of escapes such as `\\u003c`."""
    return json.dumps(json.loads(arguments), ensure_ascii=False)


Problems = Mapping[str, Sequence[str]]
"""Check and reason of each row that fails a check of the tokenizer, by place."""


def problems_of_part(
    spec: DataSpec,
    tokens: TokenChecks,
    index: int,
    count: int,
    on_row: Callable[[int], None],
    tools: Sequence[dict[str, Any]] = (),
) -> dict[str, tuple[str, str]]:
    """Return check and reason, by place, of the rows that fail a check of `tokens`, among every `count`th row from
    number `index`. `spec.form` is resolved. tools: those of rows that list none."""
    form = FORMS[spec.form]
    problems: dict[str, tuple[str, str]] = {}
    held = spec.heldout_source()
    for source in [spec, *([held] if held is not None else [])]:
        for number, row in enumerate(form_rows(form, source, lambda broken: None)):
            if number % count != index:
                continue
            on_row(number + 1)
            try:
                example = form.example(spec.without_ignored(row.values), spec.mapped, tools)
                example.place_reasoning(spec.reasoning)
                check_example(example)
                check_tokens(example, tokens)
            except RowProblem as problem:
                problems[row.place] = problem.check, str(problem)
    return problems


def check_example(example: DataExample) -> None:
    """Raise RowProblem if an example has an empty message, nothing to train on, or a call of an unknown tool."""
    tools = {tool["function"]["name"] for tool in example.tools}
    for candidate in example.candidates:
        trained = 0
        for number, message in enumerate(candidate.messages):
            if not message.content.strip() and not message.tool_calls and message.role in ("user", "assistant"):
                raise RowProblem(f"message {number} ({message.role}) is empty", "empty")
            trained += message.role == "assistant" and message.trained
            for call in message.tool_calls:
                if call.name not in tools:
                    names = ", ".join(sorted(tools)) or "none; expected the column tools, or an environment with them"
                    raise RowProblem(f"message {number} calls {call.name}; the tools are: {names}", "unknown_tool")
        if not trained:
            raise RowProblem("no assistant message is trained on", "no_learnable_token")


def check_tokens(example: DataExample, tokens: TokenChecks) -> None:
    for candidate in example.candidates:
        tokens.check(candidate, example.tools)


def check_repeated(example: DataExample, number: int, fingerprints: Fingerprints) -> None:
    known = fingerprints.add(fingerprint(example.content()), number)
    if known is not None:
        raise RowProblem(f"repeats row {known} of those that can be read", "duplicate")


def prompt_fingerprint(example: DataExample) -> int:
    """Return the fingerprint of an example's prompt, uniform in [0, 2^64)."""
    text = "\0".join(part for message in example.prompt() for part in message)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
