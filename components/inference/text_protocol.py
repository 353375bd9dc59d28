"""Text completions of an engine: a prompt of plain text or tokens, without a chat template.

An engine that implements `complete` serves `/v1/completions` (`components.inference.text_completions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from components.inference.protocol import BASE_POLICY, Increment, Sampling, TokenLogprobs
from components.inference.response_form import NO_CHANGE, LogitChange


@dataclass(slots=True, frozen=True)
class TextIncrement(Increment):
    """Tokens that an engine has sampled since the last increment of a completion, and its prompt."""

    prompt_logprobs: list[float] = field(default_factory=list)
    """This and the following fields: as in `TextCompletion`."""
    prompt_likeliest: list[TokenLogprobs] = field(default_factory=list)
    added_tokens: int = 0


@dataclass(slots=True, frozen=True)
class TextRequest:
    """A text completion request to an engine."""

    prompt: str | list[int]
    """Text, which the engine tokenizes with the tokenizer's special tokens (such as the beginning of a sequence), or
    token ids, which it uses as they are."""
    policy: str = BASE_POLICY
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    """`max_tokens` may be 0 if the prompt is scored."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the completion; its text ends before the first one."""
    change: LogitChange = NO_CHANGE
    alternatives: int | None = None
    """Number of most likely tokens to return for each token; None returns none."""
    scores_prompt: bool = False
    """True to return the log-probabilities of the prompt tokens."""
    listener: Callable[[TextIncrement], None] | None = field(default=None, compare=False, repr=False)
    """Callback for the tokens of the completion as they are sampled, as in `ChatRequest`."""


@dataclass(slots=True, frozen=True)
class TextCompletion:
    """A completion, with its token ids and log-probabilities."""

    text: str
    finish_reason: str
    """Finish reason: `stop` or `length`."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Sampled tokens, including an end-of-sequence token, which is not part of the text."""
    logprobs: list[float]
    """Log-probability of each sampled token under the distribution that it was drawn from, as in `ChatCompletion`."""
    policy: str
    likeliest: list[TokenLogprobs] = field(default_factory=list)
    """Most likely tokens at each sampled token, under the same distribution."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each prompt token but the first under the model's distribution: temperature 1, all tokens."""
    prompt_likeliest: list[TokenLogprobs] = field(default_factory=list)
    """Most likely tokens at each prompt token but the first, under the model's distribution."""
    added_tokens: int = 0
    """Number of leading prompt tokens that the tokenizer added to the text."""
