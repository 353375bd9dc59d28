"""The embedded engine: transformers in this process, with concurrent conversations.

Requests are batched continuously: each pass of the loop admits waiting requests (prefill), then samples one token for
every active sequence (decode). Prefixes are cached: a prompt starts from the longest prefix in any cache slot, so the
turns of an episode extend their own keys and values, the episodes of a group share their prompt, and all share the
system message.

Tokens are exact: a conversation that continues a response of this engine continues from the tokens of that response,
which are never retokenized (`conversations`).

A response that must have a form, and logits that a request changes, are described in `components.inference.grammar`
and `sampling`; log-probabilities are always of the distribution that was sampled from.

A request that cannot be rendered, does not fit, or has logits that are not finite fails alone and does not affect the
others of its batch. The worker thread also tokenizes prompts, so that long ones do not block the event loop. A request
whose form is new joins the loop when its grammar is compiled, and the others go on.

The loop runs one pass at a time in a worker thread and yields to the event loop in between. Therefore, with
environments that respond immediately, the order of requests and all samples are the same in every run; only requests
without a form may overtake the first requests of a new one.

The policy is the base model with the trained weights (`components.models.trained_weights.changed_tensors`). Its version
is checked for every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from components.errors import ContextOverflow, EngineBusy, EngineError, PromptRefused, SpecError, StalePolicy
from components.inference.conversations import Conversations, stop_ids
from components.inference.grammar import Grammars, require_answer
from components.inference.growing_text import GrowingText, StopDetector, growing_response, text_before
from components.inference.protocol import (
    BASE_POLICY,
    ChatCompletion,
    ChatRequest,
    Increment,
    TextCompletion,
    TextIncrement,
    TextRequest,
)
from components.inference.token_texts import added_tokens, text_prompt
from components.inference.transformers.batch import Row
from components.inference.transformers.sampling import LogitEditor, PassInterrupted, ReasoningLimit
from components.inference.transformers.state_batch import default_cache_bytes, fitting_batch
from components.inference.transformers.turns import Turns
from components.models import attention, packed_weights, trained_weights
from components.models.stored_names import to_parameters
from components.models.weights import load_model, load_tokenizer, pick_device
from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)


class TransformersEngine:
    """An engine with one model in this process; implements `components.inference.protocol.Engine`.

    base_dir: local model folder. max_length: maximum sequence length in tokens. slots: maximum number of concurrent
    conversations, reduced if their cache would exceed `cache_bytes`: by default 8 GB of memory, or a quarter of a GPU.
    turns: shared by the engines that compute one after the other. cuda_graphs: start decoding passes as CUDA graphs.
    Raises ResourceError for models that it cannot run exactly (a cache of their own, no chat template).
    """

    def __init__(
        self,
        base_dir: Path,
        *,
        max_length: int,
        dtype: str = "float32",
        device: str = "auto",
        slots: int = 128,
        cache_bytes: int | None = None,
        turns: Turns | None = None,
        cuda_graphs: bool = False,
    ):
        self.base_dir = Path(base_dir)
        self.device = pick_device(device)
        self.tokenizer = load_tokenizer(self.base_dir)
        self.format = ChatFormat(self.tokenizer)
        self.model = load_model(self.base_dir, dtype=dtype, device=self.device)
        self.config = self.model.config.get_text_config()
        self._most_tokens = getattr(self.config, "max_position_embeddings", None) or max_length
        self.max_length = min(max_length, self._most_tokens)
        attention.refuse_inexact(self.config, self.max_length, self.base_dir.name)
        packed_weights.pack(self.model)
        self.stop_ids = stop_ids(self.model.generation_config.eos_token_id, self.format)
        self._parameters = dict(
            self.model.named_parameters(remove_duplicate=False)
        )  # tied weights under each of their names
        self._changed: list[str] = []
        self._policy = BASE_POLICY
        self._conversations = Conversations(self.format, self.max_length)
        self._vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        self._arrived: list[Row] = []
        """Requests that the loop has not fetched yet: the only list that callers modify during a pass."""
        self._waiting: list[Row] = []
        self._task: asyncio.Task | None = None
        self._turns = turns or Turns()
        self.batch = fitting_batch(
            self.model,
            self.base_dir.name,
            slots,
            cache_bytes or default_cache_bytes(self.device),
            max_length=self.max_length,
            device=self.device,
            graphed=cuda_graphs,
        )
        self.slots = self.batch.slots
        self.counters = self.batch.counters
        self._grammars = Grammars(self.format, self._vocabulary, self.stop_ids)

    @property
    def policy(self) -> str:
        return self._policy

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises ContextOverflow and PromptRefused."""
        return len(self._conversations.prompt(request))

    def recall(self, request: ChatRequest, message: dict[str, Any], tokens: list[int]) -> None:
        """Continue the conversation of a response that was sampled earlier from exact tokens: those of the conversation
        up to the end of the response."""
        self._conversations.record_response(request, message, tokens)

    def load_policy(self, version: str, folder: str | None) -> None:
        """Load `version`. Raises EngineBusy while requests are in flight, ArtifactError for an adapter that does not
        fit the model; the engine then keeps its version."""
        if in_flight := self._in_flight():
            raise EngineBusy(f"policy {version} cannot be loaded: {in_flight} requests are in flight")
        if version == self._policy:
            return
        changed = dict(trained_weights.changed_tensors(self.base_dir, Path(folder))) if folder else {}
        restored = dict(
            trained_weights.base_tensors(self.base_dir, [name for name in self._changed if name not in changed])
        )
        parameters = to_parameters(self.base_dir, changed | restored)
        with torch.no_grad():
            for name, tensor in parameters.items():
                self._parameters[name].copy_(tensor)
        packed_weights.pack(self.model, [self._parameters[name] for name in parameters])
        self._changed = list(changed)
        self._policy = version
        self.batch.forget()

    def release(self) -> None:
        """Free the cache; it is allocated again on use."""
        self.batch.release()

    def close(self) -> None:
        self.release()

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last forward pass; 0 if no request is in flight."""
        return time.monotonic() - self.batch.progressed if self._in_flight() else 0.0

    def _in_flight(self) -> int:
        return len(self.batch.active) + len(self._waiting) + len(self._arrived)

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response to a request. Raises StalePolicy, ContextOverflow, PromptRefused, EngineError, and
        SpecError for a form that cannot be enforced, and EngineBusy for one whose compilation waits for too long."""
        row = await self._sampled(request)
        answer = self._conversations.completion(request, row.prompt, row.sampled, row.logprobs, self.stop_ids)
        return replace(answer, likeliest=row.likeliest)

    async def complete(self, request: TextRequest) -> TextCompletion:
        """Return the completion of a prompt without a chat template; raises as `chat`."""
        row = await self._sampled(request)
        stopped = bool(row.sampled) and row.sampled[-1] in row.stop_ids
        text = str(self.tokenizer.decode(row.sampled[:-1] if stopped else row.sampled))
        before = text_before(text, request.stop)
        return TextCompletion(
            text=text if before is None else before,
            finish_reason="stop" if stopped or before is not None else "length",
            prompt_token_ids=row.prompt,
            token_ids=row.sampled,
            logprobs=row.logprobs,
            policy=request.policy,
            likeliest=row.likeliest,
            prompt_logprobs=row.prompt_logprobs,
            prompt_likeliest=row.prompt_likeliest,
            added_tokens=row.added_tokens,
        )

    async def _sampled(self, request: ChatRequest | TextRequest) -> Row:
        """Return the row of a request after its last token."""
        self._require_policy(request)
        loop = asyncio.get_running_loop()
        row = Row(request, loop.create_future(), random.Random(request.seed), stop_ids=self.stop_ids)
        if isinstance(request, ChatRequest) and request.start is not None:
            row.sampled, row.logprobs = list(request.start.token_ids), list(request.start.logprobs)
            for _ in row.sampled:  # the numbers that sampled them
                row.uniform.random()
        if request.stop:
            row.stop = StopDetector(request.stop, self.tokenizer.decode)
        row.alternatives = request.alternatives
        if isinstance(request, TextRequest):
            row.scores_prompt = request.scores_prompt
            row.stop_ids = self.stop_ids if request.stop_ids is None else request.stop_ids
            row.growing = GrowingText(self.tokenizer, request.stop) if request.listener else None
        if isinstance(request, ChatRequest) and request.form.constrained:
            row.matcher = await self._grammars.matcher(request.form, request.tools)
            self._require_policy(request)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        elif self._task.get_loop() is not loop:
            if not self._task.get_loop().is_closed():
                raise EngineError("the engine is in use by another event loop; give each its own engine")
            self._drop_requests()
            self._task = loop.create_task(self._run())
        if not self._in_flight():
            self.batch.progressed = time.monotonic()
        self._arrived.append(row)
        await row.future
        return row

    def _require_policy(self, request: ChatRequest | TextRequest) -> None:
        if request.policy != self._policy:
            raise StalePolicy(f"asked for policy {request.policy}, but the engine holds {self._policy}")

    # The loop

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._arrived or self._waiting or self.batch.active:
                async with self._turns.turn():
                    self._waiting += self._arrived
                    self._arrived = []
                    for row in await self._in_thread(loop):
                        if row.future.done():
                            continue
                        if row.error is not None:
                            row.future.set_exception(row.error)
                        else:
                            row.future.set_result(None)
                    self._report_increments()
                    for _ in range(4):  # let finished requests submit their next turn before the next pass
                        await asyncio.sleep(0)
        except Exception as error:
            logger.exception("generation failed")
            for row in [*self.batch.active, *self._waiting, *self._arrived]:
                if not row.future.done():
                    row.future.set_exception(EngineError(f"{type(error).__name__}: {error}"))
            self._drop_requests()
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            for row in [*self.batch.active, *self._waiting, *self._arrived]:
                row.future.cancel()
            self._drop_requests()
            raise

    def _report_increments(self) -> None:
        """Pass the new tokens of unfinished rows to their listeners. The last token comes with the response."""
        for row in self.batch.active:
            if row.growing is None or row.future.done():
                continue
            first = row.growing.tokens
            new = row.sampled[first:]
            try:
                text = row.growing.extend(new)
            except Exception:
                logger.exception("a response cannot be streamed; it is sent when it is complete")
                row.growing = None
                continue
            report(row, text, first)

    async def _in_thread(self, loop: asyncio.AbstractEventLoop) -> list[Row]:
        """Run one pass in a worker thread. On cancellation, stop the pass and wait for it, because it owns the engine's
        state until it ends."""
        running = loop.run_in_executor(None, self._pass)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.batch.stop.set()
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            self.batch.stop.clear()
            if running.exception() is None:  # else `PassInterrupted` or an error, which has no recipient
                for row in running.result():
                    row.future.cancel()
            raise

    def _drop_requests(self) -> None:
        self.batch.active, self._waiting, self._arrived = [], [], []
        self.release()

    @torch.inference_mode()
    def _pass(self) -> list[Row]:
        """Admit waiting rows, then sample one token for every active row. Return the rows that finished or failed."""
        self.batch.park_cancelled_rows()
        failed = self._tokenize()
        while admitted := self.batch.admit(self._uncancelled()):
            try:
                self.batch.prefill(admitted)
            except PassInterrupted:
                raise
            except Exception as error:
                logger.exception("%d prompts cannot be computed", len(admitted))
                for row in admitted:
                    self.batch.fail(row, EngineError(f"{type(error).__name__}: {error}"))
                failed += admitted
        return failed + self.batch.sample()

    def _uncancelled(self) -> list[Row]:
        """Return the queue of waiting rows, from which cancelled ones are removed."""
        self._waiting = [row for row in self._waiting if not row.future.done()]
        return self._waiting

    def _tokenize(self) -> list[Row]:
        """Tokenize the waiting prompts. Return the rows that failed, which are removed from the queue."""
        failed = []
        for row in self._waiting:
            if row.prompt or row.future.done():
                continue
            try:
                row.prompt, row.limit = self._prompt(row.request)
                if isinstance(row.request, TextRequest):
                    row.added_tokens = added_tokens(self.tokenizer, row.request.prompt, row.prompt)
                else:
                    self._read(row, row.request)
                row.change = LogitEditor.of(row.request.change, self._vocabulary)
            except (EngineError, SpecError) as error:
                row.error = error
            except Exception as error:
                logger.exception("a prompt cannot be tokenized")
                row.error = EngineError(f"{type(error).__name__}: {error}")
            if row.error is not None:
                failed.append(row)
        if failed:
            self._waiting = [row for row in self._waiting if row.error is None]
        return failed

    def _read(self, row: Row, request: ChatRequest) -> None:
        """Set what reads the response of a row while it grows. Raises SpecError for a limit of reasoning that the model
        lacks, and for a form where the prompt begins the reasoning."""
        chat = self.format.after(row.prompt)
        if request.listener:
            row.growing = growing_response(chat, request)
            if row.sampled:
                row.growing.extend(row.sampled)
        if row.matcher is not None:
            require_answer(chat, request.form)
        elif (most := request.sampling.max_thinking_tokens) is not None:
            row.reasoning = ReasoningLimit(chat, most)

    def _prompt(self, request: ChatRequest | TextRequest) -> tuple[list[int], int]:
        """Return the tokens of the prompt, and the maximum number of tokens to sample."""
        if isinstance(request, TextRequest):
            prompt = text_prompt(self.tokenizer, request.prompt, self._conversations.most_characters)
        else:
            prompt = self._conversations.prompt(request) if request.start is None else request.start.prompt_token_ids
        room = self.max_length - len(prompt)
        if room < min(request.sampling.max_tokens, 1):
            text = f"the prompt has {len(prompt)} tokens; prompt and answer have at most {self.max_length}"
            raisable = self.max_length < self._most_tokens
            raise ContextOverflow(text, f"; {'raise model.max_length or ' if raisable else ''}shorten the task")
        if not prompt:
            raise PromptRefused("the prompt has no tokens")
        if max(prompt) >= self._vocabulary:
            raise PromptRefused(
                f"the prompt contains token {max(prompt)}, and the model has {self._vocabulary}: a token that was "
                "added to the tokenizer only, or a wrong token id"
            )
        return prompt, min(request.sampling.max_tokens, room)


def report(row: Row, text: str, first: int) -> None:
    """Pass the tokens of a row from place `first` on to its listener. text: text that they made certain."""
    request, prompt = row.request, row.prompt
    tokens, logprobs, likeliest = row.sampled[first:], row.logprobs[first:], row.likeliest[first:]
    if isinstance(request, TextRequest):
        if request.listener is not None:
            increment = TextIncrement(
                text,
                tokens,
                logprobs,
                prompt,
                request.policy,
                likeliest,
                prompt_logprobs=row.prompt_logprobs,
                prompt_likeliest=row.prompt_likeliest,
                added_tokens=row.added_tokens,
            )
            request.listener(increment)
    elif request.listener is not None:
        calls, reasoning = (row.growing.calls, row.growing.reasoning) if row.growing else ((), "")
        request.listener(Increment(text, tokens, logprobs, prompt, request.policy, likeliest, calls, reasoning))
