"""Outcome reward, against its formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import SpecError
from components.rewards.judge import judge
from components.rewards.rules.outcome import Outcome
from components.specs import Target
from components.trajectories.schema import Score
from tests.trajectories.builders import FAILURE, episode


def score(reward, trajectory):
    (result,) = judge(reward, [trajectory])
    return result


def test_plain_success():
    assert score(Outcome(), episode(success=True)) == Score("s/0", 1.0, {"success": 1.0})
    assert score(Outcome(), episode(success=False)) == Score("s/0", 0.0, {"success": 0.0})
    assert score(Outcome(), episode(outcome={})).reward == 0.0  # cut off before the end


def test_a_failed_episode_is_unscored():
    assert score(Outcome(), episode(success=True, failure=FAILURE)) == Score("s/0", None, failure=FAILURE)


@given(
    success=st.booleans(),
    turns=st.integers(0, 50),
    invalid=st.integers(0, 50),
    progress=st.floats(0, 1),
    turn_cost=st.floats(0, 1),
    invalid_cost=st.floats(0, 1),
    weight=st.floats(0, 1),
)
def test_the_formula(success, turns, invalid, progress, turn_cost, invalid_cost, weight):
    row = episode(outcome={"success": success, "progress": progress, "invalid_actions": invalid}, turns=turns)
    result = score(Outcome(turn_cost, invalid_cost, weight), row)
    partial = 0 if success else weight * progress
    assert result.reward == pytest.approx(success + partial - turn_cost * turns - invalid_cost * invalid)
    assert result.reward == pytest.approx(sum(result.components.values()))
    assert set(result.components) <= {"success", "progress", "turns", "invalid_actions"}


def test_components_are_the_parts_with_their_signs():
    row = episode(outcome={"success": False, "progress": 0.5, "invalid_actions": 2}, turns=4)
    result = score(Outcome(turn_cost=0.05, invalid_cost=0.1, progress_weight=0.3), row)
    assert result.components == pytest.approx({"success": 0, "progress": 0.15, "turns": -0.2, "invalid_actions": -0.2})


def test_the_collectors_count_goes_before_the_environments():
    row = episode(outcome={"success": True, "invalid_actions": 5})
    row.metrics["invalid_actions"] = 1.0
    assert score(Outcome(invalid_cost=0.1), row).reward == pytest.approx(0.9)


def test_what_is_asked_for_and_missing_is_unscored_not_zero(subtests):
    for reward, outcome, said in [
        (Outcome(invalid_cost=0.1), {"success": True}, "invalid_actions"),
        (Outcome(progress_weight=0.1), {"success": True}, "progress"),
        (Outcome(progress_weight=0.1), {"progress": "half"}, "'half'"),
        (Outcome(progress_weight=0.1), {"progress": float("nan")}, "nan"),
        (Outcome(progress_weight=0.1), {"progress": 40}, "40"),
    ]:
        with subtests.test(said=said):
            rows = [episode("s", 0, outcome=outcome), episode("s", 1, outcome={"progress": 1.0, "invalid_actions": 0})]
            first, second = judge(reward, rows)
            assert first.reward is None
            assert said in first.failure.message
            assert second.reward is not None  # the rest of the group is not touched


def test_an_episode_cut_off_at_once_has_made_no_progress():
    assert score(Outcome(progress_weight=0.5), episode(outcome={})).reward == 0.0


def test_arguments_are_checked_in_the_configuration():
    target = {"_target_": "components.rewards.rules.outcome.Outcome", "turn_cost": 0.1}
    assert Target.model_validate(target).build().turn_cost == 0.1


def test_arguments_out_of_range_are_refused_in_the_configuration(subtests):
    for argument in [{"turn_cost": -0.1}, {"invalid_cost": -1}, {"progress_weight": 1.5}]:
        with subtests.test(argument=argument):
            from components.specs import Spec, validate

            class Part(Spec):
                reward: Target

            with pytest.raises(SpecError, match=rf"reward\.{next(iter(argument))}"):
                validate(Part, {"reward": {"_target_": "components.rewards.rules.outcome.Outcome", **argument}})
