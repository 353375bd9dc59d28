"""Samples for clients, from the base and from saved states of models, with one embedded engine.

The engine holds one state at a time. Requests for the state that it holds are batched; those for another one wait until
the requests in flight have ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from components.errors import SpecError
from components.inference.protocol import (
    BASE_POLICY,
    Sampling,
    TextCompletion,
    TextRequest,
    TokenLogprobs,
    gather_completions,
)
from components.inference.transformers.engine import TransformersEngine
from flows.train_service.bodies import Sample
from flows.train_service.messages import LENGTH, STOP, message

NO_LOGPROB = -99999.0
"""Log-probability that marks an empty place of a table of likely tokens."""


class Sampler:
    """Samples with an engine, on one event loop."""

    def __init__(self, engine: TransformersEngine):
        self._engine = engine
        self._running = 0
        self._turn, self._idle = asyncio.Lock(), asyncio.Event()
        self._idle.set()

    async def sample(self, request_id: str, asked: Sample, state: Path | None) -> bytes:
        """Return the response to a request, as a message. state: folder of a saved state; None for the base. Raises
        SpecError, and the errors of the engine."""
        tokens = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
        last = asked.prompt_logprobs_last_n
        if last is not None and not (asked.prompt_logprobs and last < len(tokens)):
            text = f"{last}; expected less than the {len(tokens)} tokens of the prompt, with prompt_logprobs"
            raise SpecError.at("prompt_logprobs_last_n", text)
        async with self._holding(state):
            requests = self._requests(request_id, asked, tokens)
            return _response(asked, await gather_completions(self._engine.complete, requests))

    @asynccontextmanager
    async def _holding(self, state: Path | None) -> AsyncIterator[None]:
        """Let the engine hold a state within the block. Blocks of one state run at once; a block of another one, and
        those after it, wait for their end."""
        version, folder = (BASE_POLICY, None) if state is None else (state.name, str(state / "adapter"))
        async with self._turn:
            if version != self._engine.policy:
                await self._idle.wait()
                await asyncio.to_thread(self._engine.load_policy, version, folder)
            self._running += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _requests(self, request_id: str, asked: Sample, tokens: list[int]) -> list[TextRequest]:
        params = asked.sampling_params
        seed = params.seed
        if seed is None:  # of the request: asked again, it has the same samples
            seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4])
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        strings = tuple(entry for entry in stop or () if isinstance(entry, str))
        ids = None if stop is None or strings else frozenset(entry for entry in stop if isinstance(entry, int))
        scored = bool(asked.prompt_logprobs) or asked.topk_prompt_logprobs > 0
        most = params.max_tokens or max(self._engine.max_length - len(tokens), 1)
        sampling = Sampling(params.temperature, params.top_p, max(params.top_k, 0), most)
        widest = max(asked.topk_sample_logprobs, asked.topk_prompt_logprobs) or None
        first = TextRequest(
            tokens, self._engine.policy, sampling, seed, strings,
            alternatives=widest, scores_prompt=scored, stop_ids=ids,
        )  # fmt: skip
        return [
            replace(first, seed=seed + index, scores_prompt=scored and not index) for index in range(asked.num_samples)
        ]


def _response(asked: Sample, completions: list[TextCompletion]) -> bytes:
    first = completions[0]
    response = message("SampleResponse")
    for completion in completions:
        sequence = response.sequences.add(
            stop_reason=STOP if completion.finish_reason == "stop" else LENGTH,
            tokens=np.asarray(completion.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
        if asked.topk_sample_logprobs:
            _fill(sequence.topk_sampled_logprobs, completion.likeliest, asked.topk_sample_logprobs, 0)
    skipped = len(first.prompt_token_ids) - (asked.prompt_logprobs_last_n or len(first.prompt_token_ids) - 1)
    if asked.prompt_logprobs:
        scores = np.array([math.nan, *first.prompt_logprobs], np.float32)
        scores[:skipped] = math.nan
        response.prompt_logprobs = scores.tobytes()
    if asked.topk_prompt_logprobs:
        _fill(response.topk_prompt_logprobs, [[], *first.prompt_likeliest], asked.topk_prompt_logprobs, skipped)
    encoded: bytes = response.SerializeToString()
    return encoded


def _fill(target: object, rows: list[TokenLogprobs], width: int, skipped: int) -> None:
    """Write the `width` most likely tokens of each row into a message; rows before `skipped` have none."""
    ids, logprobs = np.zeros((len(rows), width), np.int32), np.full((len(rows), width), NO_LOGPROB, np.float32)
    for index, row in enumerate(rows):
        for place, (token, logprob) in enumerate(row[:width] if index >= skipped else ()):
            ids[index, place], logprobs[index, place] = token, logprob
    target.token_ids, target.logprobs = ids.tobytes(), logprobs.tobytes()  # type: ignore[attr-defined]
    target.k, target.length = width, len(rows)  # type: ignore[attr-defined]
