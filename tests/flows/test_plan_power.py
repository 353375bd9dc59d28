"""Power in the plan: from a stated success, and from earlier runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from components.evaluation.power import group_signal, seeds_for_gain
from components.trajectories.schema import Scenario, Trajectory
from components.trajectories.store import write_trajectories
from flows.history.records import Records
from flows.plan import main
from flows.planning.plan import plan
from flows.planning.power import plan_power, show
from tests.flows.pretend import pretend, spec_of

COLLECT = {"scenarios": 4, "group_size": 4}
LINE = ["+experiment=smoke", "deploy.mode=none"]


def planned(root, capsys, *arguments: str) -> dict:
    assert main([*LINE, f"root={root}", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_stated_success_gives_the_power(tmp_path, capsys):
    power = planned(tmp_path, capsys, "--success", "0.3", "--gain", "0.1", "collect.group_size=4")["power"]
    assert power["signal_share"] == pytest.approx(group_signal(0.3, 4))
    assert power["scenarios"] > 100
    assert power["seeds"] >= 2
    assert power["seeds_at_least"] is True
    assert any("cannot show a gain of 0.1" in text for text in power["warnings"])


def test_without_knowledge_there_is_no_power_and_a_gain_is_refused(tmp_path, capsys):
    assert planned(tmp_path, capsys)["power"] is None
    assert main([*LINE, f"root={tmp_path}", "--gain", "0.1"]) == 2
    assert "give it with --success P" in capsys.readouterr().err


def test_invalid_numbers_are_refused(tmp_path, capsys):
    for option in (["--success", "1.5"], ["--success", "high"], ["--gain", "0"]):
        with pytest.raises(SystemExit):
            main([*LINE, f"root={tmp_path}", *option])
        assert "expected a" in capsys.readouterr().err


def group(number: int, outcomes: str) -> list[Trajectory]:
    scenario = Scenario(f"s{number}", {}, "train", "refund", 1)
    return [
        Trajectory(f"s{number}", scenario, index, [], outcome={"success": mark == "+"})
        for index, mark in enumerate(outcomes)
    ]


def test_an_earlier_run_gives_success_discordance_and_variation(tmp_path):
    episodes = [*group(0, "++--"), *group(1, "----"), *group(2, "++++"), *group(3, "+---")]
    runs = [
        pretend(
            tmp_path,
            seed=seed,
            collect=COLLECT,
            episodes={"evaluate[sft]": "+---" * 8, "evaluate[final]": "++--" * 8},
            files={"collect[1]": lambda folder: write_trajectories(folder / "trajectories.parquet", episodes)},
        )
        for seed in (0, 1)
    ]
    for run, gain in zip(runs, (0.1, 0.2), strict=True):
        Records(tmp_path).write(replace(run, result={"gain": gain}))
    spec = spec_of(tmp_path, seed=2, collect=COLLECT)
    power = plan_power(spec, plan(spec), plan, gain=0.15)
    assert power
    assert power.success == pytest.approx(7 / 16)
    assert power.signal_share == pytest.approx(0.5)
    assert power.discordance == pytest.approx(0.25)
    assert (power.seeds_at_least, power.seeds) == (False, seeds_for_gain(0.15, 0.05 * 2**0.5))
    assert f"collect[1] of run {runs[1].short}" in power.source
    assert [change.override for change in power.changes if "scenarios" not in change.override] == [
        f"seeds=[{','.join(map(str, range(power.seeds or 0)))}]"
    ]
    assert "  groups expected to differ in success: 50 %" in show(power)


def test_little_signal_is_a_warning_with_a_group_size(tmp_path):
    spec = spec_of(tmp_path)
    power = plan_power(spec, plan(spec), plan, success=0.01)
    assert power
    assert "of the groups are expected to differ in success; set collect.group_size=" in power.warnings[0] or (
        power.group_size is None
    )
    assert any("differ in success" in text for text in power.warnings)


ADVICE = [
    (
        {"model": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "source": "hub"}},
        "raise warmup.demonstrations=4, or choose easier tasks",
    ),
    (
        {"model": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "source": "hub"}, "warmup": None},
        "use a warmup, or choose easier tasks",
    ),
    ({}, None),
]


def test_advice_on_little_signal_fits_the_experiment(tmp_path):
    """Random weights test the flow: nothing is expected to succeed."""
    episodes = [*group(0, "----"), *group(1, "----")]
    files = {"collect[1]": lambda folder: write_trajectories(folder / "trajectories.parquet", episodes)}
    for number, (changes, words) in enumerate(ADVICE):
        root = tmp_path / str(number)
        pretend(root, collect=COLLECT, files=files, **changes)
        spec = spec_of(root, seed=2, collect=COLLECT, **changes)
        power = plan_power(spec, plan(spec), plan)
        assert power
        assert power.signal_share == 0
        advice = [text for text in power.warnings if "differ in success" in text]
        assert [text.partition("; ")[2] for text in advice] == ([words] if words else [])
