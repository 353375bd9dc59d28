"""Constraints: multipliers computed by hand, and a task whose unconstrained optimum exceeds the limit."""

from __future__ import annotations

import json
import math

import pytest
import torch

from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy_gradient import cost_constraints
from components.algorithms.policy_gradient.spec import GRPOSpec, RLOOSpec
from components.algorithms.policy_gradient.trainer import train_policy_gradient
from components.algorithms.spec import CostSpec
from components.errors import ArtifactError
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from tests.algorithms.builders import (
    VOCABULARY,
    batch,
    make_context,
    make_history,
    make_policy,
    make_trajectory,
    train_in,
)
from tests.algorithms.test_learning import PROMPT
from tests.flows.test_online_rl import DATA
from tests.trajectories.builders import FAILURE

COSTS = {"slips": CostSpec(limit=0.5, learning_rate=0.2), "calls": CostSpec(limit=2.0, initial=1.0)}


def costly(**changes):
    trajectories = batch(**changes)
    for index, trajectory in enumerate(trajectories):
        trajectory.metrics = {"slips": float(index % 2), "calls": float(index)}
    return trajectories


def test_a_multiplier_rises_above_the_limit_and_falls_below_it():
    for before, mean, after in (
        (0.0, 0.5, 0.0),  # at the limit
        (0.0, 0.1, 0.0),  # below it: never negative
        (0.0, 1.0, 0.1),
        (0.3, 1.0, 0.4),
        (0.3, 0.0, 0.2),
        (0.05, 0.0, 0.0),
    ):
        actual = cost_constraints.update_multipliers({"slips": before}, COSTS, {"slips": mean})
        assert actual == {"slips": pytest.approx(after)}, (before, mean)


def test_a_cost_that_was_not_measured_keeps_its_multiplier():
    assert cost_constraints.update_multipliers({"slips": 0.3, "calls": 1.0}, COSTS, {}) == {"slips": 0.3, "calls": 1.0}


def test_rewards_are_capped_lessened_and_divided():
    trajectory = make_trajectory("a", 0, [], 3.0)
    trajectory.metrics, trajectory.step_rewards = {"slips": 2.0, "calls": 1.0}, [1.0, 2.0]
    multipliers = {"slips": 0.5, "calls": 1.5}
    [actual] = cost_constraints.subtract_costs(GRPOSpec(costs=COSTS, reward_cap=1.0), [trajectory], multipliers)
    assert actual.reward == pytest.approx((1.0 - 0.5 * 2 - 1.5 * 1) / 3)
    assert actual.step_rewards == pytest.approx([1 / 3, (2 - 2.5) / 3])
    [plain] = cost_constraints.subtract_costs(GRPOSpec(costs=COSTS, cost_scaling=False), [trajectory], multipliers)
    assert (plain.reward, plain.step_rewards) == (pytest.approx(0.5), [1.0, -0.5])
    assert (trajectory.reward, trajectory.step_rewards) == (3.0, [1.0, 2.0])


def test_the_mean_is_over_what_counts_of_this_round():
    trajectories = costly(groups=2)
    trajectories[0].failure, trajectories[1].reward, trajectories[5].metrics["rounds_ago"] = FAILURE, None, 1.0
    trajectories[0].metrics = {}
    assert cost_constraints.mean_costs(COSTS, trajectories) == {"slips": pytest.approx(1 / 3), "calls": 3.0}
    assert cost_constraints.mean_costs(COSTS, []) == {}


def test_the_outcome_may_say_what_an_episode_costs_too():
    trajectory = make_trajectory("a", 0, [], 1.0)
    trajectory.outcome = {"success": True, "slips": 3, "calls": 2, "said": "text"}
    trajectory.metrics = {"calls": 5.0}
    assert cost_constraints.mean_costs(COSTS, [trajectory]) == {"slips": 3.0, "calls": 5.0}
    thinking = {"reasoning_tokens": CostSpec(limit=1)}
    assert cost_constraints.mean_costs(thinking, [trajectory]) == {"reasoning_tokens": 0.0}  # it did not reason


@pytest.mark.parametrize(("value", "message"), [(None, "has no cost of this name"), (math.nan, "has a cost of nan")])
def test_a_cost_that_is_missing_is_named(value, message):
    trajectories = costly()
    trajectories[4].metrics = {"calls": 1.0} if value is None else {"calls": 1.0, "slips": value}
    with pytest.raises(
        ArtifactError, match=rf"algorithm\.costs\.slips: trajectory {trajectories[4].id} {message}.*calls"
    ):
        cost_constraints.mean_costs(COSTS, trajectories)


def test_a_cap_of_what_is_not_used_is_a_mistake(tmp_path):
    algorithm = {"name": "grpo", "credit": "turns", "reward_cap": 1.0}
    with pytest.raises(ValueError, match=r"algorithm\.reward_cap"):
        validate(ExperimentSpec, {**DATA, "root": str(tmp_path), "algorithm": algorithm})


# --- in training ----------------------------------------------------------------------------------------------------


def run(base_dir, folder, spec, trajectories, **more):
    return train_in(folder, spec, base_dir, trajectories, save_every=0.0, **more)[:2]


def multipliers(out) -> dict[str, float]:
    return json.loads((out / "multipliers.json").read_text())


def test_multipliers_go_from_round_to_round_and_through_a_kill(base_dir, tmp_path):
    spec = GRPOSpec(costs=COSTS, epochs=2)
    first, metrics = run(base_dir, tmp_path / "1", spec, costly())
    assert metrics["cost/slips"] == pytest.approx(4 / 9)
    assert multipliers(first) == {"slips": 0.0, "calls": pytest.approx(1 + 0.1 * (4 - 2))}
    measured = {"slips": 0.75, "calls": 0.0}  # mean over all episodes, although the filter kept only these
    second, metrics = run(base_dir, tmp_path / "2", spec, costly(), start=first, mean_costs=measured)
    expected = {"slips": pytest.approx(0.05), "calls": pytest.approx(1.0)}
    assert multipliers(second) == expected
    assert {name: metrics[f"multiplier/{name}"] for name in COSTS} == expected

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            raise KeyboardInterrupt

    arguments = {"start": first, "mean_costs": measured}
    with pytest.raises(KeyboardInterrupt):
        run(base_dir, tmp_path / "3", spec, costly(), on_step=stop, **arguments)
    again, _ = run(base_dir, tmp_path / "3", spec, costly(), **arguments)
    for file in ("adapter/adapter_model.safetensors", "multipliers.json", "optimizer.safetensors"):
        assert (again / file).read_bytes() == (second / file).read_bytes()
    flat = costly()
    for trajectory in flat:
        trajectory.reward = 0.0
    skipping, metrics = run(base_dir, tmp_path / "4", GRPOSpec(costs={"slips": COSTS["slips"]}), flat, start=second)
    assert (metrics["skipped_steps"], set(multipliers(skipping))) == (0.0, {"slips"})  # only the costs differ


def test_without_costs_nothing_changes_and_nothing_is_written(base_dir, tmp_path):
    plain, _ = run(base_dir, tmp_path / "plain", GRPOSpec(), costly())
    capped, _ = run(base_dir, tmp_path / "capped", GRPOSpec(reward_cap=10.0), costly())
    adapters = [(trajectory / "adapter/adapter_model.safetensors").read_bytes() for trajectory in (plain, capped)]
    assert adapters[0] == adapters[1]
    assert not (plain / "multipliers.json").exists()


def distribution(policy) -> torch.Tensor:
    """Return the (V,) log-probabilities of the answer."""
    [packed] = pack([TokenSequence([*PROMPT, 0], [len(PROMPT)])], 64)
    with torch.no_grad():
        rows, head = policy.rows(packed)
        return torch.log_softmax(head(rows)[0], -1)


RISKY = range(0, VOCABULARY, 22)
SAFE = range(11, VOCABULARY, 22)


def played(base_dir, tmp_path, spec, seed=0) -> tuple[float, float, float]:
    """Train on a task with one token as the answer: risky tokens have reward 1 and cost 1, safe ones have reward 0.3.
    Return the share of risky and of safe answers, and the multiplier, over the last rounds."""
    policy = make_policy(base_dir)
    policy.model.get_base_model().get_output_embeddings().weight.data.mul_(10)
    optimizer = torch.optim.AdamW(policy.parameters.values(), betas=(0.9, 0.9), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    multipliers, trace, step = cost_constraints.load(None, spec.costs or {}), [], 0
    for number in range(160):
        logps_V = distribution(policy)
        shares = [float(logps_V[list(tokens)].exp().sum()) for tokens in (RISKY, SAFE)]
        drawn = torch.multinomial(logps_V.exp(), 48, replacement=True, generator=generator).tolist()
        episodes = []
        for index, token in enumerate(drawn):
            sampled_history = make_history([(False, PROMPT), (True, [token])], [float(logps_V[token])])
            reward = 1.0 if token in RISKY else 0.3 if token in SAFE else 0.0
            episode = make_trajectory(
                f"g{index // 8}", index % 8, [sampled_history], reward, sampling={"temperature": 1.0}
            )
            episode.metrics = {"risk": float(token in RISKY)}
            episodes.append(episode)
        multipliers = cost_constraints.update_multipliers(
            multipliers, spec.costs or {}, cost_constraints.mean_costs(spec.costs or {}, episodes)
        )
        trace.append([*shares, multipliers.get("risk", 0.0)])
        folder = tmp_path / str(number)
        folder.mkdir(parents=True)
        arguments = {"step": step, "seed": number, "scratch": folder, "on_step": lambda _: None}
        penalised_episodes = cost_constraints.subtract_costs(spec, episodes, multipliers)
        step, _ = train_policy_gradient(spec, make_context(policy, optimizer, penalised_episodes, **arguments))
    risk, safe, multiplier = (sum(column[-25:]) / 25 for column in zip(*trace, strict=True))
    return risk, safe, multiplier


def test_the_free_policy_breaks_the_limit_and_the_constrained_one_ends_at_it(base_dir, tmp_path):
    """With an entropy bonus α, the optimal policy samples token i with a probability proportional to exp((r_i - λ c_i)
    / α). λ is the value at which the risk equals the limit; without constraints λ = 0."""
    bonus, limit = 0.2, 0.3
    count, safe_count = len(RISKY), len(SAFE)
    others = safe_count * math.exp(0.3 / bonus) + VOCABULARY - count - safe_count
    best = 1 - bonus * math.log(limit / (1 - limit) * others / count)

    common = {"learning_rate": 2e-3, "beta2": 0.9, "max_kl": 1e9, "kl_coefficient": 0.0, "entropy_coefficient": bonus}
    risk, _, _ = played(base_dir, tmp_path / "free", RLOOSpec(**common))
    assert risk == pytest.approx(count / (count + others * math.exp(-1 / bonus)), abs=0.15)
    assert risk > 2 * limit
    limited = {"risk": CostSpec(limit=limit, learning_rate=0.05)}
    risk, safe, multiplier = played(base_dir, tmp_path / "held", RLOOSpec(**common, costs=limited, cost_scaling=False))
    assert risk == pytest.approx(limit, abs=0.06)
    assert safe > count / VOCABULARY
    assert multiplier == pytest.approx(best, abs=0.15)
