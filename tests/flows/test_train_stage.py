"""What the train stage reads: this round or an earlier one, all episodes or those that a filter left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from components.algorithms.policy_gradient.cost_constraints import mean_costs
from components.algorithms.spec import CostSpec
from components.trajectories.schema import Score, Selection
from components.trajectories.store import write_scores, write_selection, write_trajectories
from flows.stages.base import TrainingProgress
from flows.stages.train import _rounds, _scored
from tests.algorithms.builders import batch


@pytest.fixture
def inputs(tmp_path):
    """A round of nine episodes of which the filter has left the last six, and the same again as an earlier one."""
    made = batch()
    write_trajectories(tmp_path / "trajectories.parquet", made)
    scores = [Score(one.id, float(index), {"slips": float(index)}) for index, one in enumerate(made)]
    write_scores(tmp_path / "scores.parquet", scores)
    kept = [Selection(one.id, index >= 3, "kept") for index, one in enumerate(made)]
    write_selection(tmp_path / "selection.parquet", kept)
    names = ("trajectories", "scores", "selection")
    return {f"{when}{name}{ago}": SimpleNamespace(path=tmp_path)
            for name in names for when, ago in (("", ""), ("", "-1"), ("", "-3"), ("anchored-", "-2"))}  # fmt: skip


def test_costs_are_those_of_all_episodes_and_learned_from_are_those_that_are_left(inputs):
    left = _scored(inputs, components=True)
    assert [one.reward for one in left] == [3, 4, 5, 6, 7, 8]
    assert [one.metrics["slips"] for one in left] == [3, 4, 5, 6, 7, 8]
    assert "slips" not in _scored(inputs)[0].metrics
    everything = _scored(inputs, components=True, selected=False)
    assert mean_costs({"slips": CostSpec(limit=1.0)}, everything) == {"slips": 4.0}


def test_inputs_of_earlier_rounds_are_told_from_those_of_the_anchor(inputs):
    assert _rounds(inputs) == [1, 3]
    assert _rounds(inputs, "anchored-") == [2]
    assert len(_scored(inputs, "-3")) == len(_scored(inputs, "-2", prefix="anchored-")) == 6


def test_progress_begins_with_the_steps_of_an_interrupted_training():
    reports = []
    progress = TrainingProgress(lambda done, total, values=None: reports.append((done, total, values)))
    progress.on_step({"loss": 2.0})  # of the interrupted training, before the number of steps is known
    progress.on_total(2)
    progress.on_step({"loss": 1.0})
    assert reports == [(1, 2, None), (2, 2, {"loss": 1.0})]


def test_collections_that_share_scenarios_keep_separate_groups(inputs):
    alone = _scored(inputs)
    both = _scored({**inputs, **{f"{name}+1": inputs[name] for name in ("trajectories", "scores", "selection")}})
    assert [one.id for one in both[: len(alone)]] == [one.id for one in alone]
    assert len({one.id for one in both}) == len(both) == 2 * len(alone)
    assert {one.group for one in both} == {f"{one.group}{end}" for one in alone for end in ("", "@+1")}
    assert [one.reward for one in both] == 2 * [one.reward for one in alone]
