"""Comparison of an export's answers with the policy's, on the same held-out prompts.

The policy answers greedily. The export, loaded by transformers as its users load it, then reads prompt and answer in
one pass. Its prompt tokens must be equal. For each token of the answer its log-probability must equal the policy's, and
no other token may be likelier, up to a tolerance. So a tie that is decided differently is no difference, and one wrong
token does not hide the following ones. docs/guides/deployment.md lists the tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components import aio
from components.errors import EngineError
from components.inference.protocol import ChatCompletion, ChatRequest, Engine
from components.trajectories.chat import ChatFormat

TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 0.3}
"""Tolerance of log-probabilities in nats, by the less precise of the two types."""


def answers_of(engine: Engine, requests: Sequence[ChatRequest]) -> list[ChatCompletion]:
    """Return the policy's answers, one request at a time. requests: greedy, for the engine's current version."""

    async def ask() -> list[ChatCompletion]:
        return [await engine.chat(request) for request in requests]

    return aio.run(ask())


def check_answers(
    name: str,
    model: Any,
    tokenizer: Any,
    requests: Sequence[ChatRequest],
    answers: Sequence[ChatCompletion],
    tolerance: float,
) -> dict[str, float]:
    """Compare an export's log-probabilities with the policy's answers.

    name: name of the export, for messages. model, tokenizer: as loaded by transformers. answers: the policy's.
    Returns `prompts`, `tokens` and `max_logprob_difference` (nats). Raises EngineError at the first difference above
    `tolerance`, and if there is nothing to compare.
    """
    import torch

    if not requests:
        raise EngineError("no held-out prompt to compare the export on: the evaluation has no episode with messages")
    chat = ChatFormat(tokenizer)
    count, max_difference = 0, 0.0
    for index, (request, expected) in enumerate(zip(requests, answers, strict=True)):
        prompt = chat.prompt_ids(request.messages, request.tools)
        if prompt != expected.prompt_token_ids:
            pairs = enumerate(zip(prompt, expected.prompt_token_ids, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(expected.prompt_token_ids)))
            raise EngineError(
                f"the {name} export tokenizes held-out prompt {index} differently from the policy {expected.policy}: "
                f"token {position} of {len(expected.prompt_token_ids)}; its tokenizer or chat template differs"
            )
        tokens = torch.tensor([prompt + expected.token_ids], device=model.device)
        with torch.inference_mode():
            logits_TV = model(input_ids=tokens, logits_to_keep=len(expected.token_ids) + 1).logits[0, :-1].float()
        logprobs_TV = logits_TV.log_softmax(-1)
        chosen_T = logprobs_TV.gather(1, tokens[0, len(prompt) :, None]).squeeze(1)
        gap_T = logprobs_TV.max(-1).values - chosen_T
        difference_T = (chosen_T - torch.tensor(expected.logprobs, device=model.device)).abs()
        # NaN compares as False, so it is rejected.
        if not bool(((difference_T <= tolerance) & (gap_T <= tolerance)).all()):
            position = int((~((difference_T <= tolerance) & (gap_T <= tolerance))).float().argmax())
            raise EngineError(
                f"the {name} export differs from the policy {expected.policy} on held-out prompt {index}: token "
                f"{position} of the answer has log-probability {chosen_T[position]:.4f}, the policy's is "
                f"{expected.logprobs[position]:.4f}; the likeliest token is {gap_T[position]:.4f} likelier; "
                f"expected a difference of at most {tolerance:g} for both"
            )
        count += len(expected.token_ids)
        max_difference = max(max_difference, float(difference_T.max()))
    return {"prompts": float(len(requests)), "tokens": float(count), "max_logprob_difference": max_difference}
