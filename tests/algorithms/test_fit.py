"""Trajectories that cannot be trained on: an error that names one, or a counted omission; never silently."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from components.algorithms.policy_gradient.spec import GRPOSpec
from components.errors import ArtifactError
from tests.algorithms.builders import MODEL, VOCABULARY, batch, train_in


def run(base_dir: Path, folder: Path, trajectories, model=MODEL) -> dict[str, float]:
    return train_in(folder, GRPOSpec(), base_dir, trajectories, model, seed=0)[1]


@pytest.mark.parametrize("token", [VOCABULARY, 10**6, -1])
def test_a_token_that_the_model_does_not_have(base_dir, tmp_path, token):
    trajectories = batch()
    trajectories[4].histories[0].token_ids[3] = token
    with pytest.raises(
        ArtifactError, match=rf"trajectory s1/1 has the token id {token}, .* from 0 to {VOCABULARY - 1}"
    ):
        run(base_dir, tmp_path, trajectories)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number(base_dir, tmp_path, reward):
    trajectories = batch()
    trajectories[2].reward = reward
    with pytest.raises(ArtifactError, match=f"trajectory s0/2 has the reward {reward}: expected a finite number"):
        run(base_dir, tmp_path, trajectories)


def test_episodes_that_are_too_long_are_left_out_counted_and_named(base_dir, tmp_path, caplog):
    trajectories = batch(groups=4)
    longest = max(len(trajectory.histories[0].token_ids) for trajectory in trajectories)
    longer = [trajectory.id for trajectory in trajectories if len(trajectory.histories[0].token_ids) == longest]
    metrics = run(base_dir, tmp_path, trajectories, replace_length(longest - 1))
    assert metrics["too_long"] == len(longer)
    assert f"model.max_length={longest - 1} tokens: {len(longer)} of 12: {', '.join(longer)}" in caplog.text
    assert "too_long" not in run(base_dir, tmp_path / "again", trajectories, replace_length(longest))


def replace_length(length: int):
    return MODEL.model_copy(update={"max_length": length})


@pytest.mark.parametrize("case", ["empty", "groups of one", "equal rewards"])
def test_nothing_to_learn_from_is_said(base_dir, tmp_path, case, caplog):
    trajectories = batch()
    if case == "groups of one":
        trajectories = trajectories[::3]
    trajectories = (
        []
        if case == "empty"
        else [
            replace(trajectory, reward=0.5 if case == "equal rewards" else trajectory.reward)
            for trajectory in trajectories
        ]
    )
    metrics = run(base_dir, tmp_path, trajectories)
    assert "nothing to learn from: the new checkpoint" in caplog.text
    assert "loss" not in metrics
