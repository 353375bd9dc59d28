"""Running a stage: found or made, keyed by what matters, resumed after a death."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from components.errors import (
    ArtifactDamaged,
    EnvironmentFailed,
    EnvironmentUnavailable,
    JudgeError,
    ResourceError,
    SpecError,
)
from components.inference.protocol import ChatCompletion
from components.inference.spec import EmbeddedSpec
from components.models.spec import ModelSpec
from components.specs import validate
from components.trajectories.schema import Score
from components.trajectories.store import (
    read_scores,
    read_selection,
    read_trajectories,
    write_scores,
)
from flows.stages import STAGES
from flows.stages.base import Request, Warm
from flows.stages.collect import CollectStage
from flows.stages.episodes import FinishedEpisodes, scenarios_of
from flows.stages.execute import find_stage, request_key, run_stage
from flows.stages.judge import Tally
from tests.flows import paid
from tests.flows.pretend import store_episodes
from tests.flows.processes import ROOT, stage_line
from tests.flows.waiting import until
from tests.trajectories.builders import FAILURE, episode

pytestmark = pytest.mark.usefixtures("tiny_stages")


def number(artifact):
    return float((artifact.path / "number").read_text())


def test_a_stage_runs_once_and_is_found_after(context):
    first, ran = run_stage(Request("add", {"amount": 2}), context)
    again, cached = run_stage(Request("add", {"amount": 2.0}), context)
    assert (ran, cached) == ("ran", "cached")
    assert first == again
    assert number(first) == 2
    assert first.metrics == {"total": 2.0, "seed": 0.0}  # what is no number is not kept
    assert find_stage(Request("add", {"amount": 2}), context) == first


def test_inputs_are_found_by_key_and_count_by_content(context):
    two, _ = run_stage(Request("add", {"amount": 2}), context)
    also_two, _ = run_stage(Request("add", {"amount": 2}, seed=7), context)
    assert (two.key == also_two.key, two.digest == also_two.digest) == (False, True)
    three, ran = run_stage(Request("add", {"amount": 1}, {"start": two.key}), context)
    same, cached = run_stage(Request("add", {"amount": 1}, {"start": also_two.key}), context)
    assert (ran, cached, number(three)) == ("ran", "cached", 3)
    assert same.inputs == {"start": two.key}


def test_width_and_allowed_packages_are_not_in_the_key_nor_a_volatile_file_in_the_digest(context):
    narrow, _ = run_stage(Request("add", {"amount": 2, "width": 1}), context)
    assert run_stage(Request("add", {"amount": 2, "width": 9}), context) == (narrow, "cached")
    keys = {request_key(Request("add", {"amount": 2}, seed=seed), context) for seed in (0, 0, 1)}
    assert len(keys) == 2
    request = Request("add", {"amount": 2})
    assert request_key(replace(request, allow=("my_package",)), context) == request_key(request, context)


def test_a_request_survives_json_and_its_mistakes_are_named(context):
    with pytest.raises(SpecError, match="Did you mean 'add'"):
        run_stage(Request("ad", {}), context)
    with pytest.raises(SpecError, match=r"add\.amount"):
        run_stage(Request("add", {"amount": "many"}), context)
    for data in ({"stage": "add"}, {"stage": "add", "spec": {}, "sed": 1}, ["add"]):
        with pytest.raises(ResourceError, match=r"request has the keys .*; expected stage, spec, inputs, seed, allow"):
            Request.from_json(data)
    with pytest.raises(ArtifactDamaged, match="start"):
        run_stage(Request("add", {"amount": 1}, {"start": "0" * 64}), context)
    request = Request("add", {"amount": 2}, {"start": "k"}, 3, ("mine",))
    assert Request.from_json(request.to_json()) == request


def test_a_failed_stage_leaves_its_scratch_and_no_artifact(context):
    request = Request("add", {"amount": -1})
    with pytest.raises(ValueError, match="below zero"):
        run_stage(request, context)
    assert find_stage(request, context) is None
    assert (context.store.scratch(request_key(request, context)) / "0").read_text() == "-1.0"


def test_equal_requests_in_threads_do_the_work_once(context):
    statuses = []
    threads = [
        threading.Thread(target=lambda: statuses.append(run_stage(Request("add", {"amount": 5}), context)[1]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert sorted(statuses) == ["cached", "cached", "cached", "ran"]


def test_warm_things_are_filed_under_what_they_were_built_from():
    class Thing:
        closed = False

        def close(self):
            self.closed = True

    warm = Warm()
    first = warm.get("engine", {"name": "a"}, Thing)
    assert warm.get("engine", {"name": "a"}, Thing) is first
    second = warm.get("engine", {"name": "b"}, Thing)
    assert (second is first, first.closed, second.closed) == (False, True, False)
    warm.close()
    assert second.closed


SHOP = {"_target_": "components.environments.worlds.shop.Shop", "train": 8, "heldout": 4}
MODEL = {"name": "tiny", "source": "random"}
REMOTE = {"name": "remote", "url": "http://127.0.0.1:8000/v1", "model": "tiny"}
COLLECT = {"model": MODEL, "environment": SHOP, "agent": {}, "collect": {"scenarios": 2, "group_size": 2}}


def key_part(stage, data):
    return validate(STAGES[stage].spec, data, allow=()).key_part()


OUTCOME = {"reward": {"_target_": "components.rewards.rules.outcome.Outcome"}}
EVALUATION = {"model": MODEL, "environment": SHOP, "agent": {}, "evaluate": {}, **OUTCOME}
SOLVER, SERVED = COLLECT | {"actor": "solver"}, COLLECT | {"inference": REMOTE}
ELSEWHERE = {**REMOTE, "url": "https://there/v1", "retry_for": 1, "key_variable": "KEY"}
KEYS = [
    ("collect", COLLECT, {"collect": {"scenarios": 2, "group_size": 2, "concurrency": 1, "timeout": 5.0}}, True),
    ("collect", COLLECT, {"model": {**MODEL, "device": "cpu"}}, True),
    ("collect", COLLECT, {"model": {**MODEL, "lora": {"rank": 4}}}, True),
    ("collect", COLLECT, {"environment": {**SHOP, "seed": 0}}, True),  # the default, written out
    ("collect", COLLECT, {"collect": {"scenarios": 2, "group_size": 3}}, False),
    ("collect", COLLECT, {"model": {**MODEL, "max_length": 512}}, False),
    ("collect", COLLECT, {"environment": {**SHOP, "seed": 1}}, False),
    ("collect", COLLECT, {"round": 1}, False),
    ("collect", COLLECT, {"agent": {"max_turns": 3}}, False),
    ("collect", COLLECT, {"actor": "solver"}, False),
    ("collect", COLLECT, {"inference": {"name": "embedded"}}, True),
    ("collect", COLLECT, {"inference": REMOTE}, False),
    ("collect", SERVED, {"inference": ELSEWHERE}, True),
    ("collect", SERVED, {"inference": {**REMOTE, "model": "other"}}, False),
    # Demonstrations depend neither on the model nor on sampling.
    ("collect", SOLVER, {"model": {"name": "other"}}, True),
    ("collect", SOLVER, {"collect": {"scenarios": 2, "group_size": 1, "temperature": 0.5}}, True),
    ("judge", OUTCOME, {"judge": {"concurrency": 1}}, True),
    ("evaluate", EVALUATION, {"judge": {"concurrency": 1}}, True),
]
"""Stage, spec, change, and whether the key stays."""


def test_what_changes_a_key():
    found = [key_part(stage, data | change) == key_part(stage, data) for stage, data, change, _ in KEYS]
    assert [(*case[:3], same) for case, same in zip(KEYS, found, strict=True)] == KEYS


class Scripted:
    """An engine that says one sentence; it is killed after `limit` answers."""

    def __init__(self, limit):
        self.limit = limit
        self.answers = 0
        self.policy = "base"

    def load_policy(self, version, adapter_dir):
        assert (version, adapter_dir) == ("base", None)

    async def chat(self, request):
        if self.answers == self.limit:
            raise KeyboardInterrupt
        self.answers += 1
        message = {"role": "assistant", "content": "Sorry, no."}
        return ChatCompletion(message, "stop", [1, 2, 3], [4, 5], [-0.5, -0.25], self.policy)

    def release(self):
        pass

    def close(self):
        pass


def warm_with(context, engine):
    warm = Warm()
    warm.get("engine", (ModelSpec(**MODEL).base(), {}, EmbeddedSpec().model_dump(), []), lambda: engine)
    return replace(context, warm=warm)


def test_a_collect_that_dies_keeps_its_finished_episodes(context):
    request = Request("collect", {**COLLECT, "collect": {"scenarios": 4, "group_size": 2, "concurrency": 1}})
    dying, whole = Scripted(5), Scripted(100)
    with pytest.raises(KeyboardInterrupt):
        run_stage(request, warm_with(context, dying))
    gc.collect()  # drops the stopped task now: Python 3.11.7 cannot parse source while asyncio logs it (gh-106905)
    artifact, status = run_stage(request, warm_with(context, whole))
    assert status == "ran"
    assert artifact.metrics["resumed"] == 5
    assert whole.answers == 3
    undisturbed, _ = run_stage(request, warm_with(type(context).at(context.store.root / "other"), Scripted(100)))
    assert undisturbed.digest == artifact.digest
    assert len(list(read_trajectories(artifact.path / "trajectories.parquet"))) == 8
    assert not list((context.store.root / ".scratch").iterdir())


def test_garbage_in_the_scratch_folder_is_removed_and_recomputed(context, tmp_path, caplog):
    """The scratch folder is as untrusted as an artifact: no file there ends the stage."""
    request = Request("collect", {**COLLECT, "collect": {"scenarios": 6, "group_size": 2, "concurrency": 1}})
    with pytest.raises(KeyboardInterrupt):
        run_stage(request, warm_with(context, Scripted(11)))
    gc.collect()
    scratch = context.store.root / ".scratch" / request_key(request, context)
    rows = list(FinishedEpisodes(scratch).finished.values())
    assert len(rows) == 11
    for path in scratch.glob("episodes-*"):
        path.unlink()
    files = FinishedEpisodes(scratch)
    for number, row in enumerate(rows):  # a file each
        files.add(row, 1.0)
        files.flush()
        assert (scratch / f"episodes-{number:05d}.parquet").is_file()
    (outside := tmp_path / "outside").mkdir()
    (outside / "kept").touch()

    def file(number: int, suffix: str = "parquet") -> Path:
        return scratch / f"episodes-{number:05d}.{suffix}"

    file(1).write_bytes(file(1).read_bytes()[:-9])  # a broken footer
    file(2, "json").unlink()
    for number, times in enumerate(([1.0], {}, dict.fromkeys([rows[5].id], "1")), 3):
        file(number, "json").write_text(json.dumps(times))
    file(6).unlink(), file(6).mkdir(), (file(6) / "inside").touch()
    file(7).unlink(), file(7).symlink_to(outside / "kept")
    file(8).unlink(), os.mkfifo(file(8))
    write_scores(file(9), [Score("a/0", 17.0)])
    file(10).rename(scratch / "episodes-other.parquet")
    (scratch / "failed-00000.parquet").mkdir()
    (scratch / "live.jsonl").unlink(missing_ok=True)
    (scratch / "live.jsonl").mkdir()
    (scratch / "folder").symlink_to(outside, target_is_directory=True)
    whole = Scripted(100)
    artifact, _ = run_stage(request, warm_with(context, whole))
    assert (artifact.metrics["resumed"], whole.answers) == (1, 11)
    assert "episodes-00001.parquet is damaged; its rows are recomputed" in caplog.text
    undisturbed, _ = run_stage(request, warm_with(type(context).at(tmp_path / "other"), Scripted(100)))
    assert undisturbed.digest == artifact.digest
    assert (outside / "kept").is_file()


def test_a_scratch_folder_that_is_none_is_replaced(context, tmp_path):
    (tmp_path / "outside").mkdir()
    for name, make in {"link": lambda path: path.symlink_to(tmp_path / "outside"), "file": Path.touch}.items():
        key = request_key(Request("collect", {**COLLECT, "collect": {"scenarios": 1}}, seed=len(name)), context)
        folder = context.store.root / ".scratch" / key
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(folder)
        assert context.store.scratch(key).is_dir()
        assert not folder.is_symlink()


def test_demonstrations_judge_and_filter_from_end_to_end_unless_the_reward_scores_nothing(context):
    shown, _ = run_stage(Request("collect", {**COLLECT, "actor": "solver"}), context)
    assert shown.metrics["success"] == 1
    scores, _ = run_stage(Request("judge", OUTCOME, {"trajectories": shown.key}), context)
    assert scores.metrics["reward"] == 1
    everything = {"_target_": "components.filters.everything.Everything"}
    inputs = {"trajectories": shown.key, "scores": scores.key}
    kept, _ = run_stage(Request("filter", {"filter": everything}, inputs), context)
    assert (kept.metrics["kept"], kept.metrics["dropped"]) == (2, 0)
    broken = {"_target_": "components.evaluation.metrics.summarise"}
    with pytest.raises(
        JudgeError, match=r"reward: .*\.summarise scored none of the 2 finished episodes; first failure"
    ):
        run_stage(Request("judge", {"reward": broken}, {"trajectories": shown.key}), context)


def test_an_environment_that_cannot_be_built_any_more_ends_the_stage_with_its_name(context, monkeypatch):
    environment = validate(CollectStage, {**COLLECT, "actor": "solver"}, allow=()).environment
    for error, kind in (
        (RuntimeError("no licence"), EnvironmentFailed),
        (ConnectionRefusedError("nobody listens"), EnvironmentUnavailable),
    ):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr("components.environments.worlds.shop.Shop.__init__", fail)
        with pytest.raises(kind, match=rf"shop\.Shop\.scenarios\(\) raised {type(error).__name__}: {error}"):
            scenarios_of(environment, "train", context)


def test_failed_episodes_are_played_again(tmp_path, context):
    from components.trajectories.schema import Failure

    request = Request("collect", {**COLLECT, "actor": "solver"})
    shown, _ = run_stage(request, context)
    good, bad = read_trajectories(shown.path / "trajectories.parquet")
    bad.failure = Failure("engine", "EngineError", "out of luck")
    episodes = FinishedEpisodes(tmp_path)
    episodes.add(good, 1.0)
    episodes.add(bad, 2.0)
    episodes.flush()
    again = FinishedEpisodes(tmp_path)
    assert (set(again.finished), again.seconds) == ({good.id}, {good.id: 1.0})


EPISODES = [episode(name, sample, success=sample == 0) for name in "abc" for sample in range(2)]


def judging(reward, folder, context):
    target = {"_target_": f"tests.flows.paid.{reward.__name__}", "folder": str(folder)}
    return Request("judge", {"reward": target}, store_episodes(context, EPISODES), allow=("tests",))


@pytest.mark.parametrize(
    ("reward", "again"),
    [
        (paid.Each, ["b/1", "c/0", "c/1"]),
        (paid.Together, ["b/0", "b/1", "c/0", "c/1"]),
        (paid.Awaited, ["b/1", "c/0"]),  # c/1 was judged while c/0 waited
    ],
    ids=["one by one", "in groups", "several at once"],
)
def test_a_judge_that_is_killed_does_not_ask_for_finished_scores_again(tmp_path, context, reward, again):
    (tmp_path / "wait").touch()
    request = judging(reward, tmp_path, context)
    command = [sys.executable, *stage_line(tmp_path, request)]
    scratch = context.store.scratch(request_key(request, context))

    def kept():
        return sorted(score.trajectory_id for file in scratch.glob("*.parquet") for score in read_scores(file))

    finished = [row.id for row in EPISODES if row.id not in again]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        # It waits in the reward: they have to be kept without further ones.
        until(lambda: child.poll() or (kept() == finished and paid.WAITS in (tmp_path / "asked").read_text()), kept)
        assert child.poll() is None
        os.kill(child.pid, signal.SIGKILL)
    (tmp_path / "wait").unlink()
    asked = (tmp_path / "asked").read_text().split()
    assert sorted(asked) == sorted({*finished, "b/0", "b/1", "c/0"})

    artifact, status = run_stage(request, context)
    assert status == "ran"
    assert sorted((tmp_path / "asked").read_text().split()) == sorted([*asked, *again])
    assert not scratch.exists()
    elsewhere = type(context).at(tmp_path / "elsewhere")
    undisturbed, _ = run_stage(judging(reward, tmp_path, elsewhere), elsewhere)
    assert undisturbed.digest == artifact.digest
    assert undisturbed.metrics == artifact.metrics


def test_a_judge_with_a_torn_file_in_its_scratch_asks_again(tmp_path, context, caplog):
    request = judging(paid.Each, tmp_path, context)
    torn = context.store.scratch(request_key(request, context)) / "scores-00000.parquet"
    write_scores(torn, [Score("a/0", 17.0), Score("a/1", 17.0)])
    torn.write_bytes(torn.read_bytes()[:-9])
    artifact, _ = run_stage(request, context)
    assert "scores-00000.parquet" in caplog.text
    assert [score.reward for score in read_scores(artifact.path / "scores.parquet")][:2] == [0.5, 1.5]


def test_figures_of_scores_in_one_pass():
    rewards = [0.1, 0.7, 1e6 + 0.3, -2.5, 0.7]
    scores = [Score(str(i), reward, {"x": reward, "y": 0.1}, cost=0.25) for i, reward in enumerate(rewards)]
    scores += [Score("unscored", None, {"z": 2.0}, failure=FAILURE)]
    tally = Tally()
    assert list(tally.over(iter(scores))) == scores
    tally.demand_some("mine")
    assert tally.figures() == {
        "scored": 5.0,
        "unscored": 1.0,
        "cost": 1.25,
        "reward": pytest.approx(fmean(rewards), rel=1e-15),
        "reward_std": pytest.approx(pstdev(rewards), rel=1e-15),
        "components/x": pytest.approx(fmean(rewards), rel=1e-15),
        "components/y": 0.1,
        "components/z": 2.0,
    }
    assert Tally().figures() == {"scored": 0.0, "unscored": 0.0, "cost": 0.0}


def test_rewards_of_others_are_not_mixed_into_that_of_the_policy():
    parts = {"a/0": "", "a/1": "", "a/2": "teacher", "a~second/0": "second", "a~second/1": "second"}
    rewards = dict(zip(parts, (0.0, 0.5, 1.0, 0.25, 0.75), strict=True))
    scores = [Score(name, reward, {"x": reward}) for name, reward in rewards.items()]
    scores[-1] = Score("a~second/1", None, failure=FAILURE)
    tally = Tally()
    list(tally.over(scores, parts))
    assert tally.figures() == {
        "scored": 4.0,
        "unscored": 1.0,
        "cost": 0.0,
        "reward": 0.25,
        "reward_std": 0.25,
        "components/x": 0.25,
        "teacher/reward": 1.0,
        "second/reward": 0.25,
    }
    alone = Tally()
    list(alone.over([Score("a/0", 0.5)], {"a/0": "teacher"}))
    assert alone.figures()["reward"] == 0.5


def test_a_filter_counts_what_it_drops_and_why(context):
    rewards = {"a/0": 1.0, "a/1": 0.0, "b/0": 0.5, "b/1": 0.5, "c/0": 1.0, "c/1": None}
    inputs = store_episodes(context, EPISODES, [Score(*pair) for pair in rewards.items()])
    told = []
    watched = replace(context, progress=lambda done, total, values=None: told.append((done, total)))
    signal_ = {"_target_": "components.filters.signal.Signal"}
    artifact, _ = run_stage(Request("filter", {"filter": signal_}, inputs), watched)
    assert artifact.metrics == {
        "kept": 2.0,
        "scenarios": 1.0,
        "dropped": 4.0,
        "kept_share": 1 / 3,
        "dropped/no_spread": 3.0,
        "dropped/unscored": 1.0,
    }
    selections = read_selection(artifact.path / "selection.parquet")
    assert [(one.trajectory_id, one.kept) for one in selections] == [(name, name < "b") for name in rewards]
    assert (told[0], told[-1]) == ((0, 6), (6, 6))


def test_a_filter_that_needs_the_whole_collection_reads_it_twice_and_knows_components(context):
    scores = [Score(row.id, float(number), {"spread": number / 10}) for number, row in enumerate(EPISODES)]
    inputs = store_episodes(context, EPISODES, scores)
    told = []
    watched = replace(context, progress=lambda done, total, values=None: told.append((done, total)))
    links = {
        "agreed": {"_target_": "components.filters.between.Between", "number": "spread", "maximum": 0.35},
        "top": {"_target_": "components.filters.top.Top", "share": 0.5},
    }
    chain = {"_target_": "components.filters.chain.Chain", "filters": links}
    artifact, _ = run_stage(Request("filter", {"filter": chain}, inputs), watched)
    expected = {"kept": 2.0, "scenarios": 1.0, "dropped": 4.0, "kept_share": 1 / 3}
    expected |= {"dropped/agreed/spread_above_maximum": 2.0, "dropped/top/below_top_share": 2.0}
    assert artifact.metrics == expected
    selections = read_selection(artifact.path / "selection.parquet")
    assert [one.trajectory_id for one in selections if one.kept] == ["b/0", "b/1"]
    assert [done for done, _ in told] == sorted(done for done, _ in told)  # progress does not start again
    turned = {**chain, "filters": dict(reversed(links.items()))}
    other, status = run_stage(Request("filter", {"filter": turned}, inputs), watched)
    assert (status, other.metrics["kept"]) == ("ran", 1.0)


def test_scores_of_other_trajectories_fail_the_filter_by_name(context):
    inputs = store_episodes(context, EPISODES, [Score(row.id, 1.0) for row in EPISODES[1:]])
    signal_ = {"_target_": "components.filters.signal.Signal"}
    with pytest.raises(ArtifactDamaged, match=r"scores\.parquet was not made from"):
        run_stage(Request("filter", {"filter": signal_}, inputs), context)


EVALUATE = EVALUATION | {"evaluate": {"scenarios": 3, "concurrency": 1}}


def test_an_evaluation_whose_reward_is_broken_keeps_its_episodes(context):
    engine = Scripted(100)
    request = Request("evaluate", {**EVALUATE, "reward": {"_target_": "components.evaluation.metrics.summarise"}})
    warm = warm_with(context, engine)
    for _ in range(2):
        with pytest.raises(JudgeError, match="scored none of the 3 finished episodes"):
            run_stage(request, warm)
        assert engine.answers == 3
    assert len(FinishedEpisodes(context.store.scratch(request_key(request, context))).finished) == 3


def test_an_evaluation_with_another_reward_judges_the_stored_episodes(context):
    outcome = EVALUATE["reward"]
    first, _ = run_stage(Request("evaluate", EVALUATE), warm_with(context, Scripted(100)))
    costly = Request("evaluate", {**EVALUATE, "reward": {**outcome, "turn_cost": 0.25}})
    engine = Scripted(0)  # answers nothing
    again, status = run_stage(costly, warm_with(context, engine))
    assert (status, engine.answers) == ("ran", 0)
    assert again.key != first.key
    files = [artifact.path / "trajectories.parquet" for artifact in (first, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    before, after = ([score.reward for score in read_scores(a.path / "scores.parquet")] for a in (first, again))
    turns = [trajectory.metrics["turns"] for trajectory in read_trajectories(files[0])]
    assert after == [reward - 0.25 * count for reward, count in zip(before, turns, strict=True)]


def test_an_evaluation_with_other_episodes_plays_them(context):
    run_stage(Request("evaluate", EVALUATE), warm_with(context, Scripted(100)))
    costly = {**EVALUATE, "reward": {**EVALUATE["reward"], "turn_cost": 0.25}}
    fewer, shorter = {"evaluate": {"scenarios": 2, "concurrency": 1}}, {"agent": {"max_turns": 2}}
    for change, seed in ((fewer, 0), (shorter, 0), ({}, 1)):
        engine = Scripted(100)
        run_stage(Request("evaluate", {**costly, **change}, seed=seed), warm_with(context, engine))
        assert engine.answers >= 2, change


def test_a_missing_success_is_missed_where_an_episode_finished(monkeypatch, context, caplog):
    for failures, warned in ((3, False), (1, True)):
        rows = [episode("s", i, outcome={}, failure=FAILURE if i < failures else None) for i in range(3)]
        monkeypatch.setattr("flows.stages.evaluate.play", lambda *_, rows=rows, **__: (rows, {}, {}))
        with caplog.at_level(logging.WARNING):
            run_stage(Request("evaluate", EVALUATE, seed=failures), context)
        assert ("sets `success` in the info of no episode" in caplog.text) is warned


def test_equal_answers_to_all_scenarios_are_named(monkeypatch, context, caplog):
    warning = "all 3 evaluated episodes, of 3 scenarios, end with the same answer, 'Answer 7.', and 0 % succeed"
    for seed, (answers, success, warned) in enumerate(
        [("778", False, False), ("777", True, False), ("777", False, True)]
    ):
        rows = [episode(f"s{row}", int(answer), success=success) for row, answer in enumerate(answers)]
        monkeypatch.setattr("flows.stages.evaluate.play", lambda *_, rows=rows, **__: (rows, {}, {}))
        with caplog.at_level(logging.WARNING):
            run_stage(Request("evaluate", EVALUATE, seed=seed), context)
        assert (warning in caplog.text) is warned


def test_lists_outside_of_the_declarations_name_declared_stages():
    from flows.experiment.guards import RULES

    assert {name for stages in RULES.values() for name in stages} <= set(STAGES)
    assert all(
        stage.files and {*stage.volatile, *stage.optional} <= set(stage.files)
        for stage in STAGES.values()
        if stage.order < 100
    )
