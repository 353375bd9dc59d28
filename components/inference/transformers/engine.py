"""The embedded engine: transformers in this process, with concurrent conversations.

Requests are batched continuously: each pass of the loop admits waiting requests (prefill), then samples one token for
every active sequence (decode). Prefixes are cached: a prompt starts from the longest prefix in any cache slot, so the
turns of an episode extend their own keys and values, the episodes of a group share their prompt, and all share the
system message.

Tokens are exact: a conversation that continues a response of this engine continues from the tokens of that response,
which are never retokenized (`conversations`).

A request that cannot be rendered, does not fit, or has logits that are not finite fails alone and does not affect the
others of its batch. The worker thread also tokenizes prompts, so that long ones do not block the event loop.

The loop runs one pass at a time in a worker thread and yields to the event loop in between. Therefore, with
environments that respond immediately, the order of requests and all samples are the same in every run.

The policy is the base model with the trained weights (`components.models.trained_weights.changed_tensors`). Its version
is checked for every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from components.errors import ArtifactError, ContextOverflow, EngineBusy, EngineError, PromptRefused, StalePolicy
from components.inference.conversations import Conversations
from components.inference.kv_slots import KVSlots, heads_and_dim
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Sampling
from components.inference.sampling import draw
from components.models import attention, trained_weights
from components.models.weights import load_model, load_tokenizer, pick_device
from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 4096
"""Maximum number of tokens per prefill pass, including padding."""
PADDING_TOKENS = 2048
"""Maximum padding per prefill pass: about the tokens that are computed in the overhead of one more pass."""
PADDING_TOKENS_CPU = 32
"""Maximum padding on a CPU, where the overhead of a pass is small."""


class _Stopped(Exception):
    """Interruption of a pass after cancellation."""


@dataclass(eq=False)
class _Row:
    """State of a request in the engine."""

    request: ChatRequest
    future: asyncio.Future
    uniform: random.Random
    prompt: list[int] = field(default_factory=list)
    """Prompt tokens; empty before tokenization."""
    limit: int = 0
    """Maximum number of tokens to sample."""
    error: Exception | None = None
    """Cause of failure."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: int = -1
    cached: int = 0
    """Number of leading tokens whose keys and values are in the slot."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled


class TransformersEngine:
    """An engine with one model in this process; implements `components.inference.protocol.Engine`.

    base_dir: local model folder. max_length: maximum sequence length in tokens. slots: maximum number of concurrent
    conversations, reduced if their cache would exceed `cache_bytes`.
    Raises ResourceError for models that it cannot run exactly (sliding windows, recurrent layers, no chat template).
    """

    def __init__(
        self,
        base_dir: Path,
        *,
        max_length: int,
        dtype: str = "float32",
        device: str = "auto",
        slots: int = 128,
        cache_bytes: int = 8_000_000_000,
    ):
        self.base_dir = Path(base_dir)
        self.device = pick_device(device)
        self.tokenizer = load_tokenizer(self.base_dir)
        self.format = ChatFormat(self.tokenizer)
        self.model = load_model(self.base_dir, dtype=dtype, device=self.device)
        self.config = self.model.config.get_text_config()
        self.max_length = min(max_length, self.config.max_position_embeddings)
        attention.refuse_inexact(self.config, self.max_length, self.base_dir.name)
        self.model.set_attn_implementation(attention.register())
        heads, dim = heads_and_dim(self.config)
        size = self.config.num_hidden_layers * heads * dim * self.model.dtype.itemsize
        per_sequence = 2 * size * self.max_length
        self.slots = max(1, min(slots, cache_bytes // per_sequence))
        self.stop_ids = _stop_ids(self.model, self.format)
        self._parameters = dict(
            self.model.named_parameters(remove_duplicate=False)
        )  # tied weights under each of their names
        self._changed: list[str] = []
        self._policy = BASE_POLICY
        self._conversations = Conversations(self.format, self.max_length)
        self._vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        self._arrived: list[_Row] = []
        """Requests that the loop has not fetched yet: the only list that callers modify during a pass."""
        self._waiting: list[_Row] = []
        self._active: list[_Row] = []
        self._task: asyncio.Task | None = None
        self._stop = threading.Event()
        self.counters = {"prompt_tokens": 0, "prefilled_tokens": 0, "sampled_tokens": 0, "passes": 0}
        """Totals: prompt tokens, prompt tokens computed (not cached), sampled tokens, forward passes."""
        self.release()

    @property
    def policy(self) -> str:
        return self._policy

    def load_policy(self, version: str, folder: str | None) -> None:
        """Load `version`. Raises EngineBusy while requests are in flight, ArtifactError for an adapter that does not
        fit the model; the engine then keeps its version."""
        if in_flight := len(self._active) + len(self._waiting) + len(self._arrived):
            raise EngineBusy(f"policy {version} cannot be loaded: {in_flight} requests are in flight")
        if version == self._policy:
            return
        changed = dict(trained_weights.changed_tensors(self.base_dir, Path(folder))) if folder else {}
        if unknown := sorted(changed.keys() - self._parameters.keys()):
            raise ArtifactError(f"{folder} changes {unknown[:3]}, which the loaded model does not have")
        restored = dict(
            trained_weights.base_tensors(self.base_dir, [name for name in self._changed if name not in changed])
        )
        with torch.no_grad():
            for name, tensor in (changed | restored).items():
                self._parameters[name].copy_(tensor)
        self._changed = list(changed)
        self._policy = version
        self.release()

    def release(self) -> None:
        """Free the cache; it is allocated again on use."""
        self.cache = KVSlots(self.config, self.slots, self.max_length, self.model.dtype, self.device)
        self._held: list[list[int]] = [[] for _ in range(self.slots)]
        """Tokens whose keys and values are in each slot."""
        self._used = [0] * self.slots
        """Time of last use of each slot, for eviction."""
        self._clock = 0

    def close(self) -> None:
        self.release()

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response to a request. Raises StalePolicy, ContextOverflow, PromptRefused, EngineError."""
        if request.policy != self._policy:
            raise StalePolicy(f"asked for policy {request.policy}, but the engine holds {self._policy}")
        loop = asyncio.get_running_loop()
        row = _Row(request, loop.create_future(), random.Random(request.seed))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        elif self._task.get_loop() is not loop:
            if not self._task.get_loop().is_closed():
                raise EngineError("the engine is in use by another event loop; give each its own engine")
            self._drop_requests()
            self._task = loop.create_task(self._run())
        self._arrived.append(row)
        await row.future
        return self._completion(row)

    def _completion(self, row: _Row) -> ChatCompletion:
        request = row.request
        stopped = row.sampled[-1] in self.stop_ids
        turn = sum(message["role"] == "assistant" for message in request.messages)
        message = self.format.parse(row.sampled[:-1] if stopped else row.sampled, turn)
        self._conversations.record_response(request, message, row.tokens)
        reason = "length" if not stopped else "tool_calls" if message.get("tool_calls") else "stop"
        return ChatCompletion(message, reason, row.prompt, row.sampled, row.logprobs, request.policy)

    # The loop

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._arrived or self._waiting or self._active:
                self._waiting += self._arrived
                self._arrived = []
                for row in await self._in_thread(loop):
                    if row.future.done():
                        continue
                    if row.error is not None:
                        row.future.set_exception(row.error)
                    else:
                        row.future.set_result(None)
                for _ in range(4):  # let finished requests submit their next turn before the next pass
                    await asyncio.sleep(0)
        except Exception as error:
            logger.exception("generation failed")
            for row in [*self._active, *self._waiting, *self._arrived]:
                if not row.future.done():
                    row.future.set_exception(EngineError(f"{type(error).__name__}: {error}"))
            self._drop_requests()
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            for row in [*self._active, *self._waiting, *self._arrived]:
                row.future.cancel()
            self._drop_requests()
            raise

    async def _in_thread(self, loop: asyncio.AbstractEventLoop) -> list[_Row]:
        """Run one pass in a worker thread. On cancellation, stop the pass and wait for it, because it owns the engine's
        state until it ends."""
        running = loop.run_in_executor(None, self._pass)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._stop.set()
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            self._stop.clear()
            if running.exception() is None:  # else `_Stopped` or an error, which has no recipient
                for row in running.result():
                    row.future.cancel()
            raise

    def _drop_requests(self) -> None:
        self._active, self._waiting, self._arrived = [], [], []
        self.release()

    @torch.inference_mode()
    def _pass(self) -> list[_Row]:
        """Admit waiting rows, then sample one token for every active row. Return the rows that finished or failed."""
        for row in [row for row in self._active if row.future.done()]:  # cancelled by its caller
            self._park(row)
        failed = self._tokenize()
        while batch := self._admit():
            try:
                self._prefill(batch)
            except _Stopped:
                raise
            except Exception as error:
                logger.exception("%d prompts cannot be computed", len(batch))
                for row in batch:
                    self._fail(row, EngineError(f"{type(error).__name__}: {error}"))
                failed += batch
        return failed + (self._sample(self._decode_logits()) if self._active else [])

    def _tokenize(self) -> list[_Row]:
        """Tokenize the waiting prompts. Return the rows that failed, which are removed from the queue."""
        failed = []
        for row in self._waiting:
            if row.prompt or row.future.done():
                continue
            try:
                row.prompt, row.limit = self._prompt(row.request)
            except EngineError as error:
                row.error = error
            except Exception as error:
                logger.exception("a prompt cannot be tokenized")
                row.error = EngineError(f"{type(error).__name__}: {error}")
            if row.error is not None:
                failed.append(row)
        if failed:
            self._waiting = [row for row in self._waiting if row.error is None]
        return failed

    def _prompt(self, request: ChatRequest) -> tuple[list[int], int]:
        """Return the tokens of the conversation, and the maximum number of tokens to sample."""
        prompt = self._conversations.prompt(request)
        room = self.max_length - len(prompt)
        if room < 1:
            if self.max_length < self.config.max_position_embeddings:
                limit = f"model.max_length is {self.max_length}: raise it or shorten the task"
            else:
                limit = f"the model takes {self.max_length} at most: shorten the task"
            raise ContextOverflow(f"the prompt has {len(prompt)} tokens, {limit}")
        if not prompt:
            raise PromptRefused("the chat template renders the conversation as an empty text")
        if max(prompt) >= self._vocabulary:
            raise PromptRefused(
                f"the tokenizer gives token {max(prompt)}, and the model has {self._vocabulary}: the conversation "
                "contains a token that was added to the tokenizer only"
            )
        return prompt, min(request.sampling.max_tokens, room)

    def _admit(self) -> list[_Row]:
        """Assign slots to waiting rows. A row that shares a prefix with another row of the batch waits for the next
        batch, in which that prefix is cached."""
        self._waiting = [row for row in self._waiting if not row.future.done()]
        batch: list[_Row] = []
        for row in list(self._waiting):
            if len(self._active) == self.slots:
                break
            if sum(_missing(other) for other in batch) >= PREFILL_TOKENS:
                break
            shared = [_shared(cached, row.prompt) for cached in self._held]
            donor = max(range(self.slots), key=lambda slot: (shared[slot], -slot))
            prefix = min(shared[donor], len(row.prompt) - 1)  # the last token is computed for its logits
            if any(_shared(other.prompt, row.prompt) > prefix + 16 for other in batch):
                continue
            slot = self._slot_for(donor, prefix)
            if slot != donor:
                self.cache.copy(donor, slot, prefix)
            self._held[slot] = row.prompt[:prefix]
            row.slot, row.cached = slot, prefix
            self._swap(slot, len(self._active))
            self._active.append(row)
            self._waiting.remove(row)
            batch.append(row)
            self.counters["prompt_tokens"] += len(row.prompt)
        for index, row in enumerate(self._active):
            row.slot = index
        return batch

    def _slot_for(self, donor: int, prefix: int) -> int:
        """Return the donor slot if it is parked and would be extended; else the least recently used slot."""
        parked = range(len(self._active), self.slots)
        if donor in parked and prefix >= len(self._held[donor]) - 1:
            return donor
        return min(parked, key=lambda slot: (bool(self._held[slot]), slot == donor, self._used[slot], slot))

    def _swap(self, a: int, b: int) -> None:
        length = max(len(self._held[a]), len(self._held[b]))
        self.cache.swap(a, b, length)
        self._held[a], self._held[b] = self._held[b], self._held[a]
        self._used[a], self._used[b] = self._used[b], self._used[a]

    def _park(self, row: _Row) -> None:
        """Remove a row from the active ones; its slot keeps its keys and values."""
        self._clock += 1
        self._held[row.slot] = row.tokens[: row.cached]
        self._used[row.slot] = self._clock
        last = len(self._active) - 1
        self._swap(row.slot, last)
        moved = self._active[last]
        self._active[row.slot] = moved
        moved.slot = row.slot
        self._active.pop()

    def _fail(self, row: _Row, error: Exception) -> None:
        """Remove a failed row from the active ones and clear its slot."""
        row.error = error
        row.cached = 0
        self.cache.clear(row.slot)
        self._park(row)

    def _prefill(self, batch: list[_Row]) -> None:
        """Compute all prompt tokens but the last, in passes of similar length to limit padding."""
        pending = sorted((row for row in batch if row.cached < len(row.prompt) - 1), key=lambda row: _missing(row))
        while pending:
            part = [pending.pop()]
            width = _missing(part[0])
            padding = 0
            while pending and width * (len(part) + 1) <= PREFILL_TOKENS:
                padding += width - _missing(pending[-1])
                if padding > (PADDING_TOKENS_CPU if self.device == "cpu" else PADDING_TOKENS):
                    break
                part.append(pending.pop())
            tokens = torch.zeros(len(part), width, dtype=torch.long)
            positions = torch.zeros(len(part), width, dtype=torch.long)
            for index, row in enumerate(part):
                new = row.prompt[row.cached : -1]
                tokens[index, : len(new)] = torch.tensor(new)
                positions[index] = torch.arange(row.cached, row.cached + width).clamp(max=self.max_length - 1)
                self.counters["prefilled_tokens"] += len(new)
                row.cached += len(new)
            self._forward(tokens, positions, torch.tensor([row.slot for row in part]))
        for row in batch:
            self._held[row.slot] = row.tokens[: row.cached]

    def _decode_logits(self) -> torch.Tensor:
        """Return the (B, V) logits after the last token of every active row."""
        rows = self._active
        last = [row.sampled[-1] if row.sampled else row.prompt[-1] for row in rows]
        tokens = torch.tensor(last)[:, None]
        positions = torch.tensor([[row.cached] for row in rows])
        logits = self._forward(tokens, positions, slice(0, len(rows)))[:, -1]
        for row, token in zip(rows, last, strict=True):
            row.cached += 1
            self._held[row.slot].append(token)
        return logits

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        if self._stop.is_set():
            raise _Stopped
        self.counters["passes"] += 1
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        mask = self.cache.aim(rows if isinstance(rows, slice) else rows.to(self.device), positions)
        return self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits

    def _sample(self, logits: torch.Tensor) -> list[_Row]:
        """Sample a token for every active row. Return the rows that finished or failed."""
        rows = list(self._active)
        tokens, logprobs = draw(
            logits.float(), [row.request.sampling for row in rows], [row.uniform.random() for row in rows]
        )
        self.counters["sampled_tokens"] += len(rows)
        done = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if math.isnan(logprob):
                self._fail(row, EngineError("the model's logits are not finite"))
                done.append(row)
                continue
            row.sampled.append(token)
            row.logprobs.append(logprob)
            if token in self.stop_ids or len(row.sampled) >= row.limit:
                self._park(row)
                done.append(row)
        return done


def _missing(row: _Row) -> int:
    """Return the number of prompt tokens, without the last, that are not cached."""
    return len(row.prompt) - 1 - row.cached


def _shared(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection, because list comparison in C is faster than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _stop_ids(model: Any, chat: ChatFormat) -> frozenset[int]:
    declared = model.generation_config.eos_token_id
    listed = declared if isinstance(declared, list) else [declared]
    return frozenset([*(token for token in listed if token is not None), chat.end_id])


__all__ = ["Sampling", "TransformersEngine"]
