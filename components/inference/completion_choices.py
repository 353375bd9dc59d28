"""Answers of `/v1/completions`: text completions of an engine as OpenAI's legacy JSON, whole or as stream events.

With `logprobs: K`, a choice has each token's text, its log-probability, the K most likely tokens there, and its offset
in prompt and completion. With `echo`, the prompt is part of text and tokens. Prompt tokens have log-probabilities under
the model's distribution (temperature 1, all tokens), sampled tokens under the distribution that they were drawn from;
at temperature 0 these are the same.

A stream has an event for each part of a text as it is sampled; with `echo`, the first one is the prompt. Tokens are in
the event after which they are sampled, or in a later one if the text is held back
(`components.inference.growing_text`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from components.inference.protocol import TextCompletion, TextIncrement, TextRequest, TokenLogprobs
from components.inference.streaming import Unsent, rest_of
from components.inference.text_completions import CompletionsRequest
from components.inference.token_texts import Decode, SampledTokens, TokenTexts

Chunk = dict[str, Any]


def completion_body(
    answers: Sequence[TextCompletion], parsed: CompletionsRequest, head: dict[str, Any], decode: Decode | None
) -> dict[str, Any]:
    """Return the `text_completion` object. head: id, created, model."""
    choices = []
    for index, (answer, request) in enumerate(zip(answers, parsed.requests, strict=True)):
        parts = _Parts(request, parsed, decode)
        prompt = parts.prompt(answer) if parsed.body.echo else {"text": "", "logprobs": None}
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        choice |= _joined(prompt, parts.sampled(answer.text, answer))
        if parsed.body.return_token_ids:
            choice["prompt_token_ids"] = answer.prompt_token_ids
        choices.append(choice)
    return {**head, "object": "text_completion", "choices": choices, "usage": _usage(answers, parsed)}


class CompletionChunks:
    """Stream events of the completions of a request. head: id, created and model, by policy version."""

    def __init__(self, parsed: CompletionsRequest, head: Callable[[str], dict[str, Any]], decode: Decode | None):
        self._parsed = parsed
        self._head = head
        self._choices = [_Choice(request, parsed, decode) for request in parsed.requests]

    def grow(self, index: int, increment: TextIncrement) -> Iterator[Chunk]:
        """Yield the events of an increment of completion `index`."""
        for choice in self._choices[index].grow(increment):
            yield self._chunk(index, choice, increment.policy)

    def end(self, answers: Sequence[TextCompletion]) -> Iterator[Chunk]:
        """Yield the remaining events of the complete answers, and the token counts if they are requested."""
        for index, (choices, answer) in enumerate(zip(self._choices, answers, strict=True)):
            for choice in choices.end(answer):
                yield self._chunk(index, choice, answer.policy)
        if self._parsed.include_usage:
            yield {**self._base(answers[0].policy), "choices": [], "usage": _usage(answers, self._parsed)}

    def fail(self, error: dict[str, Any]) -> Iterator[Chunk]:
        """Yield OpenAI's error object."""
        yield {"error": error}

    def _base(self, policy: str) -> Chunk:
        base: Chunk = {**self._head(policy), "object": "text_completion"}
        return {**base, "usage": None} if self._parsed.include_usage else base

    def _chunk(self, index: int, choice: dict[str, Any], policy: str) -> Chunk:
        return {**self._base(policy), "choices": [{"index": index, "finish_reason": None, **choice}]}


class _Choice:
    """State of one completion: what is sent."""

    def __init__(self, request: TextRequest, parsed: CompletionsRequest, decode: Decode | None):
        self._parsed = parsed
        self._parts = _Parts(request, parsed, decode)
        self._opened = False
        self._sent = ""
        self._unsent = Unsent()

    def grow(self, increment: TextIncrement) -> Iterator[dict[str, Any]]:
        yield from self._open(increment)
        self._unsent.add(increment)
        if increment.text:
            yield self._part(increment.text)

    def end(self, answer: TextCompletion) -> Iterator[dict[str, Any]]:
        yield from self._open(answer)
        remaining = rest_of(answer.text, self._sent)
        self._unsent.rest_of(answer)
        shown = self._parsed.body.logprobs is not None or self._parsed.body.return_token_ids
        if remaining or (self._unsent.token_ids and shown):
            yield self._part(remaining)
        yield {"text": "", "logprobs": None, "finish_reason": answer.finish_reason}

    def _open(self, answer: TextCompletion | TextIncrement) -> Iterator[dict[str, Any]]:
        """Yield the prompt, if the request asks for it, before the first part."""
        if self._opened:
            return
        self._opened = True
        body = self._parsed.body
        part = self._parts.prompt(answer) if body.echo else {"text": "", "logprobs": None}
        if body.return_token_ids:
            part |= {"prompt_token_ids": answer.prompt_token_ids, "token_ids": []}
        if body.echo or body.return_token_ids:
            yield part

    def _part(self, text: str) -> dict[str, Any]:
        """Return a part of the text with the tokens that are not sent yet."""
        self._sent += text
        part = self._parts.sampled(text, self._unsent)
        self._unsent.clear()
        return part


class _Parts:
    """Consecutive parts of a completion with their tokens: the prompt, then sampled tokens."""

    def __init__(self, request: TextRequest, parsed: CompletionsRequest, decode: Decode | None):
        self._decode = decode or (lambda ids: "".join(f"token_id:{token}" for token in ids))  # vLLM's, without text
        self._prompt = request.prompt if isinstance(request.prompt, str) else self._decode(request.prompt)
        self._body = parsed.body
        self._texts = TokenTexts(self._decode)

    def prompt(self, answer: TextCompletion | TextIncrement) -> dict[str, Any]:
        """Return the prompt."""
        part: dict[str, Any] = {"text": self._prompt, "logprobs": None}
        if self._body.logprobs is not None:
            known: list[float | None] = [None, *answer.prompt_logprobs]
            texts, added = TokenTexts(self._decode), answer.added_tokens
            tokens, likeliest = answer.prompt_token_ids, [[], *answer.prompt_likeliest]
            first = _logprobs(tokens[:added], known[:added], likeliest[:added], texts)
            first["text_offset"] = [0] * len(tokens[:added])
            others = _logprobs(tokens[added:], known[added:], likeliest[added:], TokenTexts(self._decode))
            part["logprobs"] = {name: first[name] + others[name] for name in first}
        return part

    def sampled(self, text: str, tokens: SampledTokens) -> dict[str, Any]:
        """Return the next part of the text with its tokens."""
        part: dict[str, Any] = {"text": text, "logprobs": None}
        if self._body.logprobs is not None:
            known: list[float | None] = [*tokens.logprobs]
            part["logprobs"] = _logprobs(tokens.token_ids, known, tokens.likeliest, self._texts, len(self._prompt))
        if self._body.return_token_ids:
            part["token_ids"] = tokens.token_ids
        return part


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return two parts as one."""
    logprobs = second["logprobs"]
    if first["logprobs"] is not None:
        logprobs = {name: first["logprobs"][name] + logprobs[name] for name in logprobs}
    return {**second, "text": first["text"] + second["text"], "logprobs": logprobs}


def _logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    likeliest: Sequence[TokenLogprobs],
    texts: TokenTexts,
    start: int = 0,
) -> dict[str, list[Any]]:
    """Return text, log-probability, most likely tokens and offset of the next tokens, and append them to `texts`.
    start: offset of its first token."""
    part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, logprob, alternatives in zip(tokens, logprobs, likeliest, strict=True):
        text = texts.text_of(token)
        top: dict[str, float] = {}
        for other, value in alternatives:  # of tokens with equal text, the likeliest one
            top.setdefault(texts.text_of(other), value)
        if logprob is not None:
            top.setdefault(text, logprob)
        part["tokens"].append(text)
        part["token_logprobs"].append(logprob)
        part["top_logprobs"].append(None if logprob is None else top)
        part["text_offset"].append(start + texts.length)
        texts.append(token)
    return part


def _usage(answers: Sequence[TextCompletion], parsed: CompletionsRequest) -> dict[str, int]:
    per_prompt = len(answers) // parsed.prompts
    prompt = sum(len(answer.prompt_token_ids) for answer in answers[::per_prompt])
    sampled = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
