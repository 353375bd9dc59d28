"""Exact tokens of an answer as a field of its choice, for clients that keep choices and train on them later.

The field `sample` of a choice has what `ChatCompletion` has beyond OpenAI's JSON: token ids, log-probabilities, policy
version, sampling parameters. It survives a copy of the choice, and its JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from components.inference.protocol import ChatCompletion, Sampling

FIELD = "sample"
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Parameters that determine the distribution of a token."""


def sample_of(answer: ChatCompletion, sampling: Sampling) -> dict[str, Any]:
    """Return the field of an answer. A log-probability that is not a number is null."""
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": answer.token_ids,
        "logprobs": [None if math.isnan(logprob) else logprob for logprob in answer.logprobs],
        "policy": answer.policy,
        "altered": answer.altered,
        "sampling": {name: getattr(sampling, name) for name in SAMPLING},
    }


def answer_of(message: dict[str, Any], finish_reason: str, sample: Mapping[str, Any]) -> ChatCompletion:
    """Return the answer with this message and field, the inverse of `sample_of`."""
    logprobs = [math.nan if logprob is None else logprob for logprob in sample["logprobs"]]
    tokens = sample["prompt_token_ids"], sample["token_ids"], logprobs
    return ChatCompletion(message, finish_reason, *tokens, sample["policy"], altered=sample["altered"])
