"""Replayed groups of earlier rounds in a training."""

from __future__ import annotations

from collections import Counter

import pytest

from components.algorithms.continual.replay import mixed
from components.algorithms.continual.spec import ReplaySpec
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.trajectories.groups import by_scenario, separate
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import batch, train_in
from tests.trajectories.builders import FAILURE


def of(policy: str, seed: int = 0, groups: int = 6) -> list[Trajectory]:
    """Return a round sampled by this policy; every round has the same scenarios."""
    trajectories = batch(seed=seed, groups=groups, size=3)
    for trajectory in trajectories:
        trajectory.policy = policy
    return trajectories


FRESH = of("c")
ROUNDS = [of("b", 1), of("a", 2)]
"""Rounds before that of policy `c`, the latest first."""


def draw(spec: ReplaySpec, fresh=None, earlier=ROUNDS, seed=0, compared=True, version="c"):
    fresh = FRESH if fresh is None else fresh
    trajectories, counts = mixed(spec, fresh, earlier, version=version, compared=compared, seed=seed)
    return [*trajectories], counts


@pytest.mark.parametrize(("share", "groups"), [(0.0, 0), (0.5, 6), (0.9, 12)])
def test_a_share_of_the_groups_is_of_earlier_rounds_and_whole(share, groups):
    actual, counts = draw(ReplaySpec(share=share))
    assert counts == {"replayed_groups": groups, "replayed": 3 * groups, "stale": 0}
    assert actual[:18] == FRESH
    assert len({trajectory.id for trajectory in actual}) == len(actual) == 18 + 3 * groups
    assert {len(group) for group in by_scenario(actual).values()} == {3}
    originals = {
        f"{trajectory.group}@-{ago}/{trajectory.sample}": trajectory
        for ago, part in enumerate(ROUNDS, 1)
        for trajectory in part
    }
    for trajectory in actual[18:]:
        expected = originals[trajectory.id]
        assert (trajectory.histories, trajectory.reward, trajectory.policy) == (
            expected.histories,
            expected.reward,
            expected.policy,
        )
        assert trajectory.metrics["rounds_ago"] == {"b": 1, "a": 2}[trajectory.policy]


def test_which_groups_is_a_matter_of_the_seed_and_of_the_policy():
    drawn = [
        tuple(trajectory.id for trajectory in draw(ReplaySpec(share=0.25), **changes)[0][18:])
        for changes in ({}, {}, {"seed": 1}, {"seed": 2}, {"version": "d"}, {"version": "e"})
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 3
    every = Counter(
        trajectory.id for seed in range(60) for trajectory in draw(ReplaySpec(share=0.25), seed=seed)[0][18:]
    )
    assert len(every) == 36  # each is drawn at least once
    assert max(every.values()) < 4 * min(every.values())


def test_where_episodes_are_compared_only_groups_with_something_to_compare_are_drawn_and_counted():
    flat, fresh = of("b"), of("c")
    for trajectory in (*flat[3:], *fresh[9:]):
        trajectory.reward = 0.5
    flat[0].failure = FAILURE
    actual, counts = draw(ReplaySpec(share=0.5), fresh, [flat])
    assert (counts["replayed_groups"], {trajectory.group for trajectory in actual[18:]}) == (1, {"s0@-1"})
    assert draw(ReplaySpec(share=0.5), fresh, [flat], compared=False)[1]["replayed_groups"] == 6
    assert draw(ReplaySpec(share=0.5), [], [flat])[0] == []


def test_what_is_older_than_the_limit_is_left_out_and_named(caplog):
    everything = ReplaySpec(share=0.9)
    assert {trajectory.policy for trajectory in draw(everything)[0]} == {"a", "b", "c"}
    actual, counts = draw(everything.model_copy(update={"max_staleness": 1}))
    assert {trajectory.policy for trajectory in actual} == {"b", "c"}
    assert counts == {"replayed_groups": 6, "replayed": 18, "stale": 18}
    assert "18 trajectories" in caplog.text
    assert "replay.max_staleness=1" in caplog.text
    assert "s0@-2/0" in caplog.text
    only = everything.model_copy(update={"max_staleness": 0})
    assert draw(only)[0] == FRESH
    assert draw(only, version="d") == ([], {"replayed_groups": 0, "replayed": 0, "stale": 54})
    # A round that trained nothing did not change the policy, so its episodes are not stale.
    assert {trajectory.policy for trajectory in draw(only, earlier=[of("c", 1), of("b", 2)])[0]} == {"c"}
    assert draw(only, earlier=[of("c", 1), of("b", 2)])[1] == {"replayed_groups": 6, "replayed": 18, "stale": 18}


def test_the_gradient_is_that_of_groups_by_themselves_with_their_own_log_probabilities(base_dir, start, tmp_path):
    """Even though the scenarios of the rounds are the same."""
    spec = GRPOSpec(learning_rate=1e-3, pack_tokens=64, kl_coefficient=0.05)
    actual, _ = draw(ReplaySpec(share=0.5), of("c", groups=2), [of("b", 1, groups=2)])
    assert len(actual) == 12
    apart = [
        separate(trajectory, f"-{trajectory.policy}") for trajectory in (*of("c", groups=2), *of("b", 1, groups=2))
    ]
    (log,), (expected,) = (
        train_in(tmp_path / name, spec, base_dir, trajectories, start=start)[2]
        for name, trajectories in (("mixed", actual), ("apart", apart))
    )
    assert log["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert log["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
