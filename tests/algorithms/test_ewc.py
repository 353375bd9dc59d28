"""Elastic weight consolidation compared with the formula on a plain model, and its effect on forgetting."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from components.algorithms.continual.ewc import penalty
from components.algorithms.continual.spec import EWCSpec
from components.algorithms.distillation.spec import DistillSpec
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.preference.spec import DPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.trainer import Anchor
from components.models.spec import LoraSpec
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import (
    MODEL,
    VOCABULARY,
    batch,
    demonstrations,
    make_history,
    make_policy,
    make_trajectory,
    plain_logprobs,
    plain_model,
    relative_difference,
    train_in,
    trainable,
    write_start,
)

DROPOUT = MODEL.model_copy(update={"lora": LoraSpec(rank=4, alpha=8.0, dropout=0.2)})


@pytest.fixture(scope="module")
def there(base_dir, tmp_path_factory):
    """Checkpoint of the anchor."""
    return write_start(base_dir, tmp_path_factory.mktemp("anchor") / "checkpoint", seed=7)


def fisher_written_out(base_dir, episodes: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    model = plain_model(base_dir, make_policy(base_dir, seed=7))
    total = {name: torch.zeros_like(parameter) for name, parameter in trainable(model).items()}
    for trajectory in episodes:
        [only] = trajectory.histories
        logprob_T = plain_logprobs(model, only.token_ids, 1.0)
        model.zero_grad()
        sum(logprob_T[index - 1] for index, sampled in enumerate(only.sampled_mask()) if sampled).backward()
        for name, parameter in trainable(model).items():
            total[name] += parameter.grad**2 / len(episodes)
    return total


def test_penalty_and_gradient_are_the_formula_and_the_policy_stays_as_it_was(base_dir, there):
    """With dropout, which must not affect the measurement."""
    policy, random_state = make_policy(base_dir, model=DROPOUT), torch.get_rng_state()
    before = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    anchored = {name: p.detach() for name, p in make_policy(base_dir, seed=7).parameters.items()}
    anchor = Anchor(EWCSpec(coefficient=3.0), there, batch())
    torch.set_rng_state(random_state)
    actual = penalty(policy, anchor, base_dir, pack_tokens=64, seed=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.parameters.items())
    assert all(parameter.grad is None for parameter in policy.parameters.values())
    assert relative_difference(actual.fisher, fisher_written_out(base_dir, batch())) <= 1e-5
    theta = {name: value.clone().requires_grad_() for name, value in before.items()}
    expected = 3.0 / 2 * sum((actual.fisher[name] * (theta[name] - anchored[name]) ** 2).sum() for name in theta)
    expected.backward()
    next(iter(policy.parameters.values())).grad = torch.ones_like(next(iter(before.values())))
    assert actual.add_gradient(policy.parameters) == pytest.approx(expected.item(), rel=1e-5)
    first = next(iter(theta))
    theta[first].grad += 1  # existing gradients are kept
    grads = {name: parameter.grad for name, parameter in policy.parameters.items()}
    assert relative_difference(grads, {name: value.grad for name, value in theta.items()}) <= 1e-5


def test_at_most_so_many_trajectories_are_drawn_by_the_seed(base_dir, there):
    policy = make_policy(base_dir)
    anchor = Anchor(EWCSpec(trajectories=2), there, batch())
    fishers = [penalty(policy, anchor, base_dir, pack_tokens=64, seed=seed).fisher for seed in (0, 0, 1)]
    assert relative_difference(fishers[0], fishers[1]) == 0
    assert relative_difference(fishers[2], fishers[0]) > 0.1
    nothing = penalty(policy, Anchor(EWCSpec(), there, []), base_dir, pack_tokens=64, seed=0)
    assert nothing.add_gradient(policy.parameters) == 0


def run(base_dir, folder, spec, trajectories, **more):
    out, _, logs = train_in(folder, spec, base_dir, trajectories, save_every=0.0, **more)
    return out, logs


TEACHER = {"name": "tiny", "source": "random", "device": "cpu"}


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        (SFTSpec(epochs=2), demonstrations),
        (GRPOSpec(epochs=2), batch),
        (DPOSpec(epochs=2), batch),
        (DistillSpec(epochs=2, teacher=TEACHER), batch),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_algorithm_is_held(base_dir, there, tmp_path, spec, make):
    """At the anchor the penalty is 0; after a step it is positive, and its gradient is part of the clipped gradient."""
    faster_spec = spec.model_copy(update={"learning_rate": 1e-2})
    anchor = Anchor(EWCSpec(coefficient=1e3), there, batch())
    arguments = {"start": there, "teacher_dir": base_dir}
    _, with_it = run(base_dir, tmp_path / "held", faster_spec, make(), anchor=anchor, **arguments)
    _, without = run(base_dir, tmp_path / "free", faster_spec, make(), **arguments)
    assert with_it[0]["ewc"] == 0
    assert with_it[-1]["ewc"] > 0
    assert "ewc" not in without[-1]
    assert with_it[0]["loss"] == without[0]["loss"]
    assert with_it[0]["grad_norm"] == without[0]["grad_norm"]
    assert with_it[-1]["grad_norm"] > 1.5 * without[-1]["grad_norm"]


def test_killed_or_warm_it_ends_in_the_same_bytes(base_dir, there, tmp_path):
    spec = GRPOSpec(learning_rate=1e-2, epochs=3)
    warm: dict = {}
    arguments = {"anchor": Anchor(EWCSpec(coefficient=1e3), there, batch(seed=4)), "start": there}

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(base_dir, tmp_path / "stopped", spec, batch(), on_step=stop, warm=warm, **arguments)
    whole, _ = run(base_dir, tmp_path / "whole", spec, batch(), **arguments)
    stopped, _ = run(base_dir, tmp_path / "stopped", spec, batch(), warm=warm, **arguments)
    plain, _ = run(base_dir, tmp_path / "plain", spec, batch(), start=there, warm=warm)
    alone, _ = run(base_dir, tmp_path / "alone", spec, batch(), start=there)
    whole, stopped, plain, alone = (
        (out / "adapter" / "adapter_model.safetensors").read_bytes() for out in (whole, stopped, plain, alone)
    )
    assert whole == stopped
    assert plain == alone  # a warm policy does not keep the penalty
    assert whole != plain


def task(seed: int) -> list[Trajectory]:
    """Return prompts, each with an answer to memorise."""
    draw = random.Random(seed)
    result = []
    for index in range(8):
        prompt, answer = ([draw.randrange(3, VOCABULARY) for _ in range(count)] for count in (6, 4))
        result.append(
            make_trajectory(f"t{seed}-{index}", 0, [make_history([(False, prompt), (True, answer)], [0.0] * 4)], 1.0)
        )
    return result


def surprise(base_dir, checkpoint, episodes) -> float:
    """Return the mean negative log-likelihood of the answers, in nats per token."""
    policy = Policy(base_dir, MODEL, 0)
    policy.load(checkpoint / "adapter")
    model = plain_model(base_dir, policy)
    with torch.no_grad():
        return (
            -sum(
                plain_logprobs(model, trajectory.histories[0].token_ids, 1.0)[-4:].mean().item()
                for trajectory in episodes
            )
            / 8
        )


def test_a_second_task_costs_less_of_the_first(base_dir, tmp_path):
    first, second = task(1), task(2)
    learn = SFTSpec(epochs=50, batch_size=8, learning_rate=2e-2, schedule="constant", pack_tokens=256)
    first_checkpoint, _ = run(base_dir, tmp_path / "first", learn, first)
    free_checkpoint, _ = run(base_dir, tmp_path / "free", learn, second, start=first_checkpoint)
    anchor = Anchor(EWCSpec(coefficient=100.0), first_checkpoint, first)
    anchored_checkpoint, _ = run(base_dir, tmp_path / "held", learn, second, start=first_checkpoint, anchor=anchor)
    before, forgotten, remembered = (
        surprise(base_dir, checkpoint, first) for checkpoint in (first_checkpoint, free_checkpoint, anchored_checkpoint)
    )
    unknown, learned = (
        surprise(base_dir, checkpoint, second) for checkpoint in (first_checkpoint, anchored_checkpoint)
    )
    assert remembered - before < 0.6 * (forgotten - before)
    assert learned < 0.9 * unknown
