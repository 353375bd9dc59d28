"""Gradients of preference algorithms, supervised fine-tuning and distillation equal those of their formulas in float64
(`papers_of_episodes`), for episodes with one and with several histories. See `test_gradient_matrix`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from components.algorithms.distillation.spec import DistillSpec
from components.algorithms.distillation.trainer import train_distill
from components.algorithms.preference.spec import DPOSpec, IPOSpec, KTOSpec, ORPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.spec import OptimizerSpec
from tests.algorithms import papers_of_episodes as papers
from tests.algorithms.builders import make_context
from tests.algorithms.gradients import (
    FREE,
    HISTORIES,
    Batch,
    Bench,
    Columns,
    Replaces,
    flat,
    learned,
    logprobs_and_entropies,
    relative_error,
    sampled_places,
    step_errors,
)
from tests.algorithms.test_gradient_matrix import TOLERANCE

STEPS: dict[str, Any] = {**FREE, "batch_size": 64, "epochs": 2}
TEACHER = {"name": "tiny", "source": "random", "device": "cpu"}
SPECS: dict[str, OptimizerSpec] = {
    "dpo": DPOSpec(**STEPS),
    "dpo, all pairs, smoothed": DPOSpec(**STEPS, pairs="all", label_smoothing=0.2, beta=0.3),
    "dpo, likelihood": DPOSpec(**STEPS, likelihood_weight=0.5),
    "dpo, margin": DPOSpec(**STEPS, pairs="all", min_margin=0.3),
    "ipo": IPOSpec(**STEPS),
    "ipo, all pairs": IPOSpec(**STEPS, pairs="all", beta=0.5),
    "ipo, likelihood": IPOSpec(**STEPS, likelihood_weight=0.5),
    "orpo": ORPOSpec(**STEPS),
    "orpo, all pairs": ORPOSpec(**STEPS, pairs="all", beta=0.4),
    "kto": KTOSpec(**STEPS),
    "kto, weighted": KTOSpec(**STEPS, good_weight=0.7, bad_weight=1.3, threshold=0.4, beta=0.2),
    "kto, likelihood": KTOSpec(**STEPS, likelihood_weight=0.5),
    "sft": SFTSpec(**STEPS),
    "sft, weighted": SFTSpec(**STEPS, weight_temperature=0.5),
    "distill": DistillSpec(**STEPS, teacher=TEACHER),
    "distill, temperature": DistillSpec(**STEPS, teacher=TEACHER, temperature=0.8),
}


def errors(bench: Bench, name: str, histories: str) -> list[float]:
    """Return the errors of the trainer's gradient and loss in each of its two steps."""
    spec, batch, policy = SPECS[name], bench.batches[histories], bench.policy
    bench.set(bench.start)
    optimizer = Replaces([policy.parameters], bench.after)
    logs: list[dict[str, float]] = []
    options = {"base_dir": bench.base_dir, "scratch": bench.scratch(), "on_step": logs.append}
    context = make_context(policy, optimizer, batch.trajectories, **options)
    if isinstance(spec, DistillSpec):
        train_distill(spec, context, policy)
        return _of_distillation(bench, spec, batch, optimizer, logs)
    if isinstance(spec, SFTSpec):
        spec.build(context).train()
        weights = papers.softmax_weights(_rewards(batch), spec.weight_temperature)
        return step_errors(
            optimizer, logs, batch.plain_steps, lambda columns: papers.sft(batch.split(columns["logprob"]), weights)
        )
    spec.build(context).train()
    if isinstance(spec, KTOSpec):
        return _of_kto(bench, spec, batch, optimizer, logs)
    index_pairs = papers.pairs(spec, [episode.group for episode in batch.episodes], _rewards(batch))
    formula = getattr(papers, spec.name)
    return step_errors(
        optimizer,
        logs,
        batch.plain_steps,
        lambda columns: formula(spec, batch.split(columns["logprob"]), batch.plain_reference, index_pairs),
    )


def _rewards(batch: Batch) -> list[float]:
    return [episode.reward for episode in batch.episodes]


def _of_kto(
    bench: Bench, spec: KTOSpec, batch: Batch, optimizer: Replaces, logs: list[dict[str, float]]
) -> list[float]:
    """Return the errors of the KTO loss in each step. Each step has its own reference point: episodes are shuffled, and
    each is paired with the next one of another scenario."""
    result = []
    for number, step in enumerate(batch.plain_steps):
        order = list(range(len(batch.episodes)))
        random.Random(f"0-0-{number}").shuffle(order)
        ratios = []
        for position, episode_index in enumerate(order):
            following = [*order[position + 1 :], *order[:position]]
            other = next(
                index for index in following if batch.episodes[index].group != batch.episodes[episode_index].group
            )
            mismatched = papers.mismatched(
                *(sampled_places([batch.trajectories[index]]) for index in (episode_index, other))
            )
            logprob, reference = (
                sum(_total(bench, adapter, *history) for history in mismatched)
                for adapter in ((bench.start, bench.after)[number], bench.reference)
            )
            ratios.append(logprob - reference)
        point = sum(ratios) / len(ratios)
        assert point > 0, "a reference point of 0 would show nothing"

        def loss(columns: Columns, point: float = point) -> torch.Tensor:
            return papers.kto(spec, batch.split(columns["logprob"]), batch.plain_reference, _rewards(batch), point)

        result.append(relative_error(optimizer.gradients[number], step.gradient(loss)))
        result.append(abs(logs[number]["loss"] - float(loss(step.columns))))
    return result


def _total(bench: Bench, adapter, token_ids: Sequence[int], sampled: Sequence[int]) -> float:
    with torch.no_grad():
        columns = logprobs_and_entropies(bench.model, adapter, list(token_ids), list(sampled), 1.0)
    return float(columns["logprob"].sum())


def _of_distillation(
    bench: Bench, spec: DistillSpec, batch: Batch, optimizer: Replaces, logs: list[dict[str, float]]
) -> list[float]:
    """Return the errors of the distillation loss in each step; the teacher is the reference."""
    result = []
    for ours, log, adapter in zip(optimizer.gradients, logs, (bench.start, bench.after), strict=True):
        parameters = learned(adapter)
        rows = []
        for token_ids, sampled in sampled_places(batch.trajectories):
            predicting = [index - 1 for index in sampled]
            student_TV = bench.model.logps(bench.model.hidden(token_ids, parameters), spec.temperature)
            with torch.no_grad():
                teacher_TV = bench.model.logps(bench.model.hidden(token_ids, bench.reference), spec.temperature)
            rows.append((student_TV[predicting], teacher_TV[predicting]))
        loss = papers.reverse_kl(*(torch.cat(side) for side in zip(*rows, strict=True)))
        loss.backward()
        result.append(relative_error(ours, flat({name: parameter.grad for name, parameter in parameters.items()})))
        result.append(abs(log["loss"] - loss.item()))
    return result


CASES = [
    (name, histories)
    for number, name in enumerate(SPECS)
    for histories in (HISTORIES if "," not in name else HISTORIES[number % 2 :][:1])
]
"""Each algorithm with each kind of episodes, each other setting with one of them."""


@pytest.mark.parametrize(("name", "histories"), CASES)
def test_the_gradient_is_that_of_the_formula(bench, name, histories):
    assert max(errors(bench, name, histories)) <= TOLERANCE
