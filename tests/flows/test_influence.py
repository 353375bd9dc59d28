"""`flows.explain rejudge` and `flows.explain attribute` on a real run of a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from components.algorithms.policy_gradient.group_gradients import dot
from components.artifacts import Store
from components.trajectories.groups import by_scenario
from components.trajectories.store import load_scored, read_selection
from flows.experiment.compose import compose
from flows.explain import attribute as attribute_command
from flows.explain import rejudge as rejudge_command
from flows.influence import attribution, rounds, workplace
from tests.flows.pretend import pretend, run_stages

HERE = "tests.flows.parity_environment"
SMALL = [
    "+experiment=smoke",
    "allow=[tests]",
    "name=parity",
    "environment=parity",
    "reward.repetition_cost=0",
    "agent.format=chat",
    "agent.max_turns=1",
    "agent.max_tokens=4",
    "warmup=none",
    "deploy=none",
    "rounds=2",
    "collect.scenarios=4",
    "collect.group_size=4",
    "evaluate.scenarios=24",
    "evaluate.temperature=1",
    "algorithm.minibatches=2",
    "algorithm.learning_rate=0.02",
    "algorithm.max_kl=100",
]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("root_logger")]


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Return a folder with the environment and rewards of the tests."""
    folder = tmp_path_factory.mktemp("configs")
    for name in ("environment/Parity", "reward/negated", "reward/unscored", "reward/constant"):
        path = folder / f"{name.lower()}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"_target_: {HERE}.{name.partition('/')[2]}\n")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, configs):
    """Return the record of a real run of two rounds, and its root."""
    root = tmp_path_factory.mktemp("runs")
    return run_stages(compose([*SMALL, f"root={root}"], config_dir=configs))[0], root


@pytest.fixture
def called(trained, configs, capsys):
    """Return a function that calls a command with --json; it returns the exit code, the result and stderr."""

    def call(command, *arguments):
        record, root = trained
        own = ["--config-dir", str(configs)] if command is rejudge_command else []
        code = command.main([record.short, *arguments, "--trust", f"root={root}", "--json", *own])
        out, err = capsys.readouterr()
        return code, json.loads(out.strip().splitlines()[-1]) if code == 0 else None, err

    return call


def judged(trained, label):
    """Return the episodes of a round with the run's rewards."""
    record, root = trained
    store = Store(root / "artifacts")
    episodes, scores = (store.find(record.stage(f"{name}[{label}]").key).path for name in ("collect", "judge"))
    return load_scored(episodes / "trajectories.parquet", scores / "scores.parquet", None)


def test_a_reward_agrees_with_itself_and_opposes_its_negation(trained, called):
    code, data, err = called(rejudge_command, "reward=outcome", "reward=negated")
    assert code == 0, err
    assert [row["name"] for row in data["rewards"]] == ["own", "outcome", "negated"]
    groups = by_scenario(judged(trained, 2))
    mixed = [name for name, group in groups.items() if len({episode.reward for episode in group}) == 2]
    assert mixed, "a group must carry signal"
    assert data["round"] == 2
    assert data["episodes"] == 16
    same, opposed, also = data["pairs"]
    assert (same["first"], same["second"]) == ("own", "outcome")
    assert same["tau"] == pytest.approx(1.0)
    assert same["flipped"] == 0
    assert same["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert same["effect"] == 0
    assert opposed["tau"] == pytest.approx(-1.0)
    assert opposed["flipped"] == len(mixed) / len(groups)
    assert opposed["cosine"] == pytest.approx(-1.0, abs=1e-4)
    assert opposed["ranked"] == len(mixed)
    assert {flip["group"] for flip in opposed["flips"]} == set(mixed)
    assert opposed["interval"][0] <= opposed["effect"] <= opposed["interval"][1]
    assert also["tau"] == pytest.approx(-1.0)
    success = {row["name"]: row["success"] for row in data["rewards"]}
    assert opposed["effect"] == pytest.approx(success["negated"] - success["own"])
    page = Path(data["html"]).read_text()
    assert all(flip["episodes"][0]["id"].rpartition("/")[0] in page for flip in opposed["flips"])


def test_judging_the_step_and_the_evaluation_come_from_the_cache(called):
    assert called(rejudge_command, "reward=negated")[0] == 0
    code, _, err = called(rejudge_command, "reward=negated")
    assert code == 0
    for stage in ("judge[negated]", "filter[negated]", "train[negated]", "evaluate[negated]", "evaluate[before]"):
        assert f"{stage} cached" in err


def test_a_whole_round_of_the_runs_own_reward_is_the_round_of_the_run(called):
    code, data, err = called(rejudge_command, "reward=constant", "--whole-round", "--round", "2")
    assert code == 0
    assert "train[own] cached" in err, "the run has trained this round on this reward"
    assert data["control"]["interval"][0] <= data["control"]["effect"] <= data["control"]["interval"][1]
    assert "train[own reordered] ran" in err
    constant = data["rewards"][1]
    assert constant["signal"] == 0
    assert constant["gradient_norm"] == 0
    assert constant["effect"] == 0
    assert data["pairs"][0]["cosine"] is None
    assert data["pairs"][0]["tau"] is None


REFUSED = [
    (["reward=unscored"], "unscored scored none of the 16 finished episodes"),
    (["reward=outcom"], "outcome"),
    ([], "no reward to compare with the run's own"),
    (["reward.turn_cost=1"], "belongs to no reward"),
    (["reward=outcome", "environment=shop"], "environment: is not a key of a reward"),
    (["reward=outcome", "reward=outcome"], "outcome is given twice"),
    (["reward=outcome", "reward.turn_cots=1"], "turn_cost"),
    (["reward=outcome", "--round", "7"], "--round 7: run"),
]


def test_mistakes_in_the_rewards_are_refused(called):
    for arguments, message in REFUSED:
        code, _, err = called(rejudge_command, *arguments)
        assert (code, message in err, "Traceback" in err) == (2, True, False), err


def test_lost_scenarios_are_attributed_to_groups(trained, called):
    code, data, err = called(attribute_command, "--round", "1")
    assert code == 0, err
    assert data["lost"], "the round must lose a scenario"
    before, after = data["success"]
    assert data["change"] == pytest.approx(after - before)
    assert after - before == pytest.approx((data["gained"] - len(data["lost"])) / data["scenarios"])
    for lost in data["lost"]:
        influences = [group["influence"] for group in lost["groups"]]
        assert influences == sorted(influences)
        assert all(-1 <= group["cosine"] <= 1 for group in lost["groups"])
    sums = {row["group"]: row["influence"] for row in data["totals"]}
    assert list(sums.values()) == sorted(sums.values())
    first = data["lost"][0]["groups"][0]["group"]
    assert first in {episode.group for episode in judged(trained, 1)}
    assert data["lost"][0]["scenario"] in Path(data["html"]).read_text()


def test_the_influence_of_all_groups_is_that_of_the_batch(trained, called):
    """The sum over groups is the product of the gradient of the whole round with that of the likelihood, computed from
    the files of the run."""
    record, root = trained
    _, data, _ = called(attribute_command, "--round", "1")
    lost = data["lost"][0]
    run, spec = workplace.recorded_run(root, record.id, trust=True)
    with workplace.workplace(run, spec, "test") as place:
        result = attribution.attribute(place, rounds.round_of(run, 1))
        start = record.stage("train[1]").request["inputs"].get("start")
        assert start is None
        with place.gradients(result.trained.request) as gradients:
            batch = gradients.batch()
            likelihood = gradients.likelihood(result.lost[0].before, 1.0)
            (logprob,) = gradients.log_likelihoods([result.lost[0].before], 1.0)
    assert result.lost[0].scenario == lost["scenario"]
    total = sum(item.influence for item in result.lost[0].influences)
    assert total == pytest.approx(dot(batch, likelihood), rel=1e-3, abs=1e-9)
    sampled = [value for value in result.lost[0].before.histories[0].logprobs if value == value]
    assert logprob == pytest.approx(sum(sampled), abs=1e-3)
    assert lost["before"]["log_likelihood"] == pytest.approx(logprob)


def test_the_round_is_trained_again_without_a_group(trained, called):
    record, root = trained
    _, before, _ = called(attribute_command, "--round", "1")
    group = before["totals"][0]["group"]
    code, data, err = called(attribute_command, "--round", "1", "--without", group)
    assert code == 0, err
    without = data["without"]
    assert without["groups"] == [group]
    assert set(without["recovered"]) <= {lost["scenario"] for lost in data["lost"]}
    assert without["interval"][0] <= without["change"] <= without["interval"][1]
    assert without["success"] == pytest.approx(data["success"][1] + without["change"])
    for lost in data["lost"]:
        influences = {item["group"]: item["influence"] for item in lost["groups"]}
        assert lost["without"]["influence"] == pytest.approx(influences[group])
        assert lost["without"]["recovered"] == (lost["scenario"] in without["recovered"])
    assert data["control"]["groups"] == []
    assert data["control"]["success"] == pytest.approx(data["success"][1] + data["control"]["change"])
    _, _, err = called(attribute_command, "--round", "1", "--without", group)
    assert "train[1 without 1] cached" in err
    assert "train[1 reordered] cached" in err
    selection = next(
        artifact
        for artifact in Store(root / "artifacts").manifests()
        if artifact.stage == "filter" and artifact.metrics.get("dropped/without/left_out")
    )
    kept = {item.trajectory_id for item in read_selection(selection.path / "selection.parquet") if item.kept}
    run_selection = Store(root / "artifacts").find(record.stage("filter[1]").key)
    of_run = {item.trajectory_id for item in read_selection(run_selection.path / "selection.parquet") if item.kept}
    assert kept == {name for name in of_run if not name.startswith(f"{group}/")}


def test_an_unknown_group_is_refused_with_those_of_the_round(called):
    code, _, err = called(attribute_command, "--round", "1", "--without", "train-999")
    assert code == 2
    assert "--without: 'train-999' is no group with signal of round 1; it has train-" in err
    assert "evaluate[" not in err


def test_the_command_says_that_a_run_is_interrupted(trained, called):
    record, root = trained
    file = next(root.rglob(f"{record.id}.json"))
    text = file.read_text()
    file.write_text(text.replace('"FINISHED"', '"KILLED"'))
    try:
        _, _, err = called(attribute_command, "--round", "1", "--without", "train-999")
    finally:
        file.write_text(text)
    assert f"run {record.short} is killed: the rounds that it has finished are used" in err


def test_a_round_that_lost_nothing_is_refused_with_the_rounds(trained, called, monkeypatch):
    episodes = workplace.Workplace.evaluated
    monkeypatch.setattr(workplace.Workplace, "evaluated", lambda self, label, policy: episodes(self, "before 1", None))
    code, _, err = called(attribute_command, "--round", "1")
    assert code == 2
    assert "round 1 of run" in err
    assert "lost no held-out scenario" in err
    assert "Rounds: 1 (" in err


@pytest.mark.parametrize("command", [rejudge_command, attribute_command])
def test_a_run_without_rounds_is_refused_with_its_stages(tmp_path, command, capsys):
    run = pretend(tmp_path, rounds=0)
    arguments = ["reward=outcome"] if command is rejudge_command else []
    assert command.main([run.short, *arguments, "--trust", f"root={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert f"run {run.short} (test, flow=online_rl) has no round" in err
    assert "train[sft]" in err


def test_an_algorithm_without_the_gradient_of_a_group_is_refused(tmp_path, capsys):
    run = pretend(tmp_path, algorithm={"name": "ppo"})
    assert attribute_command.main([run.short, "--trust", f"root={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert f"algorithm: ppo: run {run.short}: it has no policy gradient of a group" in err
    assert "dr_grpo" in err


def test_refills_belong_to_the_round(tmp_path):
    run = pretend(tmp_path)
    trained = rounds.round_of(run, 1)
    assert list(trained.collections) == [""]
    request = dict(trained.training.request)
    inputs = request["inputs"]
    refill = {f"{name}+1": inputs[name] for name in ("trajectories", "scores", "selection")}
    stage = replace(trained.training, request={**request, "inputs": {**inputs, **refill}})
    run.stages[run.stages.index(trained.training)] = stage
    assert list(rounds.round_of(run, 1).collections) == ["", "+1"]
    assert rounds.round_of(run, None).number == 2
