"""Log-probabilities and their gradient from one function of head and hidden states, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components.algorithms.policy import head_logprobs
from components.algorithms.policy.logits import LogitHead, identity
from components.algorithms.policy.packing import TokenSequence, pack
from components.models.distribution import Cut

ROWS, HIDDEN, VOCABULARY, TEMPERATURE = 4, 16, 300, 0.7
SEQUENCES = [
    TokenSequence(tokens, list(range(2, len(tokens))))
    # A shared sampled token, another one from the same node, and rows of their own.
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 8, 7], [1, 2, 5, 6, 7, 8], [4, 2, 5, 6, 7, 8, 9])
]
(PACK,) = pack(SEQUENCES, 100)


class Products(TorchDispatchMode):
    """Context that counts the products of the size of the head."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += any(VOCABULARY in one.shape for one in args if isinstance(one, torch.Tensor))
        return func(*args, **(kwargs or {}))


def head_of(dtype: torch.dtype, bias: bool = False) -> LogitHead:
    linear = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    torch.nn.init.normal_(linear.weight)
    return LogitHead(linear.to(dtype).requires_grad_(False), identity)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_those_of_float64(dtype, tolerance, bias):
    torch.manual_seed(0)
    head = head_of(dtype, bias)
    assert len(PACK.row_S) > len(PACK.row_P) > len(PACK.predicting_U) > 2 * ROWS
    hidden_UD = torch.randn(len(PACK.predicting_U), HIDDEN) * 0.7
    hidden_UD[PACK.row_P[::3]] = head.linear.weight[PACK.token_P[::3]].float() * 0.8  # these tokens are almost certain
    hidden_UD = hidden_UD.to(dtype).requires_grad_()
    grad_P = torch.randn(len(PACK.row_P))
    with Products() as products:
        logprob_P, entropy_U = head_logprobs.logprobs(hidden_UD, head, PACK, TEMPERATURE, ROWS)
        (logprob_P * grad_P).sum().backward()
    assert products.count == 2 * -(-len(hidden_UD) // ROWS)  # logits and gradient, each once
    assert not entropy_U.requires_grad

    exact_UD = hidden_UD.detach().double().requires_grad_()
    with torch.no_grad():
        # Logits are rounded to the dtype of the head: the function is exact for these.
        rounded_UV = head(hidden_UD).double()
    logits_UV = torch.nn.functional.linear(exact_UD, head.linear.weight.double())
    logits_UV = logits_UV + (rounded_UV - logits_UV).detach()
    logps_UV = (logits_UV / TEMPERATURE).log_softmax(-1)
    expected_P = logps_UV[PACK.row_P, PACK.token_P]
    (expected_P * grad_P).sum().backward()
    torch.testing.assert_close(logprob_P.double(), expected_P, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_U.double(), -(logps_UV.exp() * logps_UV).sum(-1), atol=1e-5, rtol=1e-5)
    assert expected_P.max() > -0.05
    for gradient_D, exact_D in zip(hidden_UD.grad.double(), exact_UD.grad, strict=True):
        assert (gradient_D - exact_D).norm() <= tolerance * exact_D.norm() + 1e-6


def test_without_gradient_only_the_logits_are_computed():
    head, hidden_UD = head_of(torch.float32), torch.randn(len(PACK.predicting_U), HIDDEN)
    with Products() as products:
        head_logprobs.logprobs(hidden_UD, head, PACK, 1.0, 100)
    assert products.count == 1


def test_other_heads_and_truncated_distributions_are_left_to_autograd():
    plain = head_of(torch.float32)
    trained = head_of(torch.float32)
    trained.linear.requires_grad_()
    assert head_logprobs.applies(plain, Cut(0.7))
    for head, cut in (
        (plain, Cut(top_p=0.9)),
        (trained, Cut()),
        (head_of(torch.float16), Cut()),
        (LogitHead(plain.linear, torch.tanh), Cut()),
        (LogitHead(torch.nn.Sequential(plain.linear), identity), Cut()),
        (identity, Cut()),
    ):
        assert not head_logprobs.applies(head, cut)
