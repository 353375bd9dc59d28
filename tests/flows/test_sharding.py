"""Shards of a stage: their joined artifact is that of the whole stage, and one that dies is computed again alone."""

from __future__ import annotations

import importlib.util
import json

import psutil
import pytest

from components.errors import EspalierError, TooManyFailures
from components.trajectories.schema import Score
from components.trajectories.store import read_scores, read_trajectories, write_trajectories
from flows.execution.executor import Execution
from flows.execution.sharding import forget_failures, shard_count
from flows.experiment.requests import Requests
from flows.planning.plan import plan
from flows.stages.base import Context, Request, StagePart
from flows.stages.execute import find_stage, request_key, run_stage
from flows.stages.shard import joined, shard_request
from tests.data import rows as samples
from tests.flows.pretend import spec_of, store_episodes
from tests.refusals import wrong_refusals
from tests.trajectories.builders import FAILURE, episode

MORTAL = "tests.flows.mortal.Mortal"
PLACES = {name: {"name": name} for name in ("local", "process", "ray", "dask")}
HARD = {"_target_": "components.filters.among.Among", "by": "difficulty", "keep": [2, 3]}
CHAIN = {
    "_target_": "components.filters.chain.Chain",
    "filters": {
        "done": {"_target_": "components.filters.successful.Successful"},
        "easy": {"_target_": "components.filters.among.Among", "by": "difficulty", "drop": [3]},
        "best": {"_target_": "components.filters.top.Top", "share": 0.5, "of": "group"},
    },
}


def shards_of(request, count, context):
    return [run_stage(shard_request(request, StagePart(index, count)), context)[0] for index in range(count)]


def both(request, count, tmp_path, *inputs):
    """The artifact of the whole stage, and the joined one, of two stores. inputs: functions that make the inputs."""
    made = []
    for root in ("whole", "split"):
        context = Context.at(tmp_path / root)
        for make in inputs:
            make(context)
        if root == "split":
            made.append(joined(request, shards_of(request, count, context), context))
        else:
            made.append(run_stage(request, context)[0])
    return made


def same(whole, split, count):
    own = {"shards", "shard_seconds", "seconds", "tokens_per_s", "resumed", "retried"}
    assert (split.key, split.digest) == (whole.key, whole.digest)
    assert split.metrics["shards"] == count
    assert {n: v for n, v in split.metrics.items() if n not in own} == pytest.approx(
        {n: v for n, v in whole.metrics.items() if n not in own}
    )
    return True


def solver(tmp_path, folder=None, scenarios=6, **environment):
    """The request of demonstrations by the solver of `Mortal`."""
    return Requests(spec(tmp_path, folder, scenarios, **environment)).demonstrate()


def spec(tmp_path, folder=None, scenarios=6, compute=None, **environment):
    warmup = {"demonstrations": scenarios, "filter": {"_target_": "components.filters.successful.Successful"}}
    return spec_of(
        tmp_path,
        allow=["tests"],
        environment={"_target_": MORTAL, "folder": str(folder or tmp_path), **environment},
        warmup=warmup,
        compute=compute or {},
        collect={"scenarios": 3, "group_size": 2},
    )


def test_a_collection_by_the_solver(tmp_path):
    for count in (2, 9):
        root = tmp_path / str(count)
        root.mkdir()
        assert same(*both(solver(root), count, root), count)


def test_an_evaluation(tmp_path):
    evaluate = {"scenarios": 4, "samples": 2, "temperature": 1.0}
    request = Requests(spec_of(tmp_path, evaluate=evaluate)).evaluate(None, actor="random")
    for count in (3, 8):
        whole, split = both(request, count, tmp_path / str(count))
        assert same(whole, split, count)
        assert whole.metrics["episodes"] == 8


def group(number, rewards):
    return [episode(f"s{number}", k, success=reward > 0, difficulty=1 + number % 3) for k, reward in enumerate(rewards)]


@pytest.fixture
def collection():
    """Store seven groups of one to three episodes, and their scores."""
    episodes = [
        row for number in range(7) for row in group(number, [float((number + k) % 2) for k in range(1 + number % 3)])
    ]
    return lambda context: store_episodes(context, episodes, [Score(row.id, float(row.success)) for row in episodes])


INPUTS = {"trajectories": "trajectories", "scores": "scores"}


def test_a_filter_of_groups(tmp_path, collection):
    """In fewer shards than groups, in an odd number, and in more than there are groups."""
    filters = ({"_target_": "components.filters.signal.Signal"}, HARD, CHAIN)
    for count, filter_ in zip((2, 3, 20), filters, strict=True):
        request = Request("filter", {"filter": filter_}, INPUTS)
        whole, split = both(request, count, tmp_path / str(count), collection)
        assert same(whole, split, count)
        assert whole.metrics["kept"] > 0


def test_a_judgement_of_groups(tmp_path, collection):
    reward = {"reward": spec_of(tmp_path).reward.model_dump()}
    request = Request("judge", reward, {"trajectories": "trajectories"})
    whole, split = both(request, 3, tmp_path, collection)
    assert same(whole, split, 3)
    assert len(list(read_scores(split.path / "scores.parquet"))) == whole.metrics["scored"] > 0


@pytest.mark.parametrize("heldout", [None, 0.3])
def test_an_import(tmp_path, heldout):
    rows = samples.FORMS["thumbs"] * 2
    long = {**rows[0], **{name: value * 400 for name, value in rows[0].items() if isinstance(value, str)}}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, long]))
    data = {"path": str(path), "max_dropped": 1.0, **({"heldout": heldout} if heldout else {})}
    model = {"name": "tiny", "source": "random", "max_length": 1500}
    request = Requests(spec_of(tmp_path, model=model, data=data)).import_data()
    whole, split = both(request, 3, tmp_path)
    assert same(whole, split, 3)
    assert whole.metrics["dropped"] >= 2
    assert (split.path / "report.json").read_text() == (whole.path / "report.json").read_text()


def test_shards_have_keys_of_their_own_and_the_whole_stage_keeps_its_key(tmp_path):
    context, request = Context.at(tmp_path), solver(tmp_path)
    parts = [shard_request(request, StagePart(*part)) for part in ((0, 2), (1, 2), (0, 3))]
    keys = {request_key(part, context) for part in [request, *parts, shard_request(request, StagePart(0, 2), copy=1)]}
    assert len(keys) == 5
    shard, copy = (run_stage(shard_request(request, StagePart(0, 2), copy), context)[0] for copy in (0, 1))
    assert shard.digest == copy.digest


def execution(root, screen, compute, **options):
    tuned = {"default": "process", "places": PLACES, "stages": {"filter": "local", "deploy": "local"}, **compute}
    tuned["stage_shards"] = {"import": 1, "filter": 1}
    return Execution(spec(root, compute=tuned, **options), Context.at(root), screen[0], None, root / "logs" / "log")


def order(whole):
    """The numbers of the scenarios, in the order of the collection."""
    rows = read_trajectories(whole.path / "trajectories.parquet")
    return [int(row.scenario.id.rpartition("-")[2]) for row in rows]


def solved(folder):
    return sorted((folder / "solved").read_text().split())


def test_a_killed_shard_alone_is_computed_again(tmp_path, screen):
    whole, _ = run_stage(solver(tmp_path), Context.at(tmp_path / "whole"))
    (tmp_path / "solved").unlink()
    second = order(whole)[2:4]
    request = solver(tmp_path, trap=second[1])
    run = execution(tmp_path / "split", screen, {"shards": 3})
    with pytest.raises(EspalierError, match=r"collect\[sft\] shard 2/3: .*ended by signal 9"):
        run.make("collect[sft]", 0, request)
    run.close()
    stored = [find_stage(shard_request(request, StagePart(index, 3)), run.context) for index in range(3)]
    assert [artifact is not None for artifact in stored] == [True, False, True]
    planned = plan(spec(tmp_path / "split", tmp_path, compute=run.spec.compute.model_dump(mode="json"))).stages
    (shown,) = [stage for stage in planned if stage.label == "collect[sft]"]
    assert [shard.status for shard in shown.shards] == ["cached", "run", "cached"]
    assert shown.status == "unfinished"
    (tmp_path / "solved").unlink()
    done = run.make("collect[sft]", 0, request)
    assert "collect[sft]: 3 shards on process, 2 of them cached" in screen[1].getvalue()
    assert solved(tmp_path) == sorted(map(str, second))
    assert (done.artifact.key, done.artifact.digest) == (whole.key, whole.digest)
    run.close()


def test_shards_of_later_stages_run_in_the_same_processes(tmp_path, screen):
    run = execution(tmp_path / "split", screen, {"shards": 2})
    processes = []
    for scenarios in (6, 4):
        request = solver(tmp_path, scenarios=scenarios)
        whole, _ = run_stage(request, Context.at(tmp_path / "whole"))
        assert run.make("collect[sft]", 0, request).artifact.digest == whole.digest
        processes.append({lane: run.runner("collect", lane)._child.pid for lane in (0, 1)})
    assert processes[0] == processes[1]
    assert len({*processes[0].values()}) == 2
    run.close()
    assert not any(psutil.pid_exists(pid) for pid in processes[0].values())


def test_retries_are_of_single_shards(tmp_path, screen):
    whole, _ = run_stage(solver(tmp_path), Context.at(tmp_path / "whole"))
    (tmp_path / "solved").unlink()
    request = solver(tmp_path, trap=order(whole)[1])
    run = execution(tmp_path / "split", screen, {"shards": 3, "shard_workers": 1, "retries": 1, "retry_delay": 0})
    assert run.make("collect[sft]", 0, request).status == "ran"
    run.close()
    assert "collect[sft]: 3 shards on process, 1 at a time" in screen[1].getvalue()
    assert solved(tmp_path) == sorted(map(str, order(whole) + order(whole)[:2]))  # the first shard twice


def test_a_straggler_is_overtaken_by_its_copy(tmp_path, screen):
    whole, _ = run_stage(solver(tmp_path), Context.at(tmp_path / "whole"))
    request = solver(tmp_path, trap=order(whole)[-1], fate="wait")  # waits forever: only its copy can finish
    run = execution(tmp_path / "split", screen, {"shards": 2, "duplicate_after": 0.5})
    done = run.make("collect[sft]", 0, request)
    run.close()
    assert done.artifact.digest == whole.digest
    assert find_stage(shard_request(request, StagePart(1, 2), copy=1), run.context) is not None
    assert find_stage(shard_request(request, StagePart(1, 2)), run.context) is None


def test_failed_episodes_of_a_refused_collection_are_played_again(tmp_path):
    context = Context.at(tmp_path)
    request = Requests(spec(tmp_path)).collect(None, 1)
    request = Request(
        "collect", {**request.spec, "collect": {**request.spec["collect"], "max_failures": 0}}, {}, 0, ("tests",)
    )
    shards = []
    for index in range(3):
        key = request_key(shard_request(request, StagePart(index, 3)), context)
        rows = [episode(f"s{index}"), episode(f"s{index}", 1, failure=FAILURE if index == 1 else None)]
        with context.store.draft(key, stage="shard", kind="shard", schema_version=1, inputs={}) as draft:
            write_trajectories(draft.path / "trajectories.parquet", rows)
            (draft.path / "times.json").write_text("{}")
        shards.append(context.store.find(key))
    with pytest.raises(TooManyFailures, match="1 of 6 episodes failed, more than the 0"):
        joined(request, shards, context)
    forget_failures(shards, context.store, "too many")
    assert [context.store.find(shard.key) is not None for shard in shards] == [True, False, True]
    assert [path.name for path in context.store.scratch(shards[1].key).glob("*.parquet")] == ["episodes-00000.parquet"]


SPLIT = {"compute": {"default": "process", "shards": 2}}
NORMALISED = {
    "_target_": "components.rewards.composition.normalised.Normalised",
    "reward": {"_target_": "components.rewards.rules.outcome.Outcome"},
    "over": "running",
}
BETWEEN = {"_target_": "components.filters.between.Between", "number": "turns", "minimum": 1}
UNSPLIT = [
    ({"compute": {"shards": 2}}, "filter, evaluate run on local, in the process of the flow"),
    ({"compute": {"stage_shards": {"train": 2}}}, "'train': expected a stage that can be split"),
    ({"compute": {"default": "process", "shards": 2, "parallel": 2}}, "cannot be combined with compute.parallel"),
    ({**SPLIT, "filter": {"_target_": "components.filters.top.Top"}},
     "filter cannot be split: it has a filter that compares the episodes of the whole collection; expected 1"),
    ({**SPLIT, "reward": NORMALISED}, "judge cannot be split: it has a reward with running statistics"),
    ({**SPLIT, "filter": BETWEEN}, "filter cannot be split"),
    ({**SPLIT, "collect": {"partial": {"turns": 2}}}, "collect cannot be split: it pauses episodes"),
    ({**SPLIT, "judge": {"ahead": True}}, "collect cannot be split: it judges episodes while others are played"),
]  # fmt: skip


def test_what_cannot_be_split_is_refused(tmp_path):
    assert wrong_refusals(UNSPLIT, lambda changes: spec_of(tmp_path, **changes)) == []


def test_a_sample_of_anchors_is_judged_as_a_whole(tmp_path):
    compute = spec_of(tmp_path, compute={"default": "process", "shards": 4}).compute
    part = {"reward": spec_of(tmp_path).reward.model_dump()}
    anchors = {**part, "anchors": {"groups": 2, "number": 1}}
    assert shard_count(compute, Request("judge", part, {}), lambda: None) == 4
    assert shard_count(compute, Request("judge", anchors, {}), lambda: None) == 1


@pytest.mark.parametrize("place", ["ray", "dask"])
def test_a_local_cluster_makes_the_same(tmp_path, screen, place, prefect_server):
    for package in (f"prefect_{place}", "ray" if place == "ray" else "distributed"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[{place}]'")
    from prefect import flow
    from prefect.settings import temporary_settings

    from flows.orchestration.task_runners import TaskRunners
    from flows.orchestration.tasks import as_tasks

    request = solver(tmp_path)
    whole, _ = run_stage(request, Context.at(tmp_path / "whole"))
    run = execution(tmp_path / "split", screen, {"default": place, "shards": 3})
    runners = TaskRunners()
    run._runner_context = type(run._runner_context)(**{**vars(run._runner_context), "submit": runners.submit})
    made = []

    @flow(name="shards")
    def collect():
        call = as_tasks(run.make)
        made.append(call("collect[sft]", 0, request))
        made.append(call("collect[more]", 0, solver(tmp_path, scenarios=4)))  # on the cluster of the first one

    try:
        with temporary_settings(prefect_server.settings()):
            collect()
    finally:
        run.close()
        runners.close()
    assert made[0].digest == whole.digest
    assert [artifact.metrics["shards"] for artifact in made] == [3, 3]
