"""The embedded engine: transformers in this process, many conversations at once.

Requests are batched continuously: each pass of the loop admits what waits (prefill), then draws one token for every
active sequence (decode). What was computed is computed once: a prompt starts from the longest prefix that any slot
of the cache still holds, so the turns of an episode extend their own keys and values, the episodes of a group share
their prompt, and all share the system message.

Tokens are exact: a conversation that continues an answer of this engine is continued on the tokens of that answer,
never on a new tokenisation of their text (`conversations`).

A request that cannot be rendered, does not fit, or gets no finite logits fails alone: the others of its batch are
answered as if it were not there. Prompts are tokenised by the worker thread too, so that a long one does not hold up
the event loop.

The loop runs one pass at a time in a worker thread and hands control back in between, so that with environments
that answer at once the order of requests, and with it every sample, is the same in every run.

The policy is the base model with what was learned put in (`components.models.trained_weights.changed_tensors`). Its
version is checked on every request.
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
"""Most tokens, padding included, of one prefill pass."""
PADDING_TOKENS = 2048
"""Most padding of one prefill pass: about what is computed in the time that one more pass would take."""
PADDING_TOKENS_CPU = 32
"""The same on a CPU, where a pass costs little more than its tokens."""


class _Stopped(Exception):
    """A pass was given up, because nobody waits for it any more."""


@dataclass(eq=False)
class _Row:
    """A request on its way through the engine."""

    request: ChatRequest
    future: asyncio.Future
    uniform: random.Random
    prompt: list[int] = field(default_factory=list)
    """Empty until it is tokenised."""
    limit: int = 0
    """Most tokens to sample."""
    error: Exception | None = None
    """What it failed with."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: int = -1
    cached: int = 0
    """Leading tokens whose keys and values are in the slot."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled


class TransformersEngine:
    """Serves one model; implements `components.inference.protocol.Engine`.

    base_dir: local model folder. max_length: longest sequence in tokens. slots: conversations held at once; fewer
    where their cache would pass `cache_bytes`.
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
        self._parameters = dict(self.model.named_parameters(remove_duplicate=False))  # tied ones under each name
        self._changed: list[str] = []
        self._policy = BASE_POLICY
        self._conversations = Conversations(self.format, self.max_length)
        self._vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        self._arrived: list[_Row] = []
        """Requests that the loop has not taken yet: the only list that callers write to while a pass runs."""
        self._waiting: list[_Row] = []
        self._active: list[_Row] = []
        self._task: asyncio.Task | None = None
        self._stop = threading.Event()
        self.counters = {"prompt_tokens": 0, "prefilled_tokens": 0, "sampled_tokens": 0, "passes": 0}
        """Work done so far: tokens asked for as prompts, of these computed anew, tokens sampled, forward passes."""
        self.release()

    @property
    def policy(self) -> str:
        return self._policy

    def load_policy(self, version: str, folder: str | None) -> None:
        """Holds `version` from now on. Raises EngineBusy while requests are under way, ArtifactError for an adapter
        that does not fit; the engine then holds what it held."""
        if under_way := len(self._active) + len(self._waiting) + len(self._arrived):
            raise EngineBusy(f"policy {version} cannot be loaded: {under_way} answers are under way")
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
        """Frees the cache; it grows again on use."""
        self.cache = KVSlots(self.config, self.slots, self.max_length, self.model.dtype, self.device)
        self._held: list[list[int]] = [[] for _ in range(self.slots)]
        """Tokens whose keys and values each slot holds."""
        self._used = [0] * self.slots
        """When each slot was last active, for choosing which to give up."""
        self._clock = 0

    def close(self) -> None:
        self.release()

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Answers one conversation. Raises StalePolicy, ContextOverflow, PromptRefused, EngineError."""
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
        self._conversations.answered(request, message, row.tokens)
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
                for _ in range(4):  # let those who waited ask for their next turn before the next pass
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
        """One pass in a worker thread. Where this task is cancelled, the pass is told to end and waited for: until
        then the state of the engine is its own."""
        running = loop.run_in_executor(None, self._pass)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._stop.set()
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            self._stop.clear()
            if running.exception() is None:  # else `_Stopped`, or what it failed with: nobody is there to tell
                for row in running.result():
                    row.future.cancel()
            raise

    def _drop_requests(self) -> None:
        self._active, self._waiting, self._arrived = [], [], []
        self.release()

    @torch.inference_mode()
    def _pass(self) -> list[_Row]:
        """Admits what waits, then samples one token for every active row. Returns the rows that ended or failed."""
        for row in [row for row in self._active if row.future.done()]:  # cancelled by its caller
            self._park(row)
        failed = self._tokenise()
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

    def _tokenise(self) -> list[_Row]:
        """Tokenises the prompts that have arrived. Returns the rows that failed, which wait no more."""
        failed = []
        for row in self._waiting:
            if row.prompt or row.future.done():
                continue
            try:
                row.prompt, row.limit = self._prompt(row.request)
            except EngineError as error:
                row.error = error
            except Exception as error:
                logger.exception("a prompt cannot be tokenised")
                row.error = EngineError(f"{type(error).__name__}: {error}")
            if row.error is not None:
                failed.append(row)
        if failed:
            self._waiting = [row for row in self._waiting if row.error is None]
        return failed

    def _prompt(self, request: ChatRequest) -> tuple[list[int], int]:
        """Tokens of the conversation, and how many may be sampled after them."""
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
                "holds a token that was added to the tokenizer only"
            )
        return prompt, min(request.sampling.max_tokens, room)

    def _admit(self) -> list[_Row]:
        """Gives slots to waiting rows. A row whose prefix another row of the same batch is about to compute waits
        for the next batch, and finds it computed."""
        self._waiting = [row for row in self._waiting if not row.future.done()]
        batch: list[_Row] = []
        for row in list(self._waiting):
            if len(self._active) == self.slots:
                break
            if sum(_missing(other) for other in batch) >= PREFILL_TOKENS:
                break
            shared = [_shared(held, row.prompt) for held in self._held]
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
        """The donor itself where it is parked and would be extended; else the slot that was unused longest."""
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
        """Takes a row out of the active ones; its slot keeps what it holds."""
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
        """Takes a row out of the active ones, with all that it computed."""
        row.error = error
        row.cached = 0
        self.cache.clear(row.slot)
        self._park(row)

    def _prefill(self, batch: list[_Row]) -> None:
        """Computes all prompt tokens but the last, in parts of like length: one more part where padding costs more."""
        rest = sorted((row for row in batch if row.cached < len(row.prompt) - 1), key=lambda row: _missing(row))
        while rest:
            part = [rest.pop()]
            width = _missing(part[0])
            padding = 0
            while rest and width * (len(part) + 1) <= PREFILL_TOKENS:
                padding += width - _missing(rest[-1])
                if padding > (PADDING_TOKENS_CPU if self.device == "cpu" else PADDING_TOKENS):
                    break
                part.append(rest.pop())
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
        """(B, V) logits after the last token of every active row."""
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
    return len(row.prompt) - 1 - row.cached


def _shared(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # list comparison runs in C: halving beats a loop over tokens
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
