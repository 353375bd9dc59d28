"""Checks of one row: its messages and calls, its tokens, and its repetition of an earlier row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from components.data.examples import DataExample, RowProblem
from components.data.fingerprints import Fingerprints, fingerprint
from components.data.forms import FORMS
from components.data.sources import rows
from components.data.spec import DataSpec
from components.data.tokens import TokenChecks

Problems = Mapping[str, Sequence[str]]
"""Check and reason of each row that fails a check of the tokenizer, by place."""


def problems_of_part(
    spec: DataSpec, tokens: TokenChecks, index: int, count: int, on_row: Callable[[int], None]
) -> dict[str, tuple[str, str]]:
    """Return check and reason, by place, of the rows that fail a check of `tokens`, among every `count`th row from
    number `index`. `spec.form` is resolved."""
    form = FORMS[spec.form]
    problems: dict[str, tuple[str, str]] = {}
    held = spec.heldout_source()
    for source in [spec, *([held] if held is not None else [])]:
        for number, row in enumerate(rows(source, lambda broken: None)):
            if number % count != index:
                continue
            on_row(number + 1)
            try:
                example = form.example(spec.without_ignored(row.values), spec.mapped)
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
                    names = ", ".join(sorted(tools)) or "none"
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
