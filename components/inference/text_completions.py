"""Requests of OpenAI's legacy completions (`/v1/completions`) as text completions of an engine.

As in `wire`, a parameter is supported, accepted at its neutral value, or rejected with its name and reason; the answers
are described in `completion_choices`. `echo: true, max_tokens: 0` evaluates a text without sampling. Extensions, as in
vLLM: `top_k`, `min_p`, and `return_token_ids`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from components.errors import Problem, SpecError
from components.inference import request_forms
from components.inference.protocol import TextRequest
from components.inference.request_bodies import Neutral, StreamOptions, parse_parameters
from components.inference.wire import (
    MAX_ALTERNATIVES,
    MAX_NUMBER,
    MAX_STOPS,
    Name,
    SamplingBody,
    StopString,
)

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


Prompts = Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_checked)]


class CompletionBody(SamplingBody):
    """The supported parameters."""

    model: Name
    """Model name: `name`, or `name@version` to require that policy version."""
    prompt: Prompts
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

    @property
    def include_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)


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
