"""A plan says what a run will do and why, before it starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from components.artifacts import Store
from components.compute.sky.spec import Offer
from components.errors import SchemaMismatch
from flows import plan as command
from flows.history.records import Records
from flows.plan import show
from flows.planning.earlier_stages import differences
from flows.planning.plan import plan
from tests.flows.pretend import edit_manifest, planned, pretend, spec_of
from tests.flows.processes import python
from tests.flows.test_online_rl import DATA

DIFFERENCES = [
    ({"seed": 3}, "collect[1]", "seed: 0 → 3"),
    ({"evaluate": {"scenarios": 2}}, "evaluate[start]", "evaluate.scenarios: null → 2"),
    ({"reward": {**DATA["reward"], "turn_cost": 0.1}}, "judge[1]", "turn_cost"),
]
FASTER = {"name": "grpo", "learning_rate": 5e-4}


def reasons(root: Path, **changes) -> dict[str, list[str]]:
    return {label: stage.why for label, stage in planned(root, **changes).items() if stage.why}


def test_at_first_everything_runs_and_nothing_is_known(tmp_path):
    found = plan(spec_of(tmp_path))
    assert {one.status for one in found.stages} == {"run"}
    assert found.stages[0].why == ["no similar stage has run"]
    assert found.seconds is None
    assert found.cost is None
    assert list(tmp_path.iterdir()) == []


def test_after_the_run_everything_is_cached_but_what_a_change_determines(tmp_path):
    run = pretend(tmp_path)
    found = plan(spec_of(tmp_path))
    assert {one.label: one.key for one in found.stages} == {one.label: one.key for one in run.stages}
    assert {one.status for one in found.stages} == {"cached"}
    assert (found.seconds, found.cost) == (0, 0)
    collect = {"scenarios": 4, "group_size": 2, "concurrency": 3}
    assert reasons(tmp_path, compute={"default": "process", "save_every": 1}, collect=collect) == {}
    why = reasons(tmp_path, algorithm=FASTER)
    assert list(why) == [
        "train[1]",
        *(f"{stage}[2]" for stage in ("collect", "judge", "filter", "train")),
        "evaluate[final]",
        "deploy",
    ]
    assert why["train[1]"] == ["algorithm.learning_rate: 0.0001 → 0.0005"]
    assert why["collect[2]"] == ["policy: train[1] is recomputed"]
    assert why["judge[2]"] == ["trajectories: collect[2] is recomputed"]
    assert "start: train[1] is recomputed" in why["train[2]"]
    assert "experiment.algorithm.learning_rate: 0.0001 → 0.0005" in why["deploy"]
    assert run.short not in str(why)
    for changes, label, reason in DIFFERENCES:
        assert reason in "; ".join(reasons(tmp_path, **changes)[label])
    stages = planned(tmp_path, fork=f"{run.short}@1", rounds=3)
    assert list(stages)[:2] == ["evaluate[start]", "collect[2]"]
    assert stages["train[2]"].status == "cached"


def test_the_nearest_of_several_runs_gives_the_reason(tmp_path):
    pretend(tmp_path, rounds=1)
    pretend(tmp_path, rounds=1, algorithm={**FASTER, "epochs": 2})
    why = reasons(tmp_path, rounds=1, algorithm=FASTER)
    assert why["train[1]"] in (["algorithm.epochs: 2 → 1"], ["algorithm.learning_rate: 0.0001 → 0.0005"])


def test_a_stage_whose_artifact_is_gone_says_so(tmp_path):
    run = pretend(tmp_path)
    shutil.rmtree(Store(tmp_path / "artifacts").path(run.stage("filter[2]").key))
    why = reasons(tmp_path)
    assert list(why) == ["filter[2]", "train[2]", "evaluate[final]", "deploy"]
    assert why["filter[2]"] == [f"run {run.short} had it, but it is no longer in the store"]


def test_unfinished_work_is_seen(tmp_path):
    pretend(tmp_path, stop_at="train[2]")
    train = planned(tmp_path)["train[2]"]
    assert train.status == "run"
    (Store(tmp_path / "artifacts").scratch(train.key) / "unfinished").mkdir()
    train = planned(tmp_path)["train[2]"]
    assert (train.status, train.why) == ("unfinished", ["resumes an interrupted attempt"])


def test_time_and_cost_follow_from_earlier_stages(tmp_path):
    run = pretend(tmp_path, rounds=1)
    for one in run.stages:
        edit_manifest(tmp_path, one, seconds=36.0)
    compute = {"price": 10, "prices": {"train": 100, "evaluate": 0}}
    found = plan(spec_of(tmp_path, rounds=1, seed=1, collect={"scenarios": 8, "group_size": 2}, compute=compute))
    by_label = {one.label: one for one in found.stages}
    assert by_label["collect[1]"].seconds == pytest.approx(72)  # twice as many episodes
    assert by_label["collect[1]"].cost == pytest.approx(0.2)
    assert (by_label["train[1]"].seconds, by_label["train[1]"].cost) == pytest.approx((36, 1.0))
    assert by_label["evaluate[final]"].cost == 0
    assert found.cost == pytest.approx(sum(one.cost or 0 for one in found.stages))


PROCESS = {"default": "process"}


TIMES = [
    ({}, {}, []),
    (PROCESS, {}, ["include loading packages and model where a process was new"]),
    (PROCESS, PROCESS, ["include loading packages and model where a process was new"]),
    ({}, PROCESS, ["exclude the start of their processes"]),
]


def test_the_plan_says_whether_times_include_the_start_of_processes(tmp_path):
    for number, (earlier, later, expected) in enumerate(TIMES):
        root = tmp_path / str(number)
        pretend(root, rounds=1, compute=earlier)
        notes = plan(spec_of(root, rounds=1, seed=1, compute=later)).notes
        about_times = [note for note in notes if note.startswith("the times of ")]
        assert [words in note for note, words in zip(about_times, expected, strict=True)] == [True] * len(expected)
        assert all("collect" in note and "train" in note for note in about_times)


def test_demonstrations_say_nothing_of_the_episodes_of_a_policy_nor_sft_of_grpo(tmp_path):
    pretend(tmp_path, stop_at="evaluate[sft]")
    stages = planned(tmp_path, rounds=1)
    for label in ("collect[1]", "train[1]"):
        assert (stages[label].why, stages[label].seconds) == (["no similar stage has run"], None)


def test_the_time_is_the_median_of_those_that_are_equally_near(tmp_path):
    """The first stage of a process also imports what all of them need."""
    run = pretend(tmp_path, rounds=1)
    for seconds, one in zip((30.0, 2.0, 3.0), [s for s in run.stages if s.label.startswith("evaluate")], strict=True):
        edit_manifest(tmp_path, one, seconds=seconds)
    assert planned(tmp_path, rounds=1, algorithm=FASTER)["evaluate[final]"].seconds == 3.0


def test_the_time_of_another_model_is_no_estimate_and_rounds_count_from_one(tmp_path):
    pretend(tmp_path, rounds=1)
    stages = planned(tmp_path, rounds=1, model={"name": "small", "source": "random"})
    for label in ("evaluate[start]", "collect[1]", "train[1]"):
        assert stages[label].seconds is None
        assert any(reason.startswith("model.name: ") for reason in stages[label].why)
    assert planned(tmp_path, rounds=2)["collect[2]"].why[0] == "round: 1 → 2"


def test_long_values_are_cut_where_they_differ():
    command = "python -m agents.play --environment tictactoe --limit "
    cases = {
        (f"{command}3", f"{command}4"): "command: …e --limit 3 → …e --limit 4",
        (command, f"{command}4 --turns 5"): "command: …e --limit  → …e --limit 4 --turns 5",
        ("a" * 60, "b" * 60): f"command: {'a' * 37}… → {'b' * 37}…",
        (f"{command[:30]}a", f"{command[:30]}b"): f"command: {command[:30]}a → {command[:30]}b",
    }
    for (before, after), text in cases.items():
        assert list(map(str, differences({"command": before}, {"command": after}))) == [text]


def test_what_a_newer_version_has_written_is_refused(tmp_path):
    run = pretend(tmp_path, rounds=1)
    edit_manifest(tmp_path, run.stage("deploy"), schema_version=99)
    with pytest.raises(SchemaMismatch, match="newer version of Espalier"):
        plan(spec_of(tmp_path, rounds=1))


EPISODES = [
    ({}, 16),
    ({"reflection": {}}, 32),
    ({"opponent": "policy", "environment": "tictactoe"}, 32),
    ({"opponent": "base", "environment": "tictactoe"}, 16),
    ({"continuations": 3}, 16 * (1 + 3 * 3)),
    ({"teacher": {"model": {"name": "tiny", "source": "random"}, "samples": 2}}, 16 + 4 * 2),
]


def test_a_plan_says_how_many_episodes_are_played_at_most(tmp_path):
    game = {"_target_": "components.environments.games.tictactoe.TicTacToe", "train": 8, "heldout": 4}
    for ways, count in EPISODES:
        collect = {"scenarios": 4, "group_size": 4, **ways}
        changes = {"environment": game} if collect.pop("environment", None) else {}
        found = plan(spec_of(tmp_path, collect=collect, agent={"max_turns": 4}, algorithm={"name": "sft"}, **changes))
        assert {one.label: one.episodes for one in found.stages}["collect[1]"] == count
        assert f" {count} " in next(line for line in show(found).splitlines() if line.startswith("collect[1]"))


def test_a_plan_changes_nothing(tmp_path):
    run = pretend(tmp_path)
    (tmp_path / "artifacts" / run.stages[3].key / "data").write_text("damaged")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    plan(spec_of(tmp_path))
    plan(spec_of(tmp_path, seed=7))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_text_names_every_stage_with_its_first_reason_and_sums_up(tmp_path):
    pretend(tmp_path, rounds=1)
    found = plan(spec_of(tmp_path, rounds=1, algorithm={**FASTER, "epochs": 2}))
    text = show(found)
    assert "evaluate[start]" in text
    assert "algorithm.learning_rate: 0.0001 → 0.0005; 1 more" in text
    assert "algorithm.epochs" not in text
    assert "12 stages, 9 cached, 3 to run" in text
    assert "algorithm.epochs: 1 → 2" in show(found, why=True)
    twice = replace(found.stages[0], inputs={"trajectories": "import", "scores": "import", "start": "run@1"})
    assert " import, run@1 " in show(replace(found, stages=[twice]))


def test_an_experiment_without_an_earlier_run_is_compared_with_others_on_request(tmp_path, capsys):
    assert not plan(spec_of(tmp_path, name="new")).new  # nothing to compare with
    pretend(tmp_path, rounds=1)
    changes = {"rounds": 1, "name": "new", "environment": {**DATA["environment"], "train": 32}}
    found = plan(spec_of(tmp_path, **changes))
    text = show(found)
    assert len(text.splitlines()) == 1 + len(found.stages) + 2
    assert "→" not in text
    assert text.endswith(f"no earlier run of new below {tmp_path}; --why compares it with other experiments\n")
    assert "environment.train: 16 → 32" in show(found, why=True)
    assert not plan(spec_of(tmp_path, rounds=2)).new


COURSE = {"rounds": 4, "evaluate": {"every": 1}, "early_stopping": {"patience": 1}}
FALLING = {f"evaluate[{name}]": {"success": value} for name, value in (("sft", 0.3), ("1", 0.6), ("2", 0.5))}


def test_rounds_that_may_end_early_are_planned_to_the_last_one_at_most(tmp_path):
    found = plan(spec_of(tmp_path, **COURSE))
    assert [one.label for one in found.stages if one.stage == "evaluate"] == [
        f"evaluate[{name}]" for name in ("start", "sft", 1, 2, 3, "final")
    ]
    assert found.at_most
    assert found.notes == ["this is an upper bound: early stopping may end the run earlier"]
    assert f"test: at most {len(found.stages)} stages" in show(found)
    assert show(found).endswith("may end the run earlier\n")
    assert found.to_json()["at_most"] is True
    assert not plan(spec_of(tmp_path, rounds=4, evaluate={"every": 1})).at_most
    spec = spec_of(tmp_path, evaluate={"every": 1}, guards={"no_signal": "stop", "reward_hacking": "stop"})
    assert plan(spec).notes == [
        "this is an upper bound: guards.no_signal or guards.reward_hacking may end the run earlier"
    ]


def test_an_early_end_is_known_where_its_evaluations_are_there(tmp_path):
    run = pretend(tmp_path, metrics=FALLING, **COURSE)
    found = plan(spec_of(tmp_path, **COURSE))
    assert [one.label for one in found.stages] == [one.label for one in run.stages]
    assert {one.status for one in found.stages} == {"cached"}
    assert (found.at_most, found.notes) == (False, [run.notices[0].message])
    patient = plan(spec_of(tmp_path, **{**COURSE, "early_stopping": {"patience": 2}}))
    assert patient.at_most
    assert next(one.label for one in patient.stages if one.status != "cached") == "collect[3]"


def test_the_best_policy_is_the_last_one_until_all_are_evaluated(tmp_path):
    course = {"rounds": 3, "evaluate": {"every": 2}, "deploy": {"policy": "best"}}
    before = planned(tmp_path, **course)
    assert before["deploy"].inputs["policy"] == "train[3]"
    assert (before["evaluate[3]"].status, before["evaluate[final]"].status) == ("run", "cached")
    assert "the run chooses it after all evaluations" in plan(spec_of(tmp_path, **course)).notes[0]
    pretend(tmp_path, metrics=FALLING | {"evaluate[3]": {"success": 0.1}}, **course)
    found = plan(spec_of(tmp_path, **course))
    assert {one.label: one for one in found.stages}["deploy"].inputs["policy"] == "train[2]"
    assert "after round 2" in found.notes[0]


def test_the_command(tmp_path, capsys):
    assert command.main(["+experiment=smoke", f"root={tmp_path}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in found["stages"]][-1] == "deploy"
    assert found["stages"][0] | {"key": None} == {
        "label": "evaluate[start]",
        "seed": 0,
        "stage": "evaluate",
        "step": -1,
        "inputs": {},
        "status": "run",
        "why": ["no similar stage has run"],
        "where": "local",
        "seconds": None,
        "cost": None,
        "key": None,
        "beside": None,
        "overlapped_seconds": 0.0,
        "episodes": 8,
        "shards": [],
        "shard_count": 1,
        "shard_count_estimated": False,
    }
    assert command.main(["+experiment=smok"]) == 2
    assert "+experiment=smoke" in capsys.readouterr().err
    for fork in (["fork=latest@2"], ["--fork", "latest@2"]):
        assert command.main(["+experiment=smoke", f"root={tmp_path}", *fork, "rounds=3"]) == 2
        assert "no run below" in capsys.readouterr().err


def test_commands_that_only_read_import_neither_torch_nor_prefect_nor_mlflow(tmp_path):
    one, other = (pretend(tmp_path, rounds=1, seed=seed) for seed in (0, 1))
    code = f"""
import sys
from flows.compare import main as compare
from flows.plan import main as plan
from flows.runs.lineage import main as lineage
root = {f"root={tmp_path}"!r}
assert plan(["+experiment=quickstart", root]) == compare([{one.id!r}, {other.id!r}, root]) == 0
assert lineage([{one.id!r}, root]) == 0
print(sorted({{"torch", "transformers", "prefect", "mlflow", "trl", "peft"}} & set(sys.modules)))
"""
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert len(Records(tmp_path).all()) == 2  # a plan adds no run


def judged(**price):
    """A reward that asks a judge behind a URL."""
    asks = {"name": "served", "url": "http://127.0.0.1:9/v1", "model": "judge", **price}
    return {"reward": {"_target_": "components.rewards.judges.ruler.Ruler", "model": asks}}


def test_what_judges_cost_follows_from_what_they_did_for_an_episode_with_the_same_reward(tmp_path):
    changes = judged(price={"input": 1, "output": 2})
    figures = {"cost": 0.6, "scored": 5.0, "unscored": 1.0}  # 0.1 an episode
    pretend(tmp_path, rounds=1, metrics={"judge[1]": figures, "evaluate[final]": figures}, **changes)
    stages = planned(tmp_path, rounds=1, seed=1, collect={"scenarios": 8, "group_size": 2}, **changes)
    assert (stages["judge[1]"].cost, stages["collect[1]"].cost) == (pytest.approx(1.6), 0)
    other = {"reward": {**changes["reward"], "seed": 7}}
    assert planned(tmp_path, rounds=1, **other)["judge[1]"].cost is None
    free = plan(spec_of(tmp_path, rounds=1, seed=1))
    assert {one.cost for one in free.stages if one.stage == "judge"} == {0}


def test_what_judges_of_unknown_price_cost_is_not_known(tmp_path):
    changes = judged()
    figures = {"cost": 0.0, "unpriced": 6.0, "scored": 6.0, "unscored": 0.0}
    pretend(tmp_path, rounds=1, metrics={"judge[1]": figures}, **changes)
    found = plan(spec_of(tmp_path, rounds=1, seed=1, **changes))
    assert {one.label: one.cost for one in found.stages}["judge[1]"] is None
    assert found.cost is None
    assert "cost unknown for 4 of the others" in show(found)


def test_what_the_run_lacks_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    python = str(tmp_path / "nowhere")
    served = {"register_model": True, "target": {"name": "local", "engine": "vllm", "python": python}}
    for changes, words in (
        (judged(key_variable="JUDGE_KEY"), "reward.model.key_variable: the environment variable JUDGE_KEY is not set"),
        (
            {"inference": {"name": "vllm", "python": python}},
            f"inference.python: vLLM's environment is not there ({python})",
        ),
        ({"deploy": served}, f"deploy.target.python: {python}, the Python of vLLM's environment, does not exist"),
    ):
        assert f"the run cannot start yet: {words}" in show(plan(spec_of(tmp_path, **changes)))
    monkeypatch.setenv("JUDGE_KEY", "x")
    assert "cannot start" not in show(plan(spec_of(tmp_path, **judged(key_variable="JUDGE_KEY"))))


def test_machines_that_skypilot_provides_are_priced_by_its_optimizer(tmp_path, monkeypatch):
    pretend(tmp_path)
    monkeypatch.setattr("flows.planning.earlier_stages.SimilarStage.seconds_for", lambda near, request: 7200.0)
    slurm = {"name": "sky", "infra": "slurm", "autostop": None}
    gpu, cpu = {**slurm, "accelerators": "H100:1"}, {**slurm, "cpus": "2+"}
    compute = {
        "places": {"local": {"name": "local"}, "gpu": gpu, "cpu": cpu, "own": cpu, "idle": cpu},
        "stages": {"train": "gpu", "filter": "cpu", "judge": "own", "feedback": "idle"},
        "prices": {"judge": 9.0},
    }
    shared = {"store": (tmp_path / "store").as_uri(), "compute": compute}
    asked = []

    def ask(places):
        asked.append(sorted(places))
        found = {name: Offer("cpu_4x on lambda/us-west-1", 0.5) for name in places}
        return {**found, "gpu": Offer("H100:1 on any cloud", None, "H100:1 is not available")}

    found = plan(spec_of(tmp_path, seed=1, **shared), ask=ask)
    assert asked == [["cpu", "gpu", "idle"]]  # once, and not where a price is given
    by_label = {one.label: one for one in found.stages}
    for label, cost in {"filter[1]": 1.0, "judge[1]": 18.0, "collect[1]": 0.0, "train[1]": None}.items():
        assert by_label[label].cost == cost
    text = show(found)
    assert "cpu: cpu_4x on lambda/us-west-1, 0.50 per hour by SkyPilot's optimizer" in text
    assert "gpu: unknown price: H100:1 is not available" in text
    assert "judge on own: 2+ CPUs on slurm: 9.00 per hour by compute.prices" in text
    assert "idle:" not in text  # no stage of this run is there
    kept = plan(spec_of(tmp_path, **shared), ask=ask)
    assert (kept.cost, len(asked)) == (0, 1)  # everything is found, nothing is asked


def test_a_sweep_is_planned_by_one_of_its_points(tmp_path, capsys):
    assert command.main(["+experiment=search", f"root={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "search: 24 stages" in text
    assert "this is the plan of one point" in text
