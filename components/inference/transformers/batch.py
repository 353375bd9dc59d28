"""The sequences that the embedded engine computes together: their slots in the cache, prefill, and sampling.

A sequence gets a slot whose contents are a prefix of its prompt, or a copy of them, and computes only the tokens after
the prefix. A finished sequence leaves its keys and values in its slot, which is parked behind the active ones until
another sequence needs it.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from components.errors import EngineError, PromptRefused
from components.inference.grammar_compiler import Matcher
from components.inference.growing_text import GrowingText, StopDetector
from components.inference.protocol import ChatRequest, TextRequest, TokenLogprobs, parameter_of
from components.inference.transformers.decoding_graphs import DecodingGraphs
from components.inference.transformers.kv_slots import KVSlots
from components.inference.transformers.prefixes import SHARED_TOKENS, partition, shared_prefix, shares_tokens
from components.inference.transformers.sampling import (
    LogitEditor,
    PassInterrupted,
    ReasoningLimit,
    distributions,
    draw,
    likeliest,
)
from components.models.cuda_graphs import GraphRecorder
from components.models.shared_attention import Sharing

PREFILL_TOKENS = 4096
"""Maximum number of tokens per prefill pass, including padding."""
SCORED_LOGITS = 2**27
"""Maximum number of logits per pass that computes log-probabilities of prompt tokens: 512 MB in float32."""
PADDING_TOKENS, PADDING_TOKENS_CPU = 2048, 32
"""Maximum padding per prefill pass: about the tokens that are computed in the overhead of one more pass."""


@dataclass(eq=False)
class Row:
    """State of a request in the engine."""

    request: ChatRequest | TextRequest
    future: asyncio.Future
    uniform: random.Random
    prompt: list[int] = field(default_factory=list)
    """Prompt tokens; empty before tokenization."""
    limit: int = 0
    """Maximum number of tokens to sample."""
    error: Exception | None = None
    """Cause of failure."""
    sampled: list[int] = field(default_factory=list)
    """Tokens of the response so far: at first those of `ChatRequest.start`."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each sampled token; NaN for one that `reasoning` added."""
    slot: int = -1
    stop: StopDetector | None = None
    """Detector of the request's stop strings; None without any."""
    growing: GrowingText | None = None
    """Text so far; None if nobody listens."""
    cached: int = 0
    """Number of leading tokens whose keys and values are in the slot."""
    matcher: Matcher | None = None
    """Allowed tokens of a response with a form; None allows all."""
    change: LogitEditor | None = None
    """Biases and penalties; None without any."""
    reasoning: ReasoningLimit | None = None
    """Limit of the reasoning; None without one."""
    alternatives: int | None = None
    """Number of most likely tokens to record for each token; None records none."""
    likeliest: list[TokenLogprobs] = field(default_factory=list)
    """Most likely tokens at each sampled token, if `alternatives` is set."""
    scores_prompt: bool = False
    """True if log-probabilities of the prompt tokens are computed. The prompt then uses no cached prefix."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each prompt token but the first, if `scores_prompt` is set."""
    prompt_likeliest: list[TokenLogprobs] = field(default_factory=list)
    added_tokens: int = 0
    """Number of leading prompt tokens that the tokenizer added to the text of a text completion."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the response."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled


class Batch:
    """Active sequences of a model. slots: maximum number of them."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_length: int,
        device: str,
        graphed: bool = False,
    ):
        self.model = model
        self.slots = slots
        self.max_length = max_length
        self.device, self.graphed = device, graphed
        self.active: list[Row] = []
        self.shared_tokens: float = SHARED_TOKENS if device == "cpu" and model.dtype == torch.float32 else math.inf
        """Least saving for which shared prefixes are read once (`prefixes.partition`); infinite never does."""
        self.stop = threading.Event()
        """Ends the forward passes with PassInterrupted while it is set."""
        self.counters = {"prompt_tokens": 0, "prefilled_tokens": 0, "sampled_tokens": 0, "passes": 0}
        """Totals: prompt tokens, prompt tokens computed (not cached), sampled tokens, forward passes."""
        self.progressed = time.monotonic()
        """Time of the last forward pass, or of the first request after an idle time."""
        self.release()

    def release(self) -> None:
        """Free the cache; it is allocated again on use."""
        vars(self).pop("graphs", None)
        self.forget()
        torch.cuda.empty_cache()  # for other processes; does nothing without a GPU

    def forget(self) -> None:
        """Drop all sequences, which other weights computed. The memory of a cache that graphs use stays."""
        if vars(self).get("graphs") is None:
            vars(self).pop("cache", None)
        self._held: list[list[int]] = [[] for _ in range(self.slots)]
        """Tokens whose keys and values are in each slot."""
        self._used = [0] * self.slots
        """Time of last use of each slot, for eviction."""
        self._clock = 0
        self._partitioned: list[Row] = []
        """Active rows when their prefixes were compared last."""
        self._partitioned_at = 0
        """Cached tokens of the first of them then."""
        self._sharing: Sharing | None = None

    @cached_property
    def cache(self) -> Any:
        """Keys and values of the slots."""
        return KVSlots(self.model.config.get_text_config(), self.slots, self.max_length, self.model.dtype, self.device)

    @cached_property
    def graphs(self) -> DecodingGraphs | None:
        """Graphs of the decoding passes; None unless `graphed`."""
        return DecodingGraphs(self.model, self.cache, GraphRecorder()) if self.graphed else None

    def park_cancelled_rows(self) -> None:
        """Remove the active rows whose callers have gone."""
        for row in [row for row in self.active if row.future.done()]:
            self.park(row)

    def admit(self, waiting: list[Row]) -> list[Row]:
        """Assign slots to waiting rows, remove these from the list, and return them. A row that shares a prefix with
        another one of them waits for the next call, when that prefix is cached."""
        admitted: list[Row] = []
        known: list[list[int]] = []
        uncached_tokens = 0
        for row in list(waiting):
            if len(self.active) == self.slots or uncached_tokens >= PREFILL_TOKENS:
                break
            tokens = row.tokens
            donor, shared = (0, 0) if row.scores_prompt else self._longest_prefix(tokens)
            prefix = min(shared, len(tokens) - 1)  # the last token is computed for its logits
            if not row.scores_prompt and any(shares_tokens(other, tokens, prefix + 17) for other in known):
                continue
            slot = self._slot_for(donor, prefix)
            self.cache.copy(donor, slot, prefix)
            self._held[slot] = tokens[:prefix]
            row.slot, row.cached = slot, prefix
            self._swap(slot, len(self.active))
            self.active.append(row)
            waiting.remove(row)
            admitted.append(row)
            known.append(tokens)
            uncached_tokens += missing(row)
            self.counters["prompt_tokens"] += len(tokens)
        for index, row in enumerate(self.active):
            row.slot = index
        return admitted

    def _longest_prefix(self, prompt: list[int]) -> tuple[int, int]:
        """Return the first slot that shares the longest prefix with the prompt, and the length of that prefix."""
        donor, longest = 0, 0
        for slot, cached in enumerate(self._held):
            if shares_tokens(cached, prompt, longest + 1):
                donor, longest = slot, shared_prefix(cached, prompt)
        return donor, longest

    def _slot_for(self, donor: int, prefix: int) -> int:
        """Return the donor slot if it is parked and would be extended; else the least recently used slot."""
        parked = range(len(self.active), self.slots)
        if donor in parked and prefix >= len(self._held[donor]) - 1:
            return donor
        return min(parked, key=lambda slot: (bool(self._held[slot]), slot == donor, self._used[slot], slot))

    def _swap(self, a: int, b: int) -> None:
        length = max(len(self._held[a]), len(self._held[b]))
        self.cache.swap(a, b, length)
        self._held[a], self._held[b] = self._held[b], self._held[a]
        self._used[a], self._used[b] = self._used[b], self._used[a]

    def park(self, row: Row) -> None:
        """Remove a row from the active ones; its slot keeps its keys and values."""
        self._clock += 1
        self._held[row.slot] = row.tokens[: row.cached]
        self._used[row.slot] = self._clock
        last = len(self.active) - 1
        self._swap(row.slot, last)
        moved = self.active[last]
        self.active[row.slot] = moved
        moved.slot = row.slot
        self.active.pop()

    def fail(self, row: Row, error: Exception) -> None:
        """Remove a failed row from the active ones and clear its slot."""
        row.error = error
        row.cached = 0
        self.cache.clear(row.slot)
        self.park(row)

    def prefill(self, batch: list[Row]) -> None:
        """Compute all tokens but the last, in passes of similar length to limit padding."""
        for scored in (False, True):
            for part in self._parts([row for row in batch if row.scores_prompt == scored]):
                widest = max(1, SCORED_LOGITS // (self.model.config.get_text_config().vocab_size * len(part)))
                while width := min(missing(part[0]), widest) if scored else missing(part[0]):
                    self._prefill_part(part, width)
        for row in batch:
            self._held[row.slot] = row.tokens[: row.cached]

    def _parts(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Yield the rows with missing tokens in groups for one pass each, the longest row first."""
        pending = sorted((row for row in rows if missing(row) > 0), key=lambda row: missing(row))
        while pending:
            part = [pending.pop()]
            width = missing(part[0])
            padding = 0
            while pending and width * (len(part) + 1) <= PREFILL_TOKENS:
                padding += width - missing(pending[-1])
                if padding > (PADDING_TOKENS_CPU if self.device == "cpu" else PADDING_TOKENS):
                    break
                part.append(pending.pop())
            yield part

    def _prefill_part(self, part: list[Row], width: int) -> None:
        """Compute the next `width` prompt tokens of rows, and the log-probabilities of the tokens after each of them
        for rows whose prompt is scored."""
        scored = part[0].scores_prompt
        tokens = torch.zeros(len(part), width, dtype=torch.long)
        positions = torch.zeros(len(part), width, dtype=torch.long)
        following = torch.zeros(len(part), width, dtype=torch.long)
        counts = []
        for index, row in enumerate(part):
            new = row.tokens[row.cached : -1][:width]
            counts.append(len(new))
            tokens[index, : len(new)] = torch.tensor(new, dtype=torch.long)
            following[index, : len(new)] = torch.tensor(row.tokens[row.cached + 1 :][:width], dtype=torch.long)
            positions[index] = torch.arange(row.cached, row.cached + width).clamp(max=self.max_length - 1)
            self.counters["prefilled_tokens"] += len(new)
            row.cached += len(new)
        slots = torch.tensor([row.slot for row in part])
        logits_BTV = self._forward(tokens, positions, slots, logits=0 if scored else None)
        if scored:
            for index, (row, count) in enumerate(zip(part, counts, strict=True)):
                logps_TV = logits_BTV[index, :count].float().log_softmax(-1)
                ids_T1 = following[index, :count, None].to(logps_TV.device)
                row.prompt_logprobs += logps_TV.gather(-1, ids_T1)[:, 0].tolist()
                row.prompt_likeliest += likeliest(logps_TV, row.alternatives or 0)

    def _decode_logits(self) -> torch.Tensor:
        """Return the (B, V) logits after the last token of every active row."""
        rows = self.active
        last = [row.sampled[-1] if row.sampled else row.prompt[-1] for row in rows]
        tokens = torch.tensor(last)[:, None]
        positions = torch.tensor([[row.cached] for row in rows])
        logits = self._forward(tokens, positions, slice(0, len(rows)), sharing=self._shared())[:, -1]
        for row, token in zip(rows, last, strict=True):
            row.cached += 1
            self._held[row.slot].append(token)
        return logits

    def _shared(self) -> Sharing | None:
        """Return what the active rows share. Their prefixes are compared when other rows are active than before."""
        if self._partitioned != self.active:
            self._partitioned, self._partitioned_at = list(self.active), self.active[0].cached
            self._sharing = partition(self._held[: len(self.active)], self.shared_tokens)
        if self._sharing is None:
            return None
        return replace(self._sharing, grown=self.active[0].cached - self._partitioned_at)

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: slice | torch.Tensor,
        logits: int | None = 1,
        sharing: Sharing | None = None,
    ) -> torch.Tensor:
        """Return the logits after the last `logits` tokens of each row; 0 means all tokens, None means none. sharing:
        what the rows share, for one token of each."""
        if self.stop.is_set():
            raise PassInterrupted
        self.counters["passes"] += 1
        self.progressed = time.monotonic()
        return self._compute(tokens, positions, rows, logits, sharing)

    def _compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: slice | torch.Tensor,
        logits: int | None,
        sharing: Sharing | None,
    ) -> torch.Tensor:
        graphs = self.graphs if isinstance(rows, slice) else None
        if graphs is not None and (logits_B1V := graphs.logits(tokens, positions)) is not None:
            return logits_B1V
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        mask = self.cache.aim(rows if isinstance(rows, slice) else rows.to(self.device), positions, sharing)
        return self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=torch.empty(0, dtype=torch.long) if logits is None else logits,
        ).logits

    def sample(self) -> list[Row]:
        """Sample a token for every active row. Return the rows that finished or failed."""
        done = self._park_rows_without_samples()
        if not self.active:
            return done
        logits_BV = self._decode_logits().float()
        rows = list(self.active)
        samplings = [row.request.sampling for row in rows]
        for index, row in enumerate(rows):
            if row.change is not None or row.matcher is not None:
                edit(row, logits_BV[index])
        tokens, logprobs = draw(logits_BV, samplings, [row.uniform.random() for row in rows])
        self.counters["sampled_tokens"] += len(rows)
        for index, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            added = row.reasoning.next_token(row.sampled) if row.reasoning is not None else None
            if added is not None:
                token, logprob = added, math.nan
            elif math.isnan(logprob):
                self.fail(row, row.error or EngineError("the model's logits are not finite"))
                done.append(row)
                continue
            row.sampled.append(token)
            row.logprobs.append(logprob)
            if row.alternatives is not None:
                logps_1V = distributions(logits_BV[index : index + 1], samplings[index : index + 1])
                row.likeliest += likeliest(logps_1V, row.alternatives)
            if row.matcher is not None:
                row.matcher.append(token)
            stopped = token in row.stop_ids or (row.stop is not None and row.stop.reached(row.sampled))
            if stopped or len(row.sampled) >= row.limit:
                self.park(row)
                done.append(row)
        return done

    def _park_rows_without_samples(self) -> list[Row]:
        """Remove the rows that compute a prompt only. Return them."""
        done = [row for row in self.active if not row.limit]
        for row in done:
            if math.isfinite(sum(row.prompt_logprobs)):
                self.park(row)
            else:
                self.fail(row, EngineError("the model's logits are not finite"))
        return done


def edit(row: Row, logits_V: torch.Tensor) -> None:
    """Change the logits of a row's next token as its request demands. If its form cannot be enforced any further, the
    row fails: its error is set, and its logits are NaN."""
    if row.change is not None:
        row.change.apply(logits_V, row.sampled)
    if row.matcher is not None:
        try:
            allowed_V = torch.from_numpy(row.matcher.allowed()).to(logits_V.device)
            logits_V.masked_fill_(~allowed_V, -torch.inf)
        except ValueError as error:
            assert isinstance(row.request, ChatRequest)
            text = f"{parameter_of(row.request.form)}: the form of the response cannot be enforced any further: {error}"
            row.error = PromptRefused(text)
            logits_V.fill_(torch.nan)


def missing(row: Row) -> int:
    """Return the number of tokens before the last that are not cached, of prompt and response."""
    return len(row.prompt) + len(row.sampled) - 1 - row.cached
