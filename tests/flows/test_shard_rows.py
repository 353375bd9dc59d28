"""Shards by rows: as many as the rows of a stage need, with the key and the digest of the whole stage."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from components.compute.spec import ComputeSpec
from components.errors import SpecError
from components.trajectories.schema import Score
from components.trajectories.store import count_trajectories
from flows import plan as command
from flows.execution.executor import Execution
from flows.execution.sharding import count_rows, shard_count
from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.planning.plan import plan
from flows.stages.base import Context, Request, StagePart
from flows.stages.execute import run_stage
from flows.stages.shard import joined, shard_request
from tests.data import rows as samples
from tests.flows.pretend import spec_of, store_episodes
from tests.trajectories.builders import episode

SUCCESSFUL = {"_target_": "components.filters.successful.Successful"}
INPUTS = {"trajectories": "trajectories", "scores": "scores"}


def spec(root, rows, compute=(), **changes):
    """An experiment whose stages are split into shards of `rows` rows. The held-out split has 11 scenarios."""
    settings = {
        "allow": ["tests"],
        "environment": {"_target_": "tests.flows.mortal.Mortal", "folder": str(root), "count": 11},
        "warmup": {"demonstrations": 10, "filter": SUCCESSFUL},
        "collect": {"scenarios": 5, "group_size": 3},
        "evaluate": {"scenarios": 7, "samples": 2, "temperature": 1.0},
        "compute": {"default": "process", "shard_rows": rows, **dict(compute)},
    }
    return spec_of(root, **{**settings, **changes})


def count(spec, request, context):
    return shard_count(spec.compute, request, lambda: count_rows(request, context))


def test_rows_of_episodes_to_play(tmp_path):
    """5 × 3 episodes of a collection, 10 demonstrations, 7 × 2 of an evaluation, 7 of one by the solver."""
    expected = {1: (15, 10, 14, 7), 4: (4, 3, 4, 2), 7: (3, 2, 2, 1), 15: (1, 1, 1, 1)}
    context = Context.at(tmp_path)
    for rows, counts in expected.items():
        split = spec(tmp_path, rows)
        requests = Requests(split)
        played = [requests.collect(None, 1), requests.demonstrate(), requests.evaluate(None)]
        played.append(requests.evaluate(None, actor="solver"))
        assert tuple(count(split, request, context) for request in played) == counts, rows


def test_an_evaluation_on_all_scenarios_asks_the_environment(tmp_path):
    for rows, shards in ((4, 3), (11, 1), (12, 1)):
        split = spec(tmp_path, rows, evaluate={"scenarios": None, "temperature": 1.0})
        assert count(split, Requests(split).evaluate(None), Context.at(tmp_path)) == shards


def store_groups(context, groups=7):
    """Store trajectories and scores of groups of one to three episodes: 13 rows for 7 groups."""
    episodes = [episode(f"s{n}", k, success=(n + k) % 2 == 1) for n in range(groups) for k in range(1 + n % 3)]
    store_episodes(context, episodes, [Score(row.id, float(row.success)) for row in episodes])


def write_rows(path, count):
    rows = [{**samples.FORMS["thumbs"][0], "prompt": f"What is {n}?"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ["not an object"]]))
    return str(path)


def request_of(stage, split, tmp_path):
    requests = Requests(split)
    if stage == "import":
        return requests.import_data()
    if stage == "judge":
        part = {"reward": split.reward.model_dump(), "model": split.model.base().model_dump()}
        return Request("judge", part, {"trajectories": INPUTS["trajectories"]})
    if stage == "filter":
        return Request("filter", {"filter": SUCCESSFUL}, INPUTS)
    return requests.demonstrate() if stage == "collect" else requests.evaluate(None, actor="random")


@pytest.mark.parametrize(
    ("stage", "rows", "shards"),
    [("collect", 4, 3), ("evaluate", 3, 3), ("judge", 5, 3), ("filter", 6, 3), ("import", 4, 3)],
)
def test_the_digest_is_that_of_the_whole_stage(tmp_path, stage, rows, shards):
    changes = {}
    if stage == "import":
        changes["data"] = {"path": write_rows(tmp_path / "a.jsonl", 10), "max_dropped": 1.0}
    if stage == "evaluate":
        changes["environment"] = spec_of(tmp_path).environment.model_dump()
        changes["evaluate"] = {"scenarios": 4, "samples": 2, "temperature": 1.0}
    split = spec(tmp_path, rows, **changes)
    request, made = request_of(stage, split, tmp_path), []
    for name in ("whole", "split"):
        context = Context.at(tmp_path / name)
        if stage in ("judge", "filter"):
            store_groups(context)
        if name == "whole":
            made.append(run_stage(request, context)[0])
            continue
        assert count(split, request, context) == shards
        parts = [run_stage(shard_request(request, StagePart(n, shards)), context)[0] for n in range(shards)]
        if stage in ("collect", "evaluate"):  # a scenario of an evaluation has two episodes, which stay together
            most = max(count_trajectories(part.path / "trajectories.parquet") for part in parts)
            assert most <= rows + (stage == "evaluate")
        made.append(joined(request, parts, context))
    assert (made[0].key, made[0].digest) == (made[1].key, made[1].digest)


def test_held_out_rows_of_a_source_of_their_own_count(tmp_path):
    data = {"path": write_rows(tmp_path / "a.jsonl", 10), "heldout_path": write_rows(tmp_path / "b.jsonl", 5)}
    split = spec(tmp_path, 4, data={**data, "max_dropped": 1.0})
    assert count(split, Requests(split).import_data(), Context.at(tmp_path)) == 4
    split = spec(tmp_path, 4, data={**data, "max_dropped": 1.0, "limit": 3})
    assert count(split, Requests(split).import_data(), Context.at(tmp_path)) == 2


def test_a_run_splits_by_rows_except_stages_with_a_number_of_their_own(tmp_path, screen):
    whole, _ = run_stage(Requests(spec(tmp_path, 5)).demonstrate(), Context.at(tmp_path / "whole"))
    root, places = tmp_path / "split", {"stages": {"filter": "local", "deploy": "local"}, "stage_shards": {"filter": 1}}
    split = spec(root, 5, places)
    run = Execution(split, Context.at(root), screen[0], None, tmp_path / "log")
    shards = run.make("collect[sft]", 0, Requests(split).demonstrate()).artifact
    store_groups(run.context)
    run.make("filter[sft]", 0, request_of("filter", split, tmp_path))
    run.close()
    assert "collect[sft]: 2 shards on process" in screen[1].getvalue()
    assert "filter[sft]: " not in screen[1].getvalue()
    assert (shards.digest, shards.metrics["shards"]) == (whole.digest, 2)


def test_the_plan_marks_numbers_that_depend_on_pending_results(tmp_path):
    split = spec(tmp_path, 4, {"stage_shards": {"filter": 1}}, rounds=1)
    stages = {stage.label: stage for stage in plan(split).stages}
    shown = {
        label: (stage.shard_count, stage.shard_count_estimated, len(stage.shards)) for label, stage in stages.items()
    }
    assert shown["collect[sft]"] == (3, False, 3)
    assert shown["judge[sft]"] == (3, True, 3)
    assert shown["filter[sft]"] == (1, False, 0)
    assert shown["evaluate[start]"] == (4, False, 4)
    assert shown["train[sft]"] == (1, False, 0)
    text = command.show(plan(split))
    assert "shard 3/3" in text
    assert "about 3 shards" in text


REFUSED = [
    (["compute=process", "compute.shards=2", "compute.shard_rows=100"], "compute.shard_rows",
     "100: set together with compute.shards=2, the number of shards; expected one of them", "compute.shards=1"),
    (["compute=ray", "compute.shard_rows=100"], "compute.shard_rows",
     "100: set together with compute.shards=2, the number of shards; expected one of them", "compute.shards=1"),
    (["compute.shard_rows=100"], "compute.shard_rows",
     "100: import, collect, judge, filter, evaluate run on local, in the process of the flow, one part after the "
     "other; expected null, or another place", "compute=process"),
    (["compute=process", "compute.shard_rows=100", "compute.parallel=2"], "compute.shard_rows",
     "100: cannot be combined with compute.parallel, whose stages run in single processes beside the others; "
     "expected null", None),
    (["compute=process", "compute.shard_rows=100", "filter=top"], "compute.stage_shards.filter",
     "null, with compute.shard_rows=100: filter cannot be split: it has a filter that compares the episodes of the "
     "whole collection; expected 1", None),
    (["compute=process", "compute.shard_rows=0"], "compute.shard_rows", "0: expected", None),
]  # fmt: skip


def test_what_is_refused():
    for lines, key, message, remedy in REFUSED:
        with pytest.raises(SpecError) as caught:
            compose(["+experiment=smoke", *lines])
        (problem,) = caught.value.problems
        assert (problem.path, problem.nearest) == (key, remedy)
        assert problem.message.startswith(message)


def test_the_remedy_of_a_filter_is_accepted():
    lines = ["compute=process", "compute.shard_rows=100", "filter=top", "compute.stage_shards.filter=1"]
    compute = compose(["+experiment=smoke", *lines]).compute
    assert (compute.shards_of("filter"), compute.shards_of("judge"), compute.shards_for(101)) == (1, None, 2)


def test_a_stage_has_at_most_so_many_shards():
    expected = {0: 1, 1: 1, 4096: 4096, 4097: 4096, 10**6: 4096}
    assert {rows: ComputeSpec(shard_rows=1).shards_for(rows) for rows in expected} == expected
    with pytest.raises(ValidationError, match="4096"):
        ComputeSpec(shards=4097)
