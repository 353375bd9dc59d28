"""The stage judge with a judge behind a real socket that wants to be paid."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from components.errors import BudgetExceeded, ResourceError
from components.trajectories.store import read_scores
from flows.stages.base import Context, Request
from flows.stages.execute import find_stage, request_key, run_stage
from tests.flows.pretend import store_episodes
from tests.flows.processes import ROOT, stage_line
from tests.rewards import judge_replies as replies
from tests.rewards.judge_server import GOOD, Reply, judge_server
from tests.trajectories.builders import episode, talk

GROUPS = 12
MODEL = {"name": "tiny", "source": "random"}


def episodes():
    """Groups of three, each with texts of its own."""
    return [
        episode(f"g{group:02}", i, histories=[talk(f"Task {group}.", f"Try {i} of {group}: quality 0.{i + 1}")])
        for group in range(GROUPS)
        for i in range(3)
    ]


def requested(context, server, judge=None, **model):
    asks = {"name": "served", "url": server.url, "model": "judge", "retry_for": 1}
    asks |= {"price": {"input": 1000.0, "output": 1000.0}} | model
    inputs = store_episodes(context, episodes())
    part = {"reward": {"_target_": "components.rewards.judges.ruler.Ruler", "model": asks}, "model": MODEL}
    return Request("judge", part | {"judge": judge or {}}, inputs)


def rewards(artifact):
    return [score.reward for score in read_scores(artifact.path / "scores.parquet")]


RIGHT = [0.1, 0.2, 0.3] * GROUPS
ONE_BY_ONE = {"concurrency": 1}


# The budget


def test_a_budget_ends_the_stage_and_a_higher_one_asks_only_for_the_rest(context):
    with judge_server() as server:
        whole = Context.at(context.store.root.parent / "whole")
        full, _ = run_stage(requested(whole, server, ONE_BY_ONE), whole)
        price, asked = full.metrics["spent"], len(server.requests)
        assert asked == GROUPS
        with pytest.raises(BudgetExceeded, match=r"Finished judgements are cached: .* higher judge\.budget resumes"):
            run_stage(requested(context, server, {"budget": 0.6 * price, **ONE_BY_ONE}), context)
        before = len(server.requests) - asked
        assert 0 < before < GROUPS
        with pytest.raises(BudgetExceeded):  # the same budget buys nothing more
            run_stage(requested(context, server, {"budget": 0.6 * price, **ONE_BY_ONE}), context)
        assert len(server.requests) - asked == before
        artifact, _ = run_stage(requested(context, server, {"budget": 2 * price, **ONE_BY_ONE}), context)
    assert len(server.requests) == 2 * GROUPS
    assert rewards(artifact) == pytest.approx(RIGHT)
    assert artifact.metrics["cost"] == pytest.approx(price)
    assert artifact.metrics["calls"] == GROUPS - before
    assert artifact.metrics["spent"] == pytest.approx(price * (GROUPS - before) / GROUPS, rel=0.05)
    assert artifact.digest == full.digest


def test_what_is_under_way_when_the_budget_is_spent_is_kept(context):
    """Of five at once the first answer shows that no more can be paid; the other four come later."""
    with judge_server(lambda asked: Reply(after=0.0 if asked.number == 0 else 0.5)) as server:
        least = {"budget": 1.2, "concurrency": 5}  # to read five questions costs less, and their answers more
        with pytest.raises(BudgetExceeded):
            run_stage(requested(context, server, least), context)
        paid = len(server.requests)
        assert paid <= 5
        artifact, _ = run_stage(requested(context, server, {"concurrency": 5}), context)
    assert len(server.requests) == GROUPS
    assert artifact.metrics["calls"] == GROUPS - paid
    assert rewards(artifact) == pytest.approx(RIGHT)


def test_a_budget_without_a_price_asks_nothing(context):
    with judge_server() as server, pytest.raises(ResourceError, match=r"judge\.budget=1 cannot be kept"):
        run_stage(requested(context, server, {"budget": 1.0}, price=None), context)
    assert server.requests == []


def test_a_price_that_nobody_knows_is_counted_as_such(context):
    with judge_server() as server:
        artifact, _ = run_stage(requested(context, server, price=None), context)
    assert (artifact.metrics["unpriced_calls"], artifact.metrics["unpriced"]) == (GROUPS, 3 * GROUPS)
    assert {score.cost for score in read_scores(artifact.path / "scores.parquet")} == {None}


# What is asked once


def test_a_second_run_of_the_same_judgement_makes_no_call(context):
    with judge_server() as server:
        request = requested(context, server)
        first, _ = run_stage(request, context)
        (context.store.root / first.key).rename(context.store.root.parent / "gone")
        assert find_stage(request, context) is None
        with judge_server() as elsewhere:  # the same judge at another address
            again, status = run_stage(requested(context, elsewhere), context)
    assert (status, again.digest) == ("ran", first.digest)
    assert (len(server.requests), elsewhere.requests) == (GROUPS, [])
    assert again.metrics["kept_answers"] == GROUPS
    assert (again.metrics["calls"], again.metrics["spent"]) == (0, 0)
    assert again.metrics["cost"] == pytest.approx(first.metrics["cost"])  # what the judgement is worth, not paid now


def test_another_model_or_parameter_is_another_question(context):
    with judge_server(models=["judge", "better"]) as server:
        for number, model in enumerate(({}, {"model": "better"}, {"temperature": 0.5}, {"extra": {"top_p": 0.9}}), 1):
            run_stage(requested(context, server, **model), context)
            assert len(server.requests) == number * GROUPS


def test_what_could_not_be_judged_is_not_kept_and_asked_again(context):
    with judge_server(lambda asked: replies.NO_JSON if "Task 3." in asked.prompt else GOOD) as server:
        request = requested(context, server)
        first, _ = run_stage(request, context)
        assert first.metrics["unscored"] == 3
        (context.store.root / first.key).rename(context.store.root.parent / "gone")
        server._meet = lambda asked: GOOD
        before = len(server.requests)
        again, _ = run_stage(request, context)
    assert len(server.requests) == before + 1
    assert rewards(again) == pytest.approx(RIGHT)


def test_two_processes_that_judge_at_the_same_time_leave_one_whole_file(context, tmp_path):
    roots = [tmp_path, tmp_path / "other"]
    (tmp_path / "answers").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "answers").symlink_to(tmp_path / "answers")
    with judge_server(lambda asked: Reply(after=0.02)) as server:
        running = []
        for root in roots:
            command = [sys.executable, *stage_line(root, requested(Context.at(root), server))]
            running.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        assert [one.wait(600) for one in running] == [0, 0]
        assert GROUPS <= len(server.requests) <= 2 * GROUPS
        before = len(server.requests)
        third = Context.at(tmp_path / "third")
        (tmp_path / "third").mkdir(exist_ok=True)
        (tmp_path / "third" / "answers").symlink_to(tmp_path / "answers")
        artifact, _ = run_stage(requested(third, server), third)
    assert len(server.requests) == before
    assert rewards(artifact) == pytest.approx(RIGHT)


def test_a_file_of_answers_that_is_damaged_ends_the_stage_before_a_call(context, tmp_path):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "answers.sqlite").write_bytes(b"no database" * 100)
    with judge_server() as server, pytest.raises(ResourceError, match="move it away"):
        run_stage(requested(context, server), context)
    assert server.requests == []


# Batches and providers in a stage


def test_a_stage_in_batches_is_one_batch_and_says_that_it_waits(context, monkeypatch):
    from dataclasses import replace

    from components.rewards.llm import batches

    monkeypatch.setattr(batches, "QUIET", 0.3)
    monkeypatch.setattr(batches, "FIRST_PAUSE", 0.05)
    told: list[str] = []
    with judge_server() as server:
        single, _ = run_stage(requested(context, server), context)
        other = replace(Context.at(context.store.root.parent / "other"), on_wait=told.append)
        request = requested(other, server, {"concurrency": GROUPS}, batch=True)
        artifact, _ = run_stage(request, other)
    assert len(server.batches) == 1
    assert rewards(artifact) == pytest.approx(RIGHT)
    assert artifact.metrics["spent"] == pytest.approx(single.metrics["spent"] / 2)
    assert told
    assert artifact.key == request_key(requested(other, server), other)  # how it was asked is no part of it


@pytest.mark.timeout(1800)  # where its files are not in memory, LiteLLM alone takes a minute to import
def test_litellm_judges_one_stage_after_another_in_one_process(context, monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    with judge_server(replies.for_share(0.2, replies.OVERLOADED), models=["gpt-4.1-mini", "gpt-4.1"]) as server:
        asks = {"name": "litellm", "model": "openai/gpt-4.1-mini", "extra": {"api_base": server.url}, "price": None}
        for model, price in (("gpt-4.1-mini", (0.4, 1.6)), ("gpt-4.1", (2.0, 8.0))):
            request = requested(context, server)
            request.spec["reward"]["model"] = {**asks, "model": f"openai/{model}"}
            artifact, _ = run_stage(request, context)
            assert rewards(artifact) == pytest.approx(RIGHT)
            read, written = artifact.metrics["prompt_tokens"], artifact.metrics["completion_tokens"]
            assert artifact.metrics["spent"] == pytest.approx((read * price[0] + written * price[1]) / 1e6)
            assert artifact.metrics["calls"] == GROUPS
    gc.collect()
    assert "LiteLLM" not in "".join(capfd.readouterr())
