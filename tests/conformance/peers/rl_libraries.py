"""Advantages, losses and their gradients by verl and torchrl, for `tests.conformance.algorithms`.

Runs with a Python that has verl, torchrl and what they import, and none of this project. Reads one JSON object from
standard input: `rewards` and `groups` of N responses, and arrays of N x T: `mask`, `logprob`, `old`, `reference`,
`advantage`, `value`, `old_value`, `return`; also `discount`, `lambda`, `clip_low`, `clip_high`, `dual_clip` and
`clip_value`. Prints one JSON object: `versions`, and `results` with arrays by name. A loss has its gradient in a result
of its own, `NAME, gradient`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torchrl.objectives.value.functional import generalized_advantage_estimate
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, FSDPActorConfig


def actor(problem: dict[str, Any]) -> ActorConfig:
    """Return verl's configuration of the clips."""
    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=problem["clip_low"],
        clip_ratio_high=problem["clip_high"],
        clip_ratio_c=problem["dual_clip"],
    )


def results(problem: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of all cases by name."""
    column = {
        name: torch.tensor(problem[name], dtype=torch.float64)
        for name in ("mask", "logprob", "old", "reference", "advantage", "value", "old_value", "return")
    }
    mask = column["mask"]
    groups = np.array(problem["groups"])
    last = mask.cumsum(1).argmax(1)
    token_rewards = torch.zeros_like(mask)
    token_rewards[torch.arange(len(last)), last] = torch.tensor(problem["rewards"], dtype=torch.float64)
    first = torch.zeros(len(last), dtype=torch.long)
    result: dict[str, Any] = {}

    def per_response(name: str, advantages: torch.Tensor) -> None:
        result[name] = advantages[torch.arange(len(first)), first].tolist()

    for name, by_deviation in (("GRPO advantages", True), ("Dr. GRPO advantages", False)):
        per_response(
            name,
            core_algos.compute_grpo_outcome_advantage(
                token_rewards.clone(), mask, groups, norm_adv_by_std_in_grpo=by_deviation
            )[0],
        )
    per_response("RLOO advantages", core_algos.compute_rloo_outcome_advantage(token_rewards.clone(), mask, groups)[0])
    discount, lambda_ = problem["discount"], problem["lambda"]
    returns = core_algos.compute_gae_advantage_return(token_rewards, column["value"], mask, discount, lambda_)[1]
    result["GAE, verl"] = ((returns - column["value"]) * mask).tolist()
    result["GAE, torchrl"] = torchrl_gae(token_rewards, column["value"], mask, discount, lambda_)
    config = actor(problem)
    policy_losses = (
        ("PPO with dual clip", "vanilla", "token-mean"),
        ("PPO with dual clip, mean of responses", "vanilla", "seq-mean-token-mean"),
        ("GSPO", "gspo", "seq-mean-token-mean"),
        ("CISPO", "cispo", "token-mean"),
    )
    for name, key, aggregation in policy_losses:
        logprob = column["logprob"].clone().requires_grad_()
        loss, _ = core_algos.get_policy_loss_fn(key)(
            column["old"], logprob, column["advantage"], mask, loss_agg_mode=aggregation, config=config
        )
        add_loss(result, name, loss, logprob)
    value = column["value"].clone().requires_grad_()
    loss, _ = core_algos.compute_value_loss(value, column["return"], column["old_value"], mask, problem["clip_value"])
    add_loss(result, "clipped value loss", loss, value)
    for estimator in ("k1", "k2", "k3"):
        logprob = column["logprob"].clone().requires_grad_()
        divergence = (core_algos.kl_penalty(logprob, column["reference"], estimator) * mask).sum()
        add_loss(result, f"KL estimator {estimator}", divergence, logprob)
    return result


def torchrl_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, discount: float, lambda_: float
) -> list[list[float]]:
    """Return torchrl's advantages of each response, without its padding."""
    rows = []
    for reward, value, tokens in zip(rewards, values, mask.sum(1).long().tolist(), strict=True):
        kept = value[:tokens, None]
        done = torch.zeros(tokens, 1, dtype=torch.bool)
        done[-1] = True
        following = torch.cat([kept[1:], torch.zeros(1, 1, dtype=kept.dtype)])
        advantage, _ = generalized_advantage_estimate(
            discount, lambda_, kept, following, reward[:tokens, None], done, done
        )
        rows.append([*advantage[:, 0].tolist(), *[0.0] * (len(value) - tokens)])
    return rows


def add_loss(result: dict[str, Any], name: str, loss: torch.Tensor, by: torch.Tensor) -> None:
    """Add a loss and its gradient."""
    (gradient,) = torch.autograd.grad(loss, by)
    result[name] = [loss.item()]
    result[f"{name}, gradient"] = gradient.tolist()


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        computed = results(json.load(sys.stdin))
    print(json.dumps({"versions": {name: version(name) for name in ("verl", "torchrl")}, "results": computed}))
