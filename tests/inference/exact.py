"""What an answer must be, computed without the engine: one full forward pass of one sequence."""

from __future__ import annotations

import torch

from components.inference.protocol import ChatCompletion, ChatRequest, Sampling

TOLERANCE = 1e-4


def ask(text: str, *, seed: int = 0, policy: str = "base", tools=(), **sampling) -> ChatRequest:
    return ChatRequest(
        [{"role": "user", "content": text}], list(tools), policy, Sampling(**{"max_tokens": 12, **sampling}), seed
    )


def go_on(request: ChatRequest, completion: ChatCompletion, text: str, *, seed: int = 0) -> ChatRequest:
    """The request of the next turn."""
    messages = [*request.messages, completion.message, {"role": "user", "content": text}]
    return ChatRequest(messages, request.tools, request.policy, request.sampling, seed)


def logits(model, completion: ChatCompletion) -> torch.Tensor:
    """(T, V) logits from which the sampled tokens were drawn, by a forward pass over the whole sequence."""
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, len(completion.prompt_token_ids) - 1 : -1].float()


def assert_exact(model, completion: ChatCompletion, temperature: float = 1.0) -> None:
    """The log-probs are those of the full forward pass under softmax(logits / temperature)."""
    expected = torch.log_softmax(logits(model, completion) / temperature, -1)
    expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert len(completion.logprobs) == len(completion.token_ids) > 0
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=0)
