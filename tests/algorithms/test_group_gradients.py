"""Gradients of groups: the loss written out, finite differences, and the sum over all groups."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from components.algorithms.policy_gradient import spec as specs
from components.algorithms.policy_gradient.group_gradients import PolicyGradients, cosine, dot
from components.algorithms.policy_gradient.losses import log_ratio
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.spec import CostSpec
from components.errors import SpecError
from tests.algorithms.builders import MODEL, TEMPERATURE, make_context
from tests.algorithms.gradients import relative_error

HISTORIES = "three histories"


def gradients(bench, spec, trajectories=None, **options):
    bench.set(bench.start)
    trajectories = bench.batches[HISTORIES].trajectories if trajectories is None else trajectories
    options |= {"scratch": bench.scratch()}
    return spec.group_gradients(make_context(bench.policy, None, trajectories, **options))


def in_order(bench, flat):
    """Return a gradient with the parameters sorted by name, as the formulas have them."""
    parameters = bench.policy.parameters
    parts = flat.split([parameter.numel() for parameter in parameters.values()])
    return torch.cat([part for _, part in sorted(zip(parameters, parts, strict=True))])


def written_out(batch, group):
    """Return the share of a group in the loss of Dr. GRPO with a mean over tokens: -min(r A, clip(r) A) / N, with A the
    reward minus the mean of its group."""
    rewards = {name: [] for name in ("s0", "s1", "s2")}
    for episode in batch.episodes:
        rewards[episode.group].append(episode.reward)
    total = sum(episode.tokens for episode in batch.episodes)

    def loss(columns):
        terms = []
        for episode, logprob_S, sampler_S in zip(
            batch.episodes, batch.split(columns["logprob"]), batch.sampler, strict=True
        ):
            if episode.group == group:
                advantage = episode.reward - statistics.mean(rewards[group])
                ratio_S = torch.exp(logprob_S - sampler_S)
                terms.append(-torch.minimum(ratio_S * advantage, ratio_S.clamp(0.8, 1.28) * advantage).sum() / total)
        return sum(terms)

    return loss


def test_the_gradient_of_a_group_is_that_of_the_loss_written_out(bench):
    spec = specs.GRPOSpec(scale="none", dual_clip=None)
    batch = bench.batches[HISTORIES]
    computed = gradients(bench, spec)
    assert list(computed.groups) == ["s0", "s1", "s2"]
    for name in computed.groups:
        gradient = computed.group(name)
        assert gradient.dtype == torch.float32
        assert gradient.shape == (computed.parameters,)
        expected = batch.steps[0].gradient(written_out(batch, name))
        assert relative_error(in_order(bench, gradient).double(), expected) < 1e-4


@pytest.mark.parametrize("direction", [0, 1])
def test_the_gradient_of_a_group_predicts_the_change_of_its_loss(bench, direction):
    """Central differences of the trainer's loss along a random direction."""
    spec = specs.CISPOSpec(kl_coefficient=0.0, normalization="sequences")
    trajectories = bench.batches[HISTORIES].trajectories
    computed = gradients(bench, spec)
    step = 2e-3
    generator = torch.Generator().manual_seed(direction)
    towards = {
        name: torch.randn(parameter.shape, generator=generator) for name, parameter in bench.policy.parameters.items()
    }
    slope = dot(computed.group("s1"), torch.cat([tensor.reshape(-1) for tensor in towards.values()]))

    def objective(sign):
        """Return the CISPO objective of the group at shifted parameters, with the weights of the start."""
        bench.set({name: tensor + sign * step * towards[name] for name, tensor in bench.start.items()})
        group = [trajectory for trajectory in trajectories if trajectory.group == "s1"]
        learning = computed._learning
        total = 0.0
        for cut, planned in learning.packs(group, trajectories):
            packed = planned.lay_out()
            with torch.no_grad():
                logprob_S, _ = bench.policy.logprobs(packed, cut)
                bench.set(bench.start)
                start_S, _ = bench.policy.logprobs(packed, cut)
            weight_S = torch.exp(log_ratio(start_S, packed.logprob_S)).clamp(0, 5)
            total += float((-weight_S * packed.advantage_S * logprob_S * packed.weight_S).double().sum())
        return total

    difference = (objective(1) - objective(-1)) / (2 * step)
    bench.set(bench.start)
    assert slope == pytest.approx(difference, rel=0.02, abs=2e-4)


@pytest.mark.parametrize(
    "spec",
    [
        specs.GRPOSpec(entropy_coefficient=0.01, kl_coefficient=0.1),
        specs.DrGRPOSpec(),
        specs.GSPOSpec(),
        specs.RLOOSpec(),
        specs.ReinforcePPSpec(),
        specs.GRPOSpec(credit="turns", pack_tokens=64),
    ],
    ids=lambda spec: f"{spec.name} {spec.credit}",
)
def test_the_gradients_of_all_groups_sum_to_that_of_the_batch(bench, spec):
    computed = gradients(bench, spec)
    assert len(computed.groups) == 3
    total = sum(computed.group(name) for name in computed.groups)
    assert relative_error(total.double(), computed.batch().double()) < 1e-5


def test_the_gradient_of_the_batch_is_that_of_the_trainers_first_step(bench):
    """The trainer's optimizer sees the same gradient, unless it is clipped."""
    spec = specs.GRPOSpec(max_grad_norm=1e9, max_kl=1e9, measure_kl=False)
    batch = gradients(bench, spec).batch()
    seen = []

    class Records(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(torch.cat([parameter.grad.reshape(-1) for parameter in bench.policy.parameters.values()]))

    optimizer = Records(bench.policy.parameters.values(), lr=0.0)
    context = make_context(bench.policy, optimizer, bench.batches[HISTORIES].trajectories, scratch=bench.scratch())
    spec.build(context).train()
    assert relative_error(batch.double(), seen[0].double()) < 1e-6


def test_the_gradient_of_a_likelihood_is_that_of_the_sum_of_log_probabilities(bench):
    batch = bench.batches[HISTORIES]
    computed = gradients(bench, specs.GSPOSpec(entropy_coefficient=0.1))
    first = batch.episodes[0].tokens
    expected = batch.steps[0].gradient(lambda columns: -columns["logprob"][:first].sum())
    gradient = in_order(bench, computed.likelihood(batch.trajectories[0], TEMPERATURE))
    assert relative_error(gradient.double(), expected) < 1e-4
    plain = batch.plain_steps[0].gradient(lambda columns: -columns["logprob"][:first].sum())
    gradient = in_order(bench, computed.likelihood(batch.trajectories[0], 1.0))
    assert relative_error(gradient.double(), plain) < 1e-4


def test_costs_change_the_gradient_as_they_change_the_rewards(bench):
    batch = bench.batches[HISTORIES].trajectories
    costly = [replace(item, metrics={"cost": float(index % 3)}) for index, item in enumerate(batch)]
    costs = {"cost": CostSpec(limit=0.0, learning_rate=1.0)}
    spec = specs.GRPOSpec(scale="none", costs=costs, cost_scaling=False)
    penalised = [replace(item, reward=item.reward - 1.0 * item.metrics["cost"]) for item in costly]
    computed = gradients(bench, spec, costly)
    expected = gradients(bench, specs.GRPOSpec(scale="none"), penalised)
    assert relative_error(computed.batch().double(), expected.batch().double()) < 1e-6


def test_groups_without_spread_have_no_gradient(bench):
    equal = [replace(item, reward=1.0) for item in bench.batches[HISTORIES].trajectories]
    computed = gradients(bench, specs.GRPOSpec(), equal)
    assert isinstance(computed, PolicyGradients)
    assert computed.groups == {}
    assert not computed.batch().any()
    assert cosine(computed.batch(), torch.ones(computed.parameters)) is None


def test_products_are_computed_in_float64():
    left = torch.tensor([1e8, 1.0, -1e8])
    right = torch.ones(3)
    assert dot(left, right) == 1.0
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5, abs=1e-12)


def test_with_full_finetuning_the_gradient_is_over_all_weights(bench):
    from components.algorithms.policy.policy import Policy

    policy = Policy(bench.base_dir, MODEL.model_copy(update={"lora": None}), 0)
    trajectories = bench.batches[HISTORIES].trajectories
    spec = specs.GRPOSpec()
    computed = spec.group_gradients(make_context(policy, None, trajectories, scratch=bench.scratch()))
    assert computed.parameters == sum(parameter.numel() for parameter in policy.parameters.values())
    assert computed.parameters > sum(parameter.numel() for parameter in bench.policy.parameters.values())
    total = sum(computed.group(name) for name in computed.groups)
    assert relative_error(total.double(), computed.batch().double()) < 1e-5


def test_log_likelihoods_are_sums_of_log_probabilities(bench):
    batch = bench.batches[HISTORIES]
    computed = gradients(bench, specs.GRPOSpec())
    expected = [float(part.sum()) for part in batch.old]
    assert computed.log_likelihoods(batch.trajectories, TEMPERATURE) == pytest.approx(expected, abs=1e-3)


def test_an_algorithm_without_group_gradients_refuses():
    with pytest.raises(SpecError, match="algorithm: sft has no policy gradient of a group"):
        SFTSpec().group_gradients(None)
