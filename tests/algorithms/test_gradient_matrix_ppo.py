"""Gradients of PPO, including its critic's, equal those of the formula in float64 (`papers_of_ppo`). Every pair of
settings is tested; `make test-slow` tests all combinations. See `test_gradient_matrix`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from components.algorithms.ppo.critic import ADAPTER, ValueCritic
from components.algorithms.ppo.spec import PPOSpec
from components.algorithms.ppo.trainer import train_ppo
from tests.algorithms.builders import make_context
from tests.algorithms.combinations import covering, options
from tests.algorithms.gradients import (
    HISTORIES,
    TEMPERATURE,
    UNGUARDED,
    Adapter,
    Batch,
    Bench,
    Columns,
    Reading,
    Replaces,
    flat,
    learned,
    logprobs_and_entropies,
    moved,
    reading,
    relative_error,
    sampled_places,
)
from tests.algorithms.papers_of_ppo import ppo
from tests.algorithms.test_gradient_matrix import TOLERANCE, cases

FREE = {name: value for name, value in UNGUARDED.items() if name != "measure_kl"} | {
    "value_pretraining_steps": 0,  # its steps are compared in `test_ppo`
    "gae_lambda": 0.95,
    "value_gae_lambda": 0.9,
}
KINDS = ("head", "model")
COMBINATIONS = list(product(options("credit", PPOSpec), options("ratio"), options("kl_estimator")))
VARIATIONS: dict[str, dict[str, Any]] = {
    "no KL": {"kl_coefficient": 0.0, "kl_target": None},
    "discounted": {"discount": 0.9},
    "lambda 0": {"gae_lambda": 0.0, "value_gae_lambda": 0.0},
    "lambda 1": {"gae_lambda": 1.0, "value_gae_lambda": 1.0},
    "returns not normalised": {"value_norm_decay": None},
    "not whitened": {"whiten": False},
    "no value clip": {"value_clip": None},
    "value coefficient": {"value_coefficient": 2.0},
    "mean over sequences": {"normalization": "sequences"},
    "constant length": {"normalization": "constant", "constant_length": 20},
    "entropy": {"entropy_coefficient": 0.05},
    "cispo": {"objective": "cispo", "clip_low": 0.3, "clip_high": 0.5},
    "no dual clip": {"dual_clip": None},
    "overlong": {"overlong": 9, "overlong_buffer": 4, "overlong_penalty": 0.5},
    "cut-off episodes left out": {"mask_truncated": True},
    "truncate by token": {"correction": "truncate", "correction_limit": 1.3},
    "mask by sequence": {"correction": "mask", "correction_level": "sequence", "correction_limit": 3.0},
}
VARIED = {"head": {"credit": "episode", "ratio": "token"}, "model": {"credit": "turns", "ratio": "sequence"}}
"""Base settings that the variations are combined with."""


def combined(kind: str, credit: str, ratio: str, estimator: str) -> PPOSpec:
    return PPOSpec(**FREE, value=kind, credit=credit, ratio=ratio, kl_estimator=estimator, kl_coefficient=0.1)


def varied(kind: str, variation: str) -> PPOSpec:
    return PPOSpec(**FREE | {"value": kind} | VARIED[kind] | VARIATIONS[variation])


class CriticBench:
    """Critics of one kind, before the first step and after it."""

    def __init__(self, bench: Bench, kind: str):
        self.bench, self.kind = bench, kind
        bench.set(bench.start)
        critic = ValueCritic(bench.policy, PPOSpec(value=kind))
        generator = torch.Generator().manual_seed(7)
        fresh = {name: parameter.detach().clone() for name, parameter in critic.parameters.items()}
        start = moved(fresh, 0.05, generator)
        self.start = bench.start | start
        self.after = bench.after | moved(start, 0.02, generator)
        self._steps: dict[str, list[Reading]] = {}

    def steps(self, histories: str) -> list[Reading]:
        if histories not in self._steps:
            batch = self.bench.batches[histories]
            self._steps[histories] = [self._reading(batch, parameters) for parameters in (self.start, self.after)]
        return self._steps[histories]

    def _reading(self, batch: Batch, tensors: Adapter) -> Reading:
        parameters = learned(tensors)
        policy = {name: tensor for name, tensor in parameters.items() if ".default." in name}
        values = policy
        if self.kind == "model":
            name_of = f".{ADAPTER}."
            values = {n.replace(name_of, ".default."): tensor for n, tensor in parameters.items() if name_of in n}

        def columns() -> Iterator[Columns]:
            for token_ids, positions in sampled_places(batch.trajectories):
                hidden_TD = self.bench.model.hidden(token_ids, values)
                value_T = hidden_TD @ parameters["critic.weight"] + parameters["critic.bias"]
                # The value comes first, because its graph is freed with the last of the columns that share it.
                yield {
                    "value": value_T[[position - 1 for position in positions]],
                    **logprobs_and_entropies(self.bench.model, policy, token_ids, positions, TEMPERATURE),
                }

        return reading(parameters, columns())


def errors(critics: CriticBench, spec: PPOSpec, histories: str) -> list[float]:
    """Return the errors of the trainer's loss and of its gradients, of the policy and of the critic each, in each of
    its two steps."""
    bench, batch = critics.bench, critics.bench.batches[histories]
    bench.set(bench.start)
    critic = ValueCritic(bench.policy, spec)
    with torch.no_grad():
        for name, parameter in critic.parameters.items():
            parameter.copy_(critics.start[name])
    optimizer = Replaces([bench.policy.parameters, critic.parameters], critics.after)
    logs: list[dict[str, float]] = []
    options = {"step": 0, "seed": 0, "scratch": bench.scratch(), "on_step": logs.append}
    train_ppo(spec, make_context(bench.policy, optimizer, batch.trajectories, critic=critic, **options))
    steps = critics.steps(histories)
    old_values = batch.split(steps[0].columns["value"])

    def loss(columns: Columns) -> torch.Tensor:
        return ppo(spec, batch.episodes, batch.columns(columns), batch.split(columns["value"]), old_values)

    of_policy = flat({n: torch.full_like(tensor, ".default." in n) for n, tensor in critics.start.items()}).bool()
    result: list[float] = []
    for ours, log, step in zip(optimizer.gradients, logs, steps, strict=True):
        expected = step.gradient(loss)
        result += [relative_error(ours[part], expected[part]) for part in (of_policy, ~of_policy)]
        if spec.ratio != "sequence":  # see `policy_gradient_errors`
            result.append(abs(log["loss"] - float(loss(step.columns))))
    assert [0 < log["value_clip_fraction"] < 1 for log in logs] == [False, spec.value_clip is not None]
    return result


@pytest.fixture(scope="module")
def critics(bench) -> dict[str, CriticBench]:
    return {kind: CriticBench(bench, kind) for kind in KINDS}


ALL = [(*combination, kind, histories) for combination, kind, histories in product(COMBINATIONS, KINDS, HISTORIES)]
ALL_VARIED = list(product(VARIATIONS, KINDS, HISTORIES))


@pytest.mark.parametrize(("credit", "ratio", "estimator", "kind", "histories"), cases(ALL, covering(ALL)))
def test_the_gradient_is_that_of_the_formula(critics, credit, ratio, estimator, kind, histories):
    assert max(errors(critics[kind], combined(kind, credit, ratio, estimator), histories)) <= TOLERANCE


@pytest.mark.parametrize(("variation", "kind", "histories"), cases(ALL_VARIED, covering(ALL_VARIED)))
def test_so_is_that_of_each_other_setting(critics, variation, kind, histories):
    assert max(errors(critics[kind], varied(kind, variation), histories)) <= TOLERANCE


@pytest.mark.parametrize("histories", HISTORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_some_values_are_clipped_in_the_second_step(critics, kind, histories):
    before, after = (step.columns["value"] for step in critics[kind].steps(histories))
    far = (after - before).abs() > PPOSpec().value_clip
    assert 0.1 < far.double().mean() < 0.9
