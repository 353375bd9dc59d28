"""Parameters of requests that change the logits: `logit_bias` and penalties."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from components.errors import Problem
from components.inference.protocol import NO_CHANGE, LogitChange
from components.inference.request_bodies import RequestBody

MAX_BIASES = 1024
"""Maximum number of tokens in `logit_bias`."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


def _canonical(token: str) -> str:
    """Return the key of a token. It has one spelling, so that no token has two values."""
    if not _TOKEN_ID.fullmatch(token):
        raise ValueError('a token id in digits without leading zeros or spaces, such as "7"')
    return token


Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class LogitBody(RequestBody):
    """Changes of the logits."""

    logit_bias: dict[Annotated[str, AfterValidator(_canonical)], Bias] | None = Field(None, max_length=MAX_BIASES)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


def logit_change(body: LogitBody, allowed: bool, problems: list[Problem]) -> LogitChange:
    """Return the changes of the logits that a request demands. allowed: False if the server records responses for
    training, which uses the distribution of the experiment. Adds problems."""
    bias = tuple((int(token), value) for token, value in sorted((body.logit_bias or {}).items()) if value)
    change = LogitChange(bias, body.presence_penalty or 0.0, body.frequency_penalty or 0.0)
    if change != NO_CHANGE and not allowed:
        names = {"logit_bias": change.bias, "presence_penalty": change.presence, "frequency_penalty": change.frequency}
        text = "the experiment's collect sets the sampling distribution, which training uses; leave it out"
        problems += [Problem(name, text) for name, value in names.items() if value]
        return NO_CHANGE
    return change
