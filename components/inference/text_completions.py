"""OpenAI's legacy completions (`/v1/completions`): requests as text completions of an engine, and answers as JSON,
whole or as stream events.

`echo: true, max_tokens: 0` evaluates a text without sampling. Extensions, as in vLLM: `top_k`, `min_p`, and
`return_token_ids`.

With `logprobs: K`, a choice has each token's text, its log-probability, the K most likely tokens there, and its offset
in prompt and completion. With `echo`, the prompt is part of text and tokens. Prompt tokens have log-probabilities under
the model's distribution (temperature 1, all tokens), sampled tokens under the distribution that they were drawn from;
at temperature 0 these are the same.

A stream has an event for each part of a text as it is sampled; with `echo`, the first one is the prompt. Tokens are in
the event after which they are sampled, or in a later one if the text is held back
(`components.inference.growing_text`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from components.errors import Problem, SpecError
from components.inference.protocol import TextCompletion, TextIncrement, TextRequest, TokenLogprobs
from components.inference.request_bodies import (
    MAX_NUMBER,
    Alternatives,
    ChunkedBody,
    Neutral,
    RequestContext,
    parse_parameters,
)
from components.inference.request_logits import LogitBody, logit_change
from components.inference.streaming import ChunkedAnswers, GrowingChoice, Head, rest_of, usage_of
from components.inference.token_texts import Decode, SampledTokens, TokenTexts

MAX_PROMPTS = 512
"""Maximum number of prompts per request."""
MAX_COMPLETIONS = 1024
"""Maximum number of completions per request: prompts times `n`."""
PROMPT_FORMS = f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either, none of them empty"
"""Forms of `prompt`, in error messages."""
DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` in OpenAI's API."""

_NEUTRAL: Neutral = {
    "best_of": (None, 1),
    "suffix": (None, ""),
}
"""Unsupported parameters, with their neutral values, which are accepted."""


def _is_prompt(value: Any) -> bool:
    """Return True for a text or token ids, not empty."""
    if not isinstance(value, list):
        return isinstance(value, str) and bool(value)
    return bool(value) and all(type(token) is int and 0 <= token <= MAX_NUMBER for token in value)


def _checked(prompt: Any) -> Any:
    """Return the prompts of a request. Raises ValueError with one text for all forms."""
    if _is_prompt(prompt):
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(isinstance(entry, type(prompt[0])) for entry in prompt):
        raise ValueError(PROMPT_FORMS)
    if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise ValueError(f"at most {MAX_PROMPTS} prompts per request; it has {len(prompt)}")
    if not all(map(_is_prompt, prompt)):
        raise ValueError(PROMPT_FORMS)
    return prompt


class CompletionBody(ChunkedBody, LogitBody):
    """The supported parameters."""

    prompt: Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_checked)]
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    """0 is allowed with `echo`, which then samples nothing."""
    echo: bool | None = None
    """Prompt as part of text and log-probabilities."""
    logprobs: Alternatives | None = None
    """Number of most likely tokens per token; 0 returns the log-probabilities of the text's tokens alone."""


@dataclass(frozen=True)
class CompletionsRequest:
    """A parsed and validated request."""

    requests: list[TextRequest]
    """Engine requests: for each prompt, one for each of `n` completions."""
    prompts: int
    """Number of prompts."""
    body: CompletionBody


def read_request(body: dict[str, Any], context: RequestContext) -> CompletionsRequest:
    """Return the parsed request body. Raises SpecError with every invalid or unsupported parameter."""
    parsed, problems = parse_parameters(CompletionBody, body, _NEUTRAL)
    change = logit_change(parsed, True, problems)
    prompt = parsed.prompt
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if single else list(prompt)
    count, most_tokens = parsed.n or 1, DEFAULT_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens
    if most_tokens == 0 and not parsed.echo:
        problems.append(Problem("max_tokens", "0 is allowed with echo: true only; expected at least 1"))
    if len(prompts) * count > MAX_COMPLETIONS:
        problems.append(Problem("n", f"{len(prompts)} prompts with n={count}: expected {MAX_COMPLETIONS} at most"))
    problems += parsed.stream_problems()
    if problems:
        raise SpecError(problems)
    version, seed, sampling = context.policy(parsed.model), parsed.sampling_seed(), parsed.sampling(most_tokens)
    scores = bool(parsed.echo) and parsed.logprobs is not None
    requests = [
        TextRequest(prompt, version, sampling, seed + index, parsed.stop_strings, change, parsed.logprobs, scores)
        for prompt in prompts
        for index in range(count)
    ]
    return CompletionsRequest(requests, len(prompts), parsed)


class CompletionAnswers(ChunkedAnswers[TextIncrement, TextCompletion]):
    """Completions of one request."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, parsed: CompletionsRequest, head: Head, decode: Decode | None):
        choices = [_Choice(index, request, parsed.body, decode) for index, request in enumerate(parsed.requests)]
        super().__init__(choices, head, parsed.body.include_usage)
        self._per_prompt = len(parsed.requests) // parsed.prompts

    def usage(self, answers: Sequence[TextCompletion]) -> dict[str, Any]:
        return usage_of(answers[:: self._per_prompt], answers)


class _Choice(GrowingChoice[TextIncrement, TextCompletion]):
    """One completion, and what of it is sent: the prompt, then sampled tokens."""

    def __init__(self, index: int, request: TextRequest, body: CompletionBody, decode: Decode | None):
        super().__init__()
        self._index = index
        self._body = body
        self._decode = decode or (lambda ids: "".join(f"token_id:{token}" for token in ids))  # vLLM's, without text
        self._given = request.prompt
        self._texts = TokenTexts(self._decode)

    @functools.cached_property
    def _prompt(self) -> str:
        """Text of the prompt. It is decoded only if the answer shows it or counts its characters."""
        return self._given if isinstance(self._given, str) else self._decode(self._given)

    def whole(self, answer: TextCompletion) -> dict[str, Any]:
        prompt, part = self._prompt_part(answer), self._part(answer.text, answer)
        if prompt["logprobs"] is not None:
            part["logprobs"] = {name: prompt["logprobs"][name] + part["logprobs"][name] for name in part["logprobs"]}
        choice = {**part, "text": prompt["text"] + part["text"], "finish_reason": answer.finish_reason}
        return {**choice, "prompt_token_ids": answer.prompt_token_ids} if self._body.return_token_ids else choice

    def begin(self, answer: TextCompletion | TextIncrement) -> Iterator[dict[str, Any]]:
        """Yield the prompt, if the request asks for it."""
        part = self._prompt_part(answer)
        if self._body.return_token_ids:
            part |= {"prompt_token_ids": answer.prompt_token_ids, "token_ids": []}
        if self._body.echo or self._body.return_token_ids:
            yield part

    def grow(self, increment: TextIncrement) -> Iterator[dict[str, Any]]:
        if increment.text:
            yield self._next_part(increment.text)

    def end(self, answer: TextCompletion) -> Iterator[dict[str, Any]]:
        remaining = rest_of(answer.text, self.sent)
        shown = self._body.logprobs is not None or self._body.return_token_ids
        if remaining or (self.unsent.token_ids and shown):
            yield self._next_part(remaining)
        yield {**self._choice("", None), "finish_reason": answer.finish_reason}

    def _next_part(self, text: str) -> dict[str, Any]:
        """Return a part of the text with the tokens that are not sent yet."""
        self.sent += text
        part = self._part(text, self.unsent)
        self.unsent.clear()
        return part

    def _prompt_part(self, answer: TextCompletion | TextIncrement) -> dict[str, Any]:
        """Return the prompt, if it is part of the text."""
        if not self._body.echo:
            return self._choice("", None)
        if self._body.logprobs is None:
            return self._choice(self._prompt, None)
        known: list[float | None] = [None, *answer.prompt_logprobs]
        texts, added = TokenTexts(self._decode), answer.added_tokens
        tokens, likeliest = answer.prompt_token_ids, [[], *answer.prompt_likeliest]
        first = _logprobs(tokens[:added], known[:added], likeliest[:added], texts)
        first["text_offset"] = [0] * len(tokens[:added])
        others = _logprobs(tokens[added:], known[added:], likeliest[added:], TokenTexts(self._decode))
        return self._choice(self._prompt, {name: first[name] + others[name] for name in first})

    def _part(self, text: str, tokens: SampledTokens) -> dict[str, Any]:
        """Return the next part of the text with its tokens."""
        part = self._choice(text, None)
        if self._body.logprobs is not None:
            known: list[float | None] = [*tokens.logprobs]
            part["logprobs"] = _logprobs(tokens.token_ids, known, tokens.likeliest, self._texts, len(self._prompt))
        return {**part, "token_ids": tokens.token_ids} if self._body.return_token_ids else part

    def _choice(self, text: str, logprobs: dict[str, list[Any]] | None) -> dict[str, Any]:
        return {"index": self._index, "finish_reason": None, "text": text, "logprobs": logprobs}


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
