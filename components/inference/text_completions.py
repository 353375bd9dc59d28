"""Conversion between OpenAI's legacy completions JSON (`/v1/completions`) and text completions of an engine.

As in `wire`, a parameter is supported, accepted at its neutral value, or rejected with its name and reason. With
`logprobs: K`, a choice has each token's text, its log-probability, the K most likely tokens there, and its offset in
prompt and completion. With `echo`, the prompt is part of text and tokens. Prompt tokens have log-probabilities under
the model's distribution (temperature 1, all tokens), sampled tokens under the distribution that they were drawn from;
at temperature 0 these are the same. `echo: true, max_tokens: 0` evaluates a text without sampling. Extensions, as in
vLLM: `top_k`, `min_p`, and `return_token_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from components.errors import Problem, SpecError
from components.inference import request_forms
from components.inference.protocol import TokenLogprobs
from components.inference.text_prompts import TokenTexts
from components.inference.text_protocol import TextCompletion, TextRequest
from components.inference.token_logprobs import Decode
from components.inference.wire import (
    MAX_ALTERNATIVES,
    MAX_NUMBER,
    MAX_STOPS,
    Name,
    SamplingBody,
    StopString,
    StreamOptions,
    parse_parameters,
)

MAX_PROMPTS = 512
"""Maximum number of prompts per request."""
MAX_COMPLETIONS = 1024
"""Maximum number of completions per request: prompts times `n`."""
DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` in OpenAI's API."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
}
"""Unsupported parameters, with their neutral values, which are accepted."""

TokenId = Annotated[int, Field(ge=0, le=MAX_NUMBER, strict=True)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(SamplingBody):
    """The supported parameters."""

    model: Name
    """Model name: `name`, or `name@version` to require that policy version."""
    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    """0 is allowed with `echo`, which then samples nothing."""
    n: int | None = Field(None, ge=1, le=128)
    """Number of completions of each prompt; completion i uses seed + i."""
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    echo: bool | None = None
    """Prompt as part of text and log-probabilities."""
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES, strict=True)
    """Number of most likely tokens per token; 0 returns the log-probabilities of the text's tokens alone."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    """The caller's label; it has no effect."""


@dataclass(frozen=True)
class CompletionsRequest:
    """A parsed and validated request."""

    requests: list[TextRequest]
    """Engine requests: for each prompt, one for each of `n` completions."""
    prompts: int
    """Number of prompts."""
    body: CompletionBody


def read_request(body: dict[str, Any], policy: Callable[[str], str]) -> CompletionsRequest:
    """Return the parsed request body. Raises SpecError with every invalid or unsupported parameter.

    policy: returns the version of a model name.
    """
    parsed, problems = parse_parameters(CompletionBody, body, _NEUTRAL, request_forms.LOGIT_FIELDS)
    change = request_forms.logit_change(body, True, problems)
    prompt = parsed.prompt
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if single else list(prompt)
    count, most_tokens = parsed.n or 1, DEFAULT_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens
    if most_tokens == 0 and not parsed.echo:
        problems.append(Problem("max_tokens", "0 is allowed with echo: true only; expected at least 1"))
    if len(prompts) * count > MAX_COMPLETIONS:
        problems.append(Problem("n", f"{len(prompts)} prompts with n={count}: expected {MAX_COMPLETIONS} at most"))
    if parsed.stream_options and not parsed.stream:
        problems.append(Problem("stream_options", "is allowed with stream: true only"))
    if problems:
        raise SpecError(problems)
    version, seed, sampling = policy(parsed.model), parsed.sampling_seed(), parsed.sampling(most_tokens)
    stop = (parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop or ())
    scores = bool(parsed.echo) and parsed.logprobs is not None
    requests = [
        TextRequest(prompt, version, sampling, seed + index, stop, change, parsed.logprobs, scores)
        for prompt in prompts
        for index in range(count)
    ]
    return CompletionsRequest(requests, len(prompts), parsed)


def completion_body(
    answers: Sequence[TextCompletion], parsed: CompletionsRequest, head: dict[str, Any], decode: Decode | None
) -> dict[str, Any]:
    """Return the `text_completion` object. head: id, created, model."""
    choices = _choices(answers, parsed, decode)
    return {**head, "object": "text_completion", "choices": choices, "usage": _usage(answers, parsed)}


def completion_chunks(
    answers: Sequence[TextCompletion], parsed: CompletionsRequest, head: dict[str, Any], decode: Decode | None
) -> Iterator[dict[str, Any]]:
    """Yield the completions as stream events: for each its text, and its end."""
    usage = bool(parsed.body.stream_options and parsed.body.stream_options.include_usage)
    base: dict[str, Any] = {**head, "object": "text_completion", **({"usage": None} if usage else {})}
    for choice in _choices(answers, parsed, decode):
        yield {**base, "choices": [{**choice, "finish_reason": None}]}
        end = {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield {**base, "choices": [end]}
    if usage:
        yield {**base, "choices": [], "usage": _usage(answers, parsed)}


def _choices(
    answers: Sequence[TextCompletion], parsed: CompletionsRequest, decode: Decode | None
) -> list[dict[str, Any]]:
    decode = decode or (lambda ids: "".join(f"token_id:{token}" for token in ids))  # vLLM's format without text
    choices = []
    for index, (answer, request) in enumerate(zip(answers, parsed.requests, strict=True)):
        prompt = request.prompt if isinstance(request.prompt, str) else decode(request.prompt)
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt + answer.text if parsed.body.echo else answer.text,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        if parsed.body.logprobs is not None:
            choice["logprobs"] = _logprobs(answer, len(prompt), bool(parsed.body.echo), decode)
        if parsed.body.return_token_ids:
            choice |= {"prompt_token_ids": answer.prompt_token_ids, "token_ids": answer.token_ids}
        choices.append(choice)
    return choices


def _logprobs(answer: TextCompletion, prompt_length: int, echo: bool, decode: Decode) -> dict[str, Any]:
    """Return tokens, log-probabilities, most likely tokens and offsets of a completion."""
    parts: list[dict[str, list[Any]]] = []
    if echo:
        known: list[float | None] = [None, *answer.prompt_logprobs]
        parts.append(
            _part(answer.prompt_token_ids, known, [[], *answer.prompt_likeliest], decode, added=answer.added_tokens)
        )
    parts.append(_part(answer.token_ids, answer.logprobs, answer.likeliest, decode, start=prompt_length))
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _part(
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    likeliest: Sequence[TokenLogprobs],
    decode: Decode,
    *,
    start: int = 0,
    added: int = 0,
) -> dict[str, list[Any]]:
    """Return the lists of some tokens. start: offset of the first one. added: number of leading tokens without text."""
    part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    texts = TokenTexts(decode)
    for place, (token, logprob, alternatives) in enumerate(zip(tokens, logprobs, likeliest, strict=True)):
        if place == added:
            texts = TokenTexts(decode)
        text = texts.text_of(token)
        top: dict[str, float] = {}
        for other, value in alternatives:  # of tokens with equal text, the likeliest one
            top.setdefault(texts.text_of(other), value)
        if logprob is not None:
            top.setdefault(text, logprob)
        part["tokens"].append(text)
        part["token_logprobs"].append(logprob)
        part["top_logprobs"].append(None if logprob is None else top)
        part["text_offset"].append(start if place < added else start + texts.length)
        texts.append(token)
    return part


def _usage(answers: Sequence[TextCompletion], parsed: CompletionsRequest) -> dict[str, int]:
    per_prompt = len(answers) // parsed.prompts
    prompt = sum(len(answer.prompt_token_ids) for answer in answers[::per_prompt])
    sampled = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
