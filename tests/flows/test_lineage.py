"""Lineage: ancestors and descendants of an artifact."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from components.artifacts import Store
from components.artifacts.manifest import content_digest
from components.errors import ResourceError
from flows.history.lineage_graph import Lineage
from flows.history.records import Records
from flows.reporting.lineage import origins, show, to_json
from flows.runs.lineage import main
from tests.flows.pretend import pretend

FED = ["filter", "judge", "collect"]


def steps(found) -> list[tuple[str, list[str]]]:
    """Return the labels of each step's head and of its other nodes."""
    return [(step.head.label, [one.label for one in step.others]) for step in found]


def fed(name) -> list[str]:
    return [f"{stage}[{name}]" for stage in FED]


def test_a_checkpoint_goes_back_a_step_for_each_round_and_forward_to_what_was_made_from_it(tmp_path):
    run = pretend(tmp_path)
    lineage = Lineage(tmp_path)
    key = run.stage("train[2]").key
    assert steps(lineage.back(key)) == [("train[2]", fed(2)), ("train[1]", fed(1)), ("train[sft]", fed("sft"))]
    nodes = lineage.ancestors(key)
    assert len({node.key for node in nodes}) == len(nodes) == 12
    assert {node.key for node in nodes} == {
        stage.key for stage in run.stages if stage.label.partition("[")[0] in (*FED, "train")
    }
    order = [node.key for node in nodes]
    for node in nodes:
        assert all(order.index(node.key) < order.index(below) for below in node.inputs.values())
    assert steps(lineage.forward(run.stage("train[sft]").key)) == [
        ("train[sft]", ["evaluate[sft]"]),
        ("train[1]", fed(1)),
        ("train[2]", [*fed(2), "evaluate[final]", "deploy"]),
    ]
    assert steps(lineage.forward(run.stage("judge[2]").key)) == [
        ("judge[2]", []),
        ("train[2]", ["filter[2]", "evaluate[final]", "deploy"]),
    ]
    assert steps(lineage.forward(run.stage("deploy").key)) == [("deploy", [])]


def test_any_artifact_has_a_lineage(tmp_path):
    run = pretend(tmp_path, algorithm={"name": "grpo", "reference": "start"})
    lineage = Lineage(tmp_path)
    assert steps(lineage.back(run.stage("judge[2]").key)) == [
        ("judge[2]", ["collect[2]"]),
        ("train[1]", fed(1)),
        ("train[sft]", fed("sft")),
    ]
    heads = [step.head.label for step in lineage.back(run.stage("deploy").key)]
    assert heads == ["deploy", "train[2]", "train[1]", "train[sft]"]
    assert set(steps(lineage.back(run.stage("deploy").key))[0][1]) == {
        f"evaluate[{n}]" for n in ("start", "sft", "final")
    }
    (first, *_) = origins(lineage, run.stage("train[2]").key)
    assert first.goes_on == "train[1] (start, policy), train[sft] (reference)"


def test_what_holds_is_told_once_and_again_where_it_changes(tmp_path):
    reward = {"_target_": "components.rewards.rules.outcome.Outcome", "turn_cost": 0.25}
    first = pretend(tmp_path, git_commit="a" * 40)
    fork = pretend(tmp_path, fork=f"{first.short}@1", rounds=3, reward=reward, seed=1, git_commit="b" * 40)
    lineage = Lineage(tmp_path)
    ancestors = origins(lineage, fork.stage("train[3]").key)
    assert [origin.label for origin in ancestors] == ["train[3]", "train[2]", "train[1]", "train[sft]"]
    facts = [origin.facts for origin in ancestors]
    assert facts[0]["run"] == f"{fork.short} test seed 1, commit {'b' * 40}"
    assert facts[0]["reward"].startswith("reward.outcome ")
    assert "turn_cost=0.25" in facts[0]["reward"]
    assert facts[0]["filter"].startswith("filter.signal ")
    assert facts[0]["algorithm"].startswith("grpo ")
    assert facts[0]["environment"].startswith("environment.shop ")
    versions = [f"{stage} {first.stage(f'{stage}[1]').version}" for stage in ("train", *FED)]
    assert facts[0]["versions of stages"] == ", ".join(versions)
    assert facts[1] == {}
    assert set(facts[2]) == {"run", "reward"}
    assert "turn_cost=0.0" in facts[2]["reward"]
    assert set(facts[3]) == {"algorithm", "filter", "actor", "agent"}
    assert facts[3]["filter"] == "filter.successful"


def test_the_run_that_made_it_is_not_the_one_that_found_it(tmp_path):
    first = pretend(tmp_path, git_commit="a" * 40)
    second = pretend(tmp_path, git_commit="b" * 40)
    key = second.stage("train[2]").key
    assert second.stage("train[2]").status == "cached"
    lineage = Lineage(tmp_path)
    assert lineage.node(key).run == first.id
    assert lineage.tags(key)["git_commit"] == "a" * 40
    Records(tmp_path).forget(first)
    forgotten = Lineage(tmp_path)
    assert (forgotten.node(key).run, forgotten.node(key).label) == (None, "train[2]")
    assert "git_commit" not in forgotten.tags(key)
    assert "made by an unknown run: no record contains it" in show(forgotten, key)


def test_without_records_the_manifests_tell_it(tmp_path):
    run = pretend(tmp_path, rounds=1)
    key = run.stage("train[1]").key
    shutil.rmtree(tmp_path / "records")
    lineage = Lineage(tmp_path)
    assert lineage.resolve(key[:10]) == key
    assert steps(lineage.back(key)) == [("train", FED), ("train", FED)]
    assert lineage.node(key).version is None
    assert "made from it" in show(lineage, key)


def test_what_is_gone_from_the_store_is_told_from_the_records(tmp_path):
    run = pretend(tmp_path)
    store = Store(tmp_path / "artifacts")
    for label in ("train[1]", "collect[2]"):
        shutil.rmtree(store.path(run.stage(label).key))
    lineage = Lineage(tmp_path)
    key = run.stage("train[2]").key
    assert steps(lineage.back(key)) == [("train[2]", fed(2)), ("train[1]", fed(1)), ("train[sft]", fed("sft"))]
    assert not lineage.node(run.stage("train[1]").key).present
    text = show(lineage, key)
    assert f"collect[2] {run.stage('collect[2]').key[:12]} (deleted)" in text
    assert "no longer in the store; shown from the records" in show(lineage, run.stage("train[1]").key)
    Records(tmp_path).forget(run)
    assert steps(Lineage(tmp_path).back(key))[0] == ("train", ["filter", "judge", *["not known"] * 2])


def test_the_names_of_checkpoints_are_those_of_forks(tmp_path):
    run = pretend(tmp_path)
    fork = pretend(tmp_path, fork=f"{run.short}@1", rounds=3, seed=1)
    lineage = Lineage(tmp_path)
    assert lineage.resolve(run.short) == lineage.resolve(f"{run.id}@2") == run.stage("train[2]").key
    assert lineage.resolve(f"{run.short}@0") == run.stage("train[sft]").key
    assert lineage.resolve(f"{fork.short}@1") == run.stage("train[1]").key
    assert lineage.resolve("latest") == lineage.resolve("test") == fork.stage("train[3]").key
    assert lineage.resolve(run.stage("judge[1]").key[:8]) == run.stage("judge[1]").key


def test_a_run_alone_is_its_final_policy_or_its_last_checkpoint(tmp_path):
    measured = {f"evaluate[{name}]": {"success": value} for name, value in (("sft", 0.1), ("1", 0.5), ("2", 0.2))}
    course = {"rounds": 5, "evaluate": {"every": 1}, "early_stopping": {"patience": 1}, "metrics": measured}
    last = pretend(tmp_path, **course)
    best = pretend(tmp_path, **course, seed=1, deploy={"policy": "best"})
    assert [notice.step for notice in best.notices] == [2, 1]
    lineage = Lineage(tmp_path)
    assert lineage.resolve(last.short) == last.stage("train[2]").key
    assert lineage.resolve(best.short) == best.stage("train[1]").key == lineage.resolve(f"{best.short}@1")
    assert lineage.resolve(best.short) == best.stage("deploy").request["inputs"]["policy"]
    assert lineage.resolve(f"{best.short}@2") == best.stage("train[2]").key
    for changes, label in (({"stop_at": "evaluate[final]"}, "train[2]"), ({"rounds": 0}, "train[sft]")):
        run = pretend(tmp_path, **changes)  # without a final evaluation
        assert Lineage(tmp_path).resolve(run.short) == run.stage(label).key


def test_the_final_policy_of_a_fork_may_be_the_one_that_it_began_with(tmp_path):
    run = pretend(tmp_path)
    measured = {f"evaluate[{name}]": {"success": value} for name, value in (("start", 0.8), ("3", 0.5))}
    fork = pretend(tmp_path, fork=f"{run.short}@1", rounds=3, seed=3, metrics=measured, deploy={"policy": "best"})
    assert Lineage(tmp_path).resolve(fork.short) == run.stage("train[1]").key


UNKNOWN = {
    "nothing": "there is no run 'nothing'.*\n.*\nNo artifact has a key that begins with 'nothing' either",
    "latest@7": r"run \w{8} has no checkpoint of step 7; expected one of 0, 1",
    "latest@x": "has no checkpoint of step x",
    "nothing@1": "there is no run 'nothing'",
}


def test_what_does_not_exist_is_refused(tmp_path, capsys):
    pretend(tmp_path, rounds=1)
    for reference, message in UNKNOWN.items():
        with pytest.raises(ResourceError, match=message):
            Lineage(tmp_path).resolve(reference)
    assert main(["nothing", f"root={tmp_path}"]) == 2
    assert capsys.readouterr().err


def test_a_run_that_has_trained_nothing_and_a_folder_without_runs_are_refused(tmp_path):
    run = pretend(tmp_path, stop_at="train[sft]")
    with pytest.raises(ResourceError, match="has no checkpoint yet"):
        Lineage(tmp_path).resolve(run.short)
    with pytest.raises(ResourceError, match="no run below"):
        Lineage(tmp_path / "elsewhere").resolve("latest")


def test_what_may_be_a_run_or_a_key_is_refused(tmp_path):
    run = pretend(tmp_path, rounds=1)
    key = run.stage("train[1]").key
    record = json.loads((tmp_path / "records" / f"{run.id}.json").read_text())
    (tmp_path / "records" / f"{key[:32]}.json").write_text(json.dumps(record | {"id": key[:32]}))
    with pytest.raises(ResourceError, match=r"is a prefix of the run id .* and of the key"):
        Lineage(tmp_path).resolve(key[:8])
    keys = ["f" * 63 + digit for digit in "12"]
    for one in keys:
        shutil.copytree(tmp_path / "artifacts" / key, tmp_path / "artifacts" / one)
        manifest = tmp_path / "artifacts" / one / "manifest.json"
        manifest.write_text(manifest.read_text().replace(key, one))
    with pytest.raises(ResourceError, match="2 artifacts have a key that begins with 'ffff'"):
        Lineage(tmp_path).resolve("ffff")


def test_the_text_has_a_line_for_each_round_and_each_artifact_once(tmp_path):
    rounds = 12
    run = pretend(tmp_path, rounds=rounds, git_commit="a" * 40, overrides=["rounds=12"])
    key = run.stage(f"train[{rounds}]").key
    text = show(Lineage(tmp_path), key)
    back, _, forward = text.partition("\nmade from it\n")
    heads = [line.split()[1] for line in back.splitlines() if line.startswith("├─")]
    assert heads == [*(f"train[{number}]" for number in range(rounds, 0, -1)), "train[sft]"]
    for stage in run.stages:
        if stage.key != key:
            assert text.count(f"{stage.label} {stage.key[:12]}") == (
                stage.label != "evaluate[start]" and stage.label != "evaluate[sft]"
            )
    assert "a" * 40 in back
    assert "overrides rounds=12" in back
    assert "└─ the model tiny" in back
    assert [line.split()[1] for line in forward.splitlines()] == ["evaluate[final]", "deploy"]
    assert len(text.splitlines()) < rounds + 30
    assert "nothing was made from it" in show(Lineage(tmp_path), run.stage("deploy").key)


def test_a_long_chain_is_no_matter(tmp_path):
    """The chain is longer than Python's recursion limit."""
    lineage = Lineage(tmp_path)
    keys = [f"{number:064d}" for number in range(3000)]
    for key, below in zip(keys, [None, *keys], strict=False):
        folder = tmp_path / "artifacts" / key
        folder.mkdir(parents=True)
        manifest = {
            "manifest_version": 1, "kind": "checkpoint", "schema_version": 1, "stage": "train", "key": key,
            "digest": content_digest({}, []), "spec": {}, "seconds": 0, "metrics": {}, "files": {}, "volatile": [],
            "inputs": {"start": {"key": below, "digest": below}} if below else {},
        }  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert len(lineage.back(keys[-1])) == 3000


def test_the_json_has_every_artifact_and_the_runs_with_their_configuration(tmp_path, capsys):
    run = pretend(tmp_path, git_commit="a" * 40)
    assert main([f"{run.short}@1", f"root={tmp_path}", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(json.dumps(to_json(Lineage(tmp_path), run.stage("train[1]").key)))
    train = run.stage("train[1]")
    assert data["artifact"]["key"] == train.key
    assert data["artifact"]["inputs"] == train.request["inputs"]
    assert data["artifact"]["spec"]["algorithm"]["name"] == "grpo"
    assert {node["label"] for node in data["made_from"]} == {*fed(1), *fed("sft"), "train[sft]"}
    assert {node["label"] for node in data["made_from_it"]} == {*fed(2), "train[2]", "evaluate[final]", "deploy"}
    judge = next(node for node in data["made_from"] if node["label"] == "judge[1]")
    assert judge["spec"]["reward"]["_target_"] == "reward.outcome"
    assert judge["version"] == run.stage("judge[1]").version
    assert data["runs"] == {
        run.id: {
            "name": "test",
            "seed": 0,
            "status": "FINISHED",
            "started": run.started,
            "git_commit": "a" * 40,
            "overrides": [],
            "config": run.spec,
        }
    }


def test_the_tags_of_a_checkpoint(tmp_path):
    run = pretend(tmp_path, git_commit="a" * 40)
    assert Lineage(tmp_path).tags(run.stage("train[1]").key) == {
        "made_by": run.id,
        "git_commit": "a" * 40,
        "stage_version": str(run.stage("train[1]").version),
        "parent_digest": run.stage("train[sft]").digest,
        "reward": "reward.outcome",
        "filter": "filter.signal",
        "environment": "environment.shop",
    }
    assert "parent_digest" not in Lineage(tmp_path).tags(run.stage("train[sft]").key)


def test_a_stage_that_has_just_ended_is_known_when_it_is_added(tmp_path):
    run = pretend(tmp_path, rounds=1)
    lineage = Lineage(tmp_path)
    other = pretend(tmp_path, rounds=1, seed=1, git_commit="b" * 40)
    stage = other.stage("train[1]")
    assert "made_by" not in lineage.tags(stage.key)
    lineage.add(other, stage)
    assert lineage.tags(stage.key)["made_by"] == other.id
    assert lineage.tags(run.stage("train[1]").key)["made_by"] == run.id


def test_secrets_and_control_characters_are_not_shown(tmp_path):
    run = pretend(tmp_path, rounds=1)
    manifest = tmp_path / "artifacts" / run.stage("judge[1]").key / "manifest.json"
    data = json.loads(manifest.read_text())
    data["spec"]["reward"] |= {"api_key": "hush", "prompt": "a\x1b[31mb"}
    manifest.write_text(json.dumps(data))
    lineage = Lineage(tmp_path)
    key = run.stage("train[1]").key
    assert "hush" not in show(lineage, key) + json.dumps(to_json(lineage, key))
    assert "api_key=***" in show(lineage, key)
    assert "\x1b" not in show(lineage, key)


def test_nothing_is_changed(tmp_path):
    run = pretend(tmp_path, rounds=1)
    (tmp_path / "artifacts" / run.stages[3].key / "data").write_text("damaged")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main([run.short, f"root={tmp_path}"]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def reasons(root: Path, reference: str, capsys) -> dict[str, tuple[str, list[str], str | None]]:
    assert main([f"root={root}", reference, "--why", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    return {stage["label"]: (stage["status"], stage["why"], stage["compared"]) for stage in stages}


def test_the_reasons_of_a_run_are_its_differences_from_the_run_before(tmp_path, capsys):
    first = pretend(tmp_path)
    assert reasons(tmp_path, first.id, capsys)["train[1]"] == ("ran", ["no similar stage had run"], None)
    second = pretend(tmp_path, algorithm={"name": "grpo", "clip_low": 0.1})
    pretend(tmp_path, algorithm={"name": "grpo", "clip_low": 0.4})  # a later run is not compared with
    why = reasons(tmp_path, second.id, capsys)
    assert why["collect[1]"] == ("cached", [], None)
    assert why["train[1]"] == ("ran", ["algorithm.clip_low: 0.2 → 0.1"], f"train[1] of run {first.short}")
    status, changes, compared = why["collect[2]"]
    assert (status, changes) == ("ran", ["policy: train[1] is recomputed"])
    assert compared == f"collect[2] of run {first.short}"
    assert main([f"root={tmp_path}", second.id, "--why"]) == 0
    text = capsys.readouterr().out
    assert f"algorithm.clip_low: 0.2 → 0.1 (against train[1] of run {first.short})" in text
    assert re.search(r"\n  collect\[1\] +cached\n", text)


def test_the_reasons_name_a_deleted_artifact(tmp_path, capsys):
    first = pretend(tmp_path)
    shutil.rmtree(tmp_path / "artifacts" / first.stage("judge[1]").key)
    second = pretend(tmp_path)
    why = reasons(tmp_path, second.id, capsys)
    assert why["judge[1]"] == ("ran", [f"run {first.short} had it, but it was no longer in the store"], None)
    assert {status for label, (status, _, _) in why.items() if label != "judge[1]"} == {"cached"}
    shutil.rmtree(tmp_path / "artifacts" / first.stage("judge[2]").key)
    assert reasons(tmp_path, first.id, capsys)["judge[2]"][1] == ["unknown: its artifact is no longer in the store"]
