"""The recipe `agent_evol` by each way of `evolve`: what each training receives and where it starts, and refusals."""

import pytest

from flows.experiment.compose import compose
from flows.planning.plan import plan
from tests.flows.test_online_rl import WARMUP, Recorder, rounds
from tests.flows.test_self_evolve import trained_on
from tests.refusals import wrong_refusals

SMOKE = ["+experiment=smoke", "flow=agent_evol", "rounds=2"]
ALL = ["collect[sft]", "collect[1]", "collect[2]"]

WAYS = {
    ("evolve=sft",): (ALL, None, False),
    ("evolve=dpo",): (["collect[1]", "collect[2]"], "train[1]", True),
    ("evolve=dpo", "algorithm=orpo"): (["collect[1]", "collect[2]"], "train[1]", False),
    ("evolve=kto",): (ALL, "train[1]", True),
    ("evolve=ppo",): (["collect[2]"], "train[1]", True),
    ("evolve=ppo", "algorithm=grpo", "filter=signal"): (["collect[2]"], "train[1]", True),
}
"""Overrides; episodes and start of the second training; True if its reference is the cloned policy."""


def test_each_way_trains_on_its_episodes_from_its_policy(tmp_path):
    for overrides, (episodes, start, referred) in WAYS.items():
        run = Recorder(tmp_path, spec=compose([*SMOKE, *overrides, f"root={tmp_path}"]))
        assert list(run.keys) == ["evaluate[start]", *WARMUP, *rounds(1, 2), "evaluate[final]", "deploy"]
        assert trained_on(run, 2) == episodes, overrides
        inputs = run.requests["train[2]"].inputs
        selections = [inputs[f"selection+{n}" if n else "selection"] for n in range(len(episodes))]
        assert selections == [run.keys[label.replace("collect", "filter")] for label in episodes]
        assert inputs.get("start") == (start and run.keys[start])
        assert inputs.get("reference") == (run.keys["train[sft]"] if referred else None)


def test_a_reward_model_scores_the_episodes_that_are_selected(tmp_path):
    lines = ["reward_model=bradley_terry", "filter.filters.good.number=success", f"root={tmp_path}"]
    run = Recorder(tmp_path, spec=compose([*SMOKE, *lines]))
    model = run.keys["train[reward]"]
    assert [model in run.requests[f"judge[{name}]"].inputs.values() for name in ("sft", "1", "2")] == [
        False,
        True,
        True,
    ]
    assert run.requests["filter[2]"].inputs["scores"] == run.keys["judge[2]"]
    assert run.requests["train[2]"].inputs["scores+2"] == run.keys["judge[2]"]


REFUSED = [
    (["evolve=grpo"], "evolve: 'grpo': expected one of dpo, kto, ppo, sft"),
    (["flow=online_rl", "evolve=dpo"], "flow=online_rl does not read it; .* such as flow=agent_evol"),
    (["evolve=kto", "algorithm=sft"], r"filter.filters.failures: keeps failures, and sft makes .*filter=agent_evol"),
    (["evolve=dpo", "filter=agent_evol"], r"filter.filters.one.count: 1: .*expected filter=agent_evol_with_failures"),
    (["evolve=kto", "filter=agent_evol"], r"filter.filters.good: drops the failures .*filter=agent_evol_with_failures"),
    (["evolve=kto", "filter=successful"], r"filter: drops the failures \(reward below 0.5\) that kto learns from"),
    (["evolve=dpo", "algorithm.pairs=all", "algorithm.threshold=0.9"], "algorithm.threshold: 0.9: only pairs of a"),
    (["evolve=ppo", "flow.evolve_from=start"], "flow.evolve_from: start: ppo learns from tokens of the current"),
]


def test_what_makes_no_sense_is_refused_by_name_before_the_first_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "__call__", lambda *arguments: pytest.fail("a stage ran"))
    refused = wrong_refusals(REFUSED, lambda lines: Recorder(tmp_path, spec=compose([*SMOKE, *lines])))
    assert refused == []


def test_an_attempt_of_each_scenario_suffices_for_pairs_of_a_type(tmp_path):
    planned = plan(compose([*SMOKE, "evolve=dpo", "collect.group_size=1", f"root={tmp_path}"]))
    assert [stage.label for stage in planned.stages if stage.label.startswith("train")][-1] == "train[2]"
