"""Sampling of tokens from logits, reproducible per row.

A token is the inverse of the cumulative distribution at one uniform number, so a row's sample depends on its own number
only and not on the other rows of the batch.

Logits are changed before sampling: by the mask of a form, and by a request's biases and penalties. Changes come before
temperature and truncation, so the log-probability of a sampled token is under the changed distribution. Penalties as in
OpenAI's API reference (Advanced usage, frequency and presence penalties):

    logit[j] -= count[j] * frequency + (count[j] > 0) * presence

where count[j] is the number of times that token j was sampled before in the response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.errors import Problem, SpecError
from components.inference.protocol import NO_CHANGE, LogitChange, Sampling, TokenLogprobs
from components.models.distribution import Cut, support_mask
from components.trajectories.chat import ChatFormat

CHUNK_ROWS = 8
"""Rows that are drawn together on a CPU: their distributions fit a processor's cache, and the results are the same."""


class PassInterrupted(Exception):
    """Interruption of a pass after cancellation."""


def draw(
    logits_BV: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return one token and its log-probability for each row.

    The log-probability is under the sampling distribution: after temperature, top-k, top-p and min-p. For greedy rows
    (temperature 0) it is at temperature 1. A row whose logits are not finite has a log-probability of NaN and an
    arbitrary token, and does not affect the other rows.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    count = CHUNK_ROWS if logits_BV.device.type == "cpu" else max(1, len(samplings))
    for start in range(0, len(samplings), count):
        rows = slice(start, start + count)
        drawn = _draw(logits_BV[rows], samplings[rows], uniforms[rows])
        tokens += drawn[0]
        logprobs += drawn[1]
    return tokens, logprobs


def _draw(
    logits_BV: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw for the rows of a chunk."""
    logps_BV = distributions(logits_BV, samplings)
    greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings])
    if greedy.all():
        tokens_B = logits_BV.argmax(-1)
    else:
        cumulative_BV = logps_BV.exp().cumsum(-1)
        points_B1 = torch.tensor(uniforms, dtype=torch.float64)[:, None].to(cumulative_BV) * cumulative_BV[:, -1:]
        tokens_B = torch.searchsorted(cumulative_BV, points_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
        # Rounding can place a point at the total: use a token with positive probability instead.
        impossible = logps_BV.gather(-1, tokens_B[:, None])[:, 0] == -torch.inf
        likeliest_B = impossible | greedy.to(tokens_B.device)
        if likeliest_B.device.type != "cpu" or likeliest_B.any():  # elsewhere, asking would wait for the device
            tokens_B = torch.where(likeliest_B, logits_BV.argmax(-1), tokens_B)
    logps_B = logps_BV.gather(-1, tokens_B[:, None])[:, 0]
    return tokens_B.tolist(), logps_B.tolist()


def distributions(logits_BV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return the log-probabilities of all tokens under each row's sampling distribution (`draw`)."""
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures)[:, None].to(logits_BV)
    logps_BV = torch.log_softmax(logits_BV, dim=-1)
    for row, sampling in enumerate(samplings):
        cut = Cut(sampling.temperature or 1.0, sampling.top_p, sampling.top_k, sampling.min_p)
        if sampling.temperature and not cut.whole:
            logps_BV[row] = truncate(logps_BV[row], cut)
    return logps_BV


def truncate(logps_V: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return log-probabilities renormalized over the tokens that can be sampled (`components.models.distribution`)."""
    return logps_V.masked_fill(~support_mask(logps_V[None], cut)[0], -torch.inf).log_softmax(-1)


def likeliest(logps_TV: torch.Tensor, count: int) -> list[TokenLogprobs]:
    """Return the `count` most likely tokens of each of T distributions, without tokens that cannot be sampled."""
    values_TK, ids_TK = logps_TV.topk(min(count, logps_TV.shape[-1]), dim=-1)
    return [
        [(token, logprob) for token, logprob in zip(ids, values, strict=True) if logprob > -torch.inf]
        for ids, values in zip(ids_TK.tolist(), values_TK.tolist(), strict=True)
    ]


class ReasoningLimit:
    """Limit of the reasoning of one response: the tokens of its end are added if it is unfinished after `most` tokens.
    chat: for its prompt (`ResponseReader.after`).

    Raises SpecError for a chat template without reasoning.
    """

    def __init__(self, chat: ChatFormat, most: int):
        if chat.reasoning is None:
            text = f"{most}: the chat template of {chat.tokenizer.name_or_path} has no reasoning; expected null"
            raise SpecError([Problem("agent.max_thinking_tokens", text)])
        self._chat, self._form, self._most = chat, chat.reasoning, most
        self._decided = False
        self._added: list[int] = []

    def next_token(self, sampled: Sequence[int]) -> int | None:
        """Return the next token if it is not to be sampled. sampled: tokens of the response so far."""
        if not self._decided and len(sampled) >= self._most:
            text = self._chat.text_of(list(sampled))
            begun = self._form.opened or text.lstrip().startswith(self._form.start)
            ended = self._form.answer_start(text) is not None
            self._decided = begun or ended
            if begun and not ended:
                self._added = self._chat.encode(self._chat.reasoning_end)
        return self._added.pop(0) if self._added else None


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
