"""Losses compared with loops over plain numbers, and properties that hold for any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.algorithms.policy_gradient import losses

LOW, HIGH = 0.2, 0.3
LOGPROB = st.floats(-12, 0, width=32)
ODD = st.sampled_from([math.nan, -math.inf, math.inf, -1e30, -500.0, 0.0])
ADVANTAGE = st.floats(-4, 4, width=32)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, ADVANTAGE), min_size=1, max_size=12)


def ratio(logprob_S: torch.Tensor, old_S: torch.Tensor) -> torch.Tensor:
    return losses.ratio(losses.log_ratio(logprob_S, old_S))


def columns(rows) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]


@settings(deadline=None)
@given(TOKENS)
def test_the_clipped_loss_and_its_gradient_written_out(rows):
    logprob_S, old_S, advantage_S = columns(rows)
    logprob_S.requires_grad_()
    ratio_S = ratio(logprob_S, old_S)
    loss_S = losses.clipped_policy_loss(ratio_S, advantage_S, LOW, HIGH)
    loss_S.sum().backward()
    reported = losses.clipped(ratio_S, advantage_S, LOW, HIGH)
    for index, (logprob, old, advantage) in enumerate(rows):
        r = math.exp(logprob - old)
        inside = min(max(r, 1 - LOW), 1 + HIGH)
        assert loss_S[index].item() == pytest.approx(-min(r * advantage, inside * advantage), rel=1e-4, abs=1e-5)
        if min(abs(r - (1 - LOW)), abs(r - (1 + HIGH))) < 1e-4 or abs(advantage) < 1e-3:
            continue
        gone = (r > 1 + HIGH and advantage > 0) or (r < 1 - LOW and advantage < 0)
        assert bool(reported[index]) == gone
        expected = 0.0 if gone else -r * advantage
        assert logprob_S.grad[index].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@settings(deadline=None)
@given(st.lists(st.tuples(LOGPROB, LOGPROB | ODD, ADVANTAGE, LOGPROB | st.just(-500.0)), min_size=1, max_size=12))
def test_no_old_logprob_makes_loss_or_gradient_infinite(rows):
    logprob_S, old_S, advantage_S, reference_S = columns(rows)
    logprob_S.requires_grad_()
    ratio_S = ratio(logprob_S, old_S)
    loss_S = losses.clipped_policy_loss(ratio_S, advantage_S, LOW, HIGH) + losses.kl(logprob_S, reference_S, "k3")
    loss_S.sum().backward()
    assert bool(torch.isfinite(loss_S).all())
    assert bool(torch.isfinite(logprob_S.grad).all())


@pytest.mark.parametrize("old", [math.nan, math.inf, -math.inf])
def test_a_token_without_an_old_logprob_is_on_policy(old):
    logprob_S = torch.tensor([-2.0], requires_grad=True)
    ratio_S = ratio(logprob_S, torch.tensor([old]))
    losses.clipped_policy_loss(ratio_S, torch.tensor([1.5]), LOW, HIGH).sum().backward()
    assert ratio_S.item() == 1
    assert logprob_S.grad.item() == pytest.approx(-1.5)  # the gradient of REINFORCE: -A per nat


def test_nan_of_the_policy_itself_shows():
    ratio_S = ratio(torch.tensor([math.nan, math.nan]), torch.tensor([-1.0, math.nan]))
    assert bool(ratio_S.isnan().all())
    assert bool(losses.kl(torch.tensor([math.nan]), torch.tensor([-1.0]), "k3").isnan().all())


@settings(deadline=None)
@given(LOGPROB, LOGPROB)
def test_k3_written_out_and_never_negative(logprob, reference):
    value = losses.kl(torch.tensor([logprob]), torch.tensor([reference]), "k3").item()
    r = math.exp(reference - logprob)
    expected = r - math.log(r) - 1
    assert value == pytest.approx(min(expected, losses.KL_LIMIT) if r > 1 else expected, rel=1e-4, abs=1e-5)
    assert value > -1e-6  # rounding where the two are equal


# --- variants of GRPO -------------------------------------------------------------------------------------------------


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage():
    ratio_S = torch.tensor([0.5, 1.0, 5.0, 5.0])
    advantage_S = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    plain = losses.clipped_policy_loss(ratio_S, advantage_S, LOW, HIGH)
    assert plain.tolist() == pytest.approx([0.8, 1.0, 5.0, -1.3])
    assert losses.clipped_policy_loss(ratio_S, advantage_S, LOW, HIGH, 3.0).tolist() == pytest.approx(
        [0.8, 1.0, 3.0, -1.3]
    )


def test_ratios_of_sequences():
    log_ratio_S = torch.tensor([0.1, 0.5, -0.3, 0.2])
    sequence_S = torch.tensor([0, 0, 2, 2])
    assert losses.by_sequence(log_ratio_S, sequence_S, "token").tolist() == log_ratio_S.tolist()
    assert losses.by_sequence(log_ratio_S, sequence_S, "sequence").tolist() == pytest.approx([0.6, 0.6, -0.1, -0.1])
    assert losses.by_sequence(log_ratio_S, sequence_S, "sequence_mean").tolist() == pytest.approx(
        [0.3, 0.3, -0.05, -0.05]
    )
    for level in ("token", "sequence", "sequence_mean"):
        assert losses.by_sequence(torch.zeros(0), torch.zeros(0, dtype=torch.long), level).tolist() == []


@pytest.mark.parametrize("level", ["sequence", "sequence_mean"])
def test_each_token_of_a_sequence_ratio_keeps_its_own_advantage(level):
    """GSPO-token: the gradient of s A_t with respect to log pi_t is s A_t, for a product times the tokens of the
    episode. If a sequence has one advantage, it equals the gradient of the plain ratio."""
    log_ratio_S = torch.tensor([0.2, 0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    sequence_S, tokens_S = torch.tensor([0, 0, 0, 1]), torch.tensor([3.0, 3.0, 3.0, 1.0], dtype=torch.float64)
    advantage_S = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64)

    def gradient(advantage_S: torch.Tensor, *, token: bool) -> torch.Tensor:
        if token:
            compared_S = losses.sequence_log_ratio(log_ratio_S, sequence_S, tokens_S, level)
        else:
            compared_S = losses.by_sequence(log_ratio_S, sequence_S, level)
        return torch.autograd.grad((losses.ratio(compared_S) * advantage_S).sum(), log_ratio_S)[0]

    sum_ = 0.2 + 0.4 - 0.3
    ratio = math.exp(sum_) if level == "sequence" else math.exp(sum_ / 3)
    times = 3 if level == "sequence" else 1
    expected = [times * ratio * 1.0, times * ratio * -2.0, times * ratio * 0.5, math.exp(0.1) * 4.0]
    assert gradient(advantage_S, token=True).tolist() == pytest.approx(expected)
    same_S = torch.tensor([1.5, 1.5, 1.5, -1.0], dtype=torch.float64)
    assert gradient(same_S, token=True).tolist() == pytest.approx(gradient(same_S, token=False).tolist())
    assert gradient(advantage_S, token=False).tolist() != pytest.approx(expected)


@settings(deadline=None)
@given(st.lists(st.lists(LOGPROB, max_size=6), max_size=5), st.integers(0, 2))
def test_sums_of_segments_written_out(rows, width):
    """Sums of numbers and of rows; segments may be empty. In float32 the sum of many numbers is as accurate as adding
    them one by one, and the gradient of a sum is that of each of its terms."""
    size_Q = torch.tensor([len(row) for row in rows], dtype=torch.long)
    flat = [value for row in rows for value in row]
    value_S = torch.tensor([[value] * width if width else value for value in flat]).reshape(-1, *[width][: width > 0])
    value_S.requires_grad_()
    sum_Q = losses.segment_sums(value_S, size_Q)
    assert sum_Q.shape == (len(rows), *value_S.shape[1:])
    weight_Q = torch.arange(1.0, sum_Q.numel() + 1).reshape(sum_Q.shape)
    (sum_Q * weight_Q).sum().backward()
    for position, row in enumerate(rows):
        assert sum_Q[position].tolist() == pytest.approx(
            ([math.fsum(row)] * width) if width else math.fsum(row), abs=1e-4
        )
    assert torch.equal(value_S.grad, weight_Q.repeat_interleave(size_Q, 0))


@settings(deadline=None)
@given(TOKENS)
def test_the_gradient_of_cispo_is_that_of_reinforce_weighted_by_the_clipped_ratio(rows):
    logprob_S, old_S, advantage_S = columns(rows)
    logprob_S.requires_grad_()
    losses.cispo_loss(ratio(logprob_S, old_S), logprob_S, advantage_S, LOW, HIGH).sum().backward()
    weights = [min(max(math.exp(logprob - old), 1 - LOW), 1 + HIGH) for logprob, old, _ in rows]
    expected = [-weight * advantage for weight, (_, _, advantage) in zip(weights, rows, strict=True)]
    assert logprob_S.grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_corrections_for_another_engine():
    away_S = torch.tensor([0.0, math.log(1.9), math.log(3.0), math.log(0.4)])
    assert losses.correction(away_S, 2.0, "truncate").tolist() == pytest.approx([1.0, 1.9, 2.0, 0.4])
    assert losses.correction(away_S, 2.0, "mask").tolist() == pytest.approx([1.0, 1.9, 0.0, 0.0])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_mean_of_the_unbiased_estimators_is_the_kl(seed, estimator):
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, 20, generator=generator).mul(0.7).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum().item()
    mean = (policy.exp() * losses.kl(policy, reference, estimator)).sum().item()
    assert mean == pytest.approx(exact, rel=1e-5)


def test_on_policy_k2_has_the_gradient_of_trls_corrected_k3():
    """TRL 1.16 multiplies k3 by the importance ratio (`use_bias_correction_kl`; DeepSeek-V3.2, arXiv:2512.02556). At
    the first gradient step of a round, where the ratio is 1, the gradient of each token is that of k2."""
    generator = torch.Generator().manual_seed(4)
    logprob_S, reference_S = -torch.rand(2, 50, dtype=torch.float64, generator=generator) * 2
    logprob_S.requires_grad_()
    ratio_S = torch.exp(logprob_S - logprob_S.detach())
    corrected = (losses.kl(logprob_S, reference_S, "k3") * ratio_S).sum()
    [expected_S] = torch.autograd.grad(corrected, logprob_S)
    [actual_S] = torch.autograd.grad(losses.kl(logprob_S, reference_S, "k2").sum(), logprob_S)
    assert torch.allclose(actual_S, expected_S, atol=1e-12)


def test_the_mean_gradient_of_k2_is_that_of_the_kl():
    """On policy: E[∇k2] = ∇KL, whereas the mean gradient of k1 as a loss is 0."""
    generator = torch.Generator().manual_seed(3)
    logits_V, reference_V = torch.randn(2, 20, dtype=torch.float64, generator=generator)
    logits_V.requires_grad_()
    reference_V = reference_V.log_softmax(-1)
    policy_V = logits_V.log_softmax(-1)
    exact = torch.autograd.grad((policy_V.exp() * (policy_V - reference_V)).sum(), logits_V)[0]
    for estimator, expected in (("k2", exact), ("k1", torch.zeros_like(exact))):
        policy_V = logits_V.log_softmax(-1)
        weighted = (policy_V.detach().exp() * losses.kl(policy_V, reference_V, estimator)).sum()
        assert torch.allclose(torch.autograd.grad(weighted, logits_V)[0], expected, atol=1e-12)
