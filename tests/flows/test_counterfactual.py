"""`flows.explain replay` on a real evaluation of a tiny model."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from components.artifacts import Store
from components.errors import ResourceError
from components.trajectories.schema import History, Message, Scenario, Trajectory
from components.trajectories.store import read_trajectories
from flows.experiment.compose import compose
from flows.explain.__main__ import EXPLAIN
from flows.influence.counterfactual import branch_of
from tests.flows.parity_environment import Doors
from tests.flows.pretend import pretend, run_stages
from tests.flows.test_influence import SMALL

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("root_logger")]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Return the record of a run that only evaluates, and its root."""
    folder, root = tmp_path_factory.mktemp("configs"), tmp_path_factory.mktemp("runs")
    (folder / "environment").mkdir()
    (folder / "environment" / "doors.yaml").write_text("_target_: tests.flows.parity_environment.Doors\n")
    small = [line for line in SMALL if line != "environment=parity"]
    lines = [*small, "environment=doors", "agent.max_turns=2", "rounds=0", "evaluate.scenarios=4", f"root={root}"]
    return run_stages(compose(lines, config_dir=folder))[0], root


def wilson(k, n, z=1.959963984540054):
    centre, half = k / n + z * z / (2 * n), z * math.sqrt(k * (n - k) / n**3 + z * z / (4 * n * n))
    return [(centre + sign * half) / (1 + z * z / n) for sign in (-1, 1)]


def test_an_episode_is_continued_with_both_answers_and_refused_where_it_cannot_be(evaluated, capsys, monkeypatch):
    record, root = evaluated
    (stage,) = (stage for stage in record.stages if stage.request["stage"] == "evaluate")
    recorded = next(iter(read_trajectories(Store(root / "artifacts").find(stage.key).path / "trajectories.parquet")))

    def call(*arguments):
        code = EXPLAIN.main(["replay", record.short, *arguments, "--trust", f"root={root}"])
        return code, *capsys.readouterr()

    answer = ["--step", "1", "--tool-answer", "The door is shut"]
    code, out, err = call(recorded.id, "--step", "1", "--tool-answer", "x" * 1000, "--continuations", "1")
    assert "x" * 299 + "…" in out, err
    code, out, err = call(recorded.id, *answer, "--continuations", "12", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert (data["stage"], data["episode"], data["success"]) == (stage.label, recorded.id, recorded.success)
    assert data["answers"] == ["The door is open", "The door is shut"]
    rates = []
    for name in ("original", "other"):
        arm, wins = data[name], data[name]["successes"]
        changed = 12 - wins if recorded.success else wins
        for part, count in (("success", wins), ("changed", changed)):
            assert arm[part]["rate"] == count / 12
            assert arm[part]["interval"] == pytest.approx(wilson(count, 12), abs=1e-9)
        rates.append(wins / 12)
    assert data["effect"]["change"] == rates[1] - rates[0]
    low, high = data["effect"]["interval"]
    assert low <= data["effect"]["change"] <= high
    code, out, err = call(recorded.id, *answer[:2], "--continuations", "12")
    assert code == 0, err
    assert f"original 12  {rates[0]:.3f} [" in out, "the same seeds without another answer"
    assert "other" not in out
    for arguments, message in {
        (recorded.id, "--step", "2"): "--step: 2: a branch needs a response after it",
        ("nowhere/0", "--step", "1"): f"run {record.short} has no such episode; expected an id such as {recorded.id}",
        (recorded.id, "--step", "1", "--stage", "collect[1]"): f"has the stages {stage.label}",
    }.items():
        code, out, err = call(*arguments)
        assert (code, out, message in err) == (2, "", True), err
    for option, value in (("--temperature", "inf"), ("--temperature", "nan"), ("--continuations", "0")):
        with pytest.raises(SystemExit):
            call(recorded.id, *answer, option, value)
        assert f"{option} {value}: expected" in capsys.readouterr().err
    monkeypatch.setattr(Doors, "door", "new")
    code, _, err = call(recorded.id, *answer)
    assert (code, "environment: Doors gave other observations when the actions" in err) == (2, True), err


def test_a_run_that_ended_before_its_first_episodes_is_refused(tmp_path):
    with pytest.raises(ResourceError, match="has no finished collection or evaluation"):
        branch_of(SimpleNamespace(stages=[], short="ab"), Store(tmp_path), "door/0", 1, "evaluate[sft]")


def test_a_demonstration_of_the_solver_is_refused(tmp_path):
    talk = [Message("user", "Which door?"), Message("assistant", "left")]
    shown = Trajectory("door/0", Scenario("door", {}, "train"), 0, [History(talk)], policy="solver")
    run = pretend(tmp_path, rounds=1, episodes={"collect[sft]": [shown], "judge[sft]": [shown]})
    with pytest.raises(ResourceError, match=r"EPISODE door/0: demonstrated by the solver in collect\[sft\]"):
        branch_of(run, Store(tmp_path / "artifacts"), "door/0", 1, "collect[sft]")
