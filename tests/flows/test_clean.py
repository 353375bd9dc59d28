"""Garbage collection: files that may be deleted and files that must not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from components.artifacts import Store
from components.errors import ResourceError
from flows.history.records import Records, RunRecord, recording
from flows.runs.clean import Cleaner, main
from tests.flows.pretend import pretend

SUCCESS = {f"collect[{number}]": {"success": value} for number, value in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.4))}


def deletable(root: Path, **options) -> dict[str, str]:
    """Return the reasons for deletion by name in the store."""
    forget = options.pop("forget", ())
    return {Path(item.path).name: item.why for item in Cleaner(root, forget).deletable(**options)}


def test_what_no_run_needs_can_go(tmp_path):
    kept = pretend(tmp_path, rounds=1)
    run = pretend(tmp_path, rounds=1, seed=1)
    keys = {stage.key for stage in run.stages} - {stage.key for stage in kept.stages}
    assert len(keys) == 11  # the start is the same
    assert deletable(tmp_path, forget=[run.short]) == dict.fromkeys(keys, "no run needs it")
    assert main([f"root={tmp_path}", "--forget", run.short]) == 0
    assert Records(tmp_path).get(run.id) == run  # dry by default
    assert main([f"root={tmp_path}", "--forget", run.short, "--delete"]) == 0
    assert {path.name for path in (tmp_path / "artifacts").glob("?" * 64)} == {stage.key for stage in kept.stages}
    assert [run.id for run in Records(tmp_path).all()] == [kept.id]
    assert list((tmp_path / "artifacts" / ".drafts").iterdir()) == []


def test_what_an_artifact_was_made_from_stays(tmp_path):
    run = pretend(tmp_path, rounds=1)
    records = Records(tmp_path)
    run.stages[:] = [stage for stage in run.stages if stage.label == "train[1]"]
    records.write(run)
    kept = {path.name for path in (tmp_path / "artifacts").glob("?" * 64)} - set(deletable(tmp_path))
    manifests = [json.loads((tmp_path / "artifacts" / key / "manifest.json").read_text()) for key in kept]
    assert sorted(one["stage"] for one in manifests) == sorted(
        ["train", "collect", "judge", "filter"] * 2
    )  # of the round and of the warmup before it


def test_a_fork_holds_what_it_began_with(tmp_path):
    run = pretend(tmp_path)
    assert deletable(tmp_path) == {}  # what a run needs stays
    pretend(tmp_path, fork=f"{run.short}@1", seed=2)
    gone = set(deletable(tmp_path, forget=[run.short]))
    assert run.stage("train[2]").key in gone
    assert not {run.stage(f"train[{step}]").key for step in ("sft", 1)} & gone


def test_the_latest_and_the_best_checkpoint_stay_by_every_metric(tmp_path):
    run = pretend(tmp_path, rounds=6, metrics=SUCCESS)
    found = Cleaner(tmp_path).deletable(intermediate=True)
    # collect[r] is played by the policy of round r - 1: best 1, worst 2; the start of the rounds and the latest stay.
    assert {Path(one.path).name for one in found} == {run.stage(f"train[{step}]").key for step in (3, 4, 5)}
    assert all("neither its latest nor its best" in one.why for one in found)


def test_what_reward_models_learn_from_says_nothing_of_a_checkpoint(tmp_path):
    part = {"scenarios": 4, "group_size": 2, "every": 2, "algorithm": {"name": "reward_model"}}
    metrics = {f"{label}@{number}]": {"success": number / 4, "heldout_accuracy": number / 4}
               for label in ("collect[reward", "train[reward") for number in (2, 4)}  # fmt: skip
    run = pretend(tmp_path, rounds=6, reward_model=part, metrics=SUCCESS | metrics)
    found = Cleaner(tmp_path).deletable(intermediate=True)
    assert {Path(one.path).name for one in found} == {run.stage(f"train[{step}]").key for step in (3, 4, 5)}


def test_each_kind_of_metric_counts(tmp_path):
    """A judgement tells of the policy that played: the one before the round."""
    for label, best in {"train[4]": 4, "judge[5]": 4, "evaluate[final]": 6}.items():
        root, kind = tmp_path / label, label.partition("[")[0]
        others = {f"{kind}[{number}]": {"loss": 0.5} for number in range(1, 7)}
        run = pretend(root, rounds=6, metrics={**others, label: {"loss": 0.1}})
        gone = deletable(root, intermediate=True)
        assert run.stage(f"train[{best}]").key not in gone, label
        assert run.stage("train[3]").key in gone, label


def test_evaluations_in_the_rounds_count_by_what_they_measured(tmp_path):
    measured = {
        f"evaluate[{number}]": {"success": 0.9 if number == 4 else 0.5 - number / 100} for number in range(1, 6)
    }
    run = pretend(tmp_path, rounds=6, evaluate={"every": 1}, metrics=measured)
    gone = set(deletable(tmp_path, intermediate=True))
    # Best 4, worst 5, latest 6; to have been evaluated keeps nothing.
    assert gone == {run.stage(f"train[{step}]").key for step in (1, 2, 3)}


def test_the_final_policy_stays(tmp_path):
    measured = {"evaluate[sft]": {"success": 0.1}, "evaluate[2]": {"success": 0.9}, "evaluate[4]": {"success": 0.5}}
    run = pretend(tmp_path, rounds=4, evaluate={"every": 1}, deploy={"policy": "best"}, metrics=measured)
    assert run.stage("deploy").request["inputs"]["policy"] == run.stage("train[2]").key
    gone = set(deletable(tmp_path, intermediate=True))
    assert gone == {run.stage(f"train[{step}]").key for step in (1, 3)}


def test_what_another_run_keeps_stays_and_all_of_an_unfinished_one(tmp_path):
    pretend(tmp_path / "unfinished", rounds=6, stop_at="collect[6]")
    assert deletable(tmp_path / "unfinished", intermediate=True) == {}
    run = pretend(tmp_path, rounds=6)
    assert run.stage("train[3]").key in deletable(tmp_path, intermediate=True)
    pretend(tmp_path, rounds=3)
    assert run.stage("train[3]").key not in deletable(tmp_path, intermediate=True)


def test_a_named_artifact_that_a_run_needs_is_refused(tmp_path, capsys):
    run = pretend(tmp_path)
    key = run.stage("train[1]").key
    words = rf"in use by run {run.short} \(test\) for train\[1\].*To delete the run too: --forget {run.short}$"
    with pytest.raises(ResourceError, match=words):
        Cleaner(tmp_path).named(key[:10])
    other = pretend(tmp_path)
    with pytest.raises(ResourceError, match=rf"To delete these runs too: --forget {other.short} --forget {run.short}$"):
        Cleaner(tmp_path).named(key[:10])
    assert main([f"root={tmp_path}", key, "--delete"]) == 2
    assert "in use" in capsys.readouterr().err
    assert (tmp_path / "artifacts" / key).is_dir()
    assert main([f"root={tmp_path}", "0123"]) == 2
    capsys.readouterr()
    assert main([f"root={tmp_path / 'nowhere'}"]) == 2
    assert "root=DIR" in capsys.readouterr().err


def test_a_running_run_is_not_forgotten_and_its_newest_artifacts_stay(tmp_path):
    old = pretend(tmp_path, rounds=1)
    with recording(tmp_path, RunRecord("living-run", "test", 0, time.time())):
        with pytest.raises(ResourceError, match=r"--forget: run living-r.* is running \(.*stop it first"):
            Cleaner(tmp_path, ["living-run"])
        new = pretend(tmp_path, rounds=1, seed=1)
        keys = {stage.key for stage in new.stages} - {stage.key for stage in old.stages}
        assert not keys & set(deletable(tmp_path, forget=[new.id]))
    assert keys <= set(deletable(tmp_path, forget=[new.id]))


def test_debris_can_go(tmp_path):
    run = pretend(tmp_path, rounds=1)
    store = Store(tmp_path / "artifacts")
    key = run.stage("train[1]").key
    (store.path(key) / "data").write_text("damaged")
    assert store.find(key) is None
    (store.root / ".drafts" / f"{key}.abc").mkdir()
    (store.scratch(run.stage("deploy").key) / "x").write_text("x")
    (store.scratch("f" * 64) / "x").write_text("x")  # of a stage that is not done
    assert set(deletable(tmp_path)) == {f"{key}.damaged-1", f"{key}.abc", run.stage("deploy").key}
    with store.lock(key, timeout=1):
        assert f"{key}.abc" not in deletable(tmp_path)  # somebody writes it


def test_what_somebody_works_on_stays(tmp_path, capsys):
    run = pretend(tmp_path, rounds=1)
    assert main([f"root={tmp_path}", "--forget", run.id, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["deleted"], len(data["deletable"])) == (False, len(run.stages))
    cleaner = Cleaner(tmp_path, [run.id])
    found = cleaner.deletable()
    key = Path(found[0].path).name
    with cleaner.store.lock(key, timeout=1):
        assert len(cleaner.delete(found)) == len(found) - 1
    assert (tmp_path / "artifacts" / key).is_dir()


def test_answers_of_judges_stay_until_they_are_named(tmp_path):
    pretend(tmp_path, rounds=1)
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "answers.sqlite").write_bytes(b"x" * 10)
    assert deletable(tmp_path, intermediate=True) == {}
    with (
        recording(tmp_path, RunRecord("a" * 32, "x", 0, time.time())),
        pytest.raises(ResourceError, match=r"--answers: run a+ is running \("),
    ):
        deletable(tmp_path, answers=True)
    assert deletable(tmp_path, answers=True) == {"answers": "the same questions will cost again"}
    assert main([f"root={tmp_path}", "--answers", "--delete"]) == 0
    assert not answers.exists()
    assert deletable(tmp_path, answers=True) == {}
