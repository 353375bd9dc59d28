"""Changes of logits before sampling: the mask of a form, and a request's biases and penalties.

They come before temperature and truncation, so the log-probability of a sampled token is under the changed
distribution. Penalties as in OpenAI's API reference (Advanced usage, frequency and presence penalties):

    logit[j] -= count[j] * frequency + (count[j] > 0) * presence

where count[j] is the number of times that token j was sampled before in the response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.errors import Problem, SpecError
from components.inference.response_form import NO_CHANGE, LogitChange


class LogitEditor:
    """Biases and penalties of one response."""

    def __init__(self, change: LogitChange, vocabulary: int):
        self._change = change
        if unknown := [token for token, _ in change.bias if token >= vocabulary]:
            raise SpecError([Problem("logit_bias", f"token {unknown[0]}: the model has {vocabulary} tokens")])

    @classmethod
    def of(cls, change: LogitChange, vocabulary: int) -> LogitEditor | None:
        """Return the editor of a request; None without changes. Raises SpecError for a token that the model lacks."""
        return None if change == NO_CHANGE else cls(change, vocabulary)

    def apply(self, logits_V: torch.Tensor, sampled: Sequence[int]) -> None:
        """Change the logits of the next token in place. sampled: tokens of the response so far."""
        change = self._change
        if change.bias:
            ids, values = zip(*change.bias, strict=True)
            logits_V[torch.tensor(ids, device=logits_V.device)] += torch.tensor(values).to(logits_V)
        if sampled and (change.presence or change.frequency):
            ids_K, count_K = torch.tensor(sampled, device=logits_V.device).unique(return_counts=True)
            logits_V[ids_K] -= count_K * change.frequency + change.presence
