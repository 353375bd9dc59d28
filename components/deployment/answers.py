"""Does an export answer like the policy? Both are given the same held-out prompts, and compared on the policy's words.

The policy answers greedily; the export, loaded by transformers as its users load it, then reads prompt and answer in
one pass. Its tokens of the prompt must be the same, and for each token of the answer its log-probability must be the
policy's, and no other token likelier, up to a tolerance: so a tie that falls the other way is no difference, and one
wrong token does not hide the rest. docs/deployment.md has the tolerances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from components.errors import EngineError
from components.inference.protocol import ChatCompletion, ChatRequest, Engine
from components.trajectories.chat import ChatFormat

TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 0.3}
"""Nats by which log-probabilities may differ, by the coarser type of the two."""


def answers_of(engine: Engine, requests: Sequence[ChatRequest]) -> list[ChatCompletion]:
    """What the policy says, one request at a time. requests: greedy, for the version that the engine holds."""

    async def ask() -> list[ChatCompletion]:
        return [await engine.chat(request) for request in requests]

    return asyncio.run(ask())


def check_answers(
    name: str,
    model: Any,
    tokenizer: Any,
    requests: Sequence[ChatRequest],
    answers: Sequence[ChatCompletion],
    tolerance: float,
) -> dict[str, float]:
    """name: of the export, for messages. model, tokenizer: as transformers loads them. answers: the policy's.

    Returns `prompts`, `tokens` and `max_logprob_difference` (nats). Raises EngineError at the first difference above
    `tolerance`, and where there is nothing to compare.
    """
    import torch

    if not requests:
        raise EngineError("no held-out prompt to compare the export on: the evaluation holds no episode with messages")
    chat = ChatFormat(tokenizer)
    count, widest = 0, 0.0
    for index, (request, want) in enumerate(zip(requests, answers, strict=True)):
        prompt = chat.prompt_ids(request.messages, request.tools)
        if prompt != want.prompt_token_ids:
            pairs = enumerate(zip(prompt, want.prompt_token_ids, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(want.prompt_token_ids)))
            raise EngineError(
                f"the {name} export reads held-out prompt {index} differently from the policy {want.policy}: token "
                f"{place} of {len(want.prompt_token_ids)}; its tokenizer or chat template is another"
            )
        tokens = torch.tensor([prompt + want.token_ids], device=model.device)
        with torch.inference_mode():
            logits_TV = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
        logprobs_TV = logits_TV.log_softmax(-1)
        chosen_T = logprobs_TV.gather(1, tokens[0, len(prompt) :, None]).squeeze(1)
        behind_T = logprobs_TV.max(-1).values - chosen_T
        apart_T = (chosen_T - torch.tensor(want.logprobs, device=model.device)).abs()
        # NaN is in no order: what is not below the tolerance is refused.
        if not bool(((apart_T <= tolerance) & (behind_T <= tolerance)).all()):
            place = int((~((apart_T <= tolerance) & (behind_T <= tolerance))).float().argmax())
            raise EngineError(
                f"the {name} export differs from the policy {want.policy} on held-out prompt {index}: token {place} of "
                f"the answer has log-probability {chosen_T[place]:.4f}, the policy says {want.logprobs[place]:.4f}; "
                f"the likeliest token is {behind_T[place]:.4f} likelier, and {tolerance:g} is allowed"
            )
        count += len(want.token_ids)
        widest = max(widest, float(apart_T.max()))
    return {"prompts": float(len(requests)), "tokens": float(count), "max_logprob_difference": widest}
