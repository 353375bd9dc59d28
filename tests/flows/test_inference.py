"""Stages that play episodes on a server, in front of it our own."""

from __future__ import annotations

import pytest

from components.errors import ResourceError, SpecError
from components.inference.server import ModelServer
from components.trajectories.store import read_trajectories
from flows.experiment.compose import check, compose
from flows.experiment.requests import Requests
from flows.stages.base import Request
from flows.stages.execute import run_stage
from tests.deployment.tiny import TINY

SHOP = {"_target_": "components.environments.worlds.shop.Shop", "train": 8, "heldout": 4}
REWARD = {"_target_": "components.rewards.rules.outcome.Outcome"}
AGENT = {"max_turns": 2, "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from components.inference.transformers.engine import TransformersEngine
    from components.models.weights import prepare

    folder = prepare(TINY, tmp_path_factory.getbasetemp() / "models")
    with ModelServer(TransformersEngine(folder, max_length=2048, device="cpu"), "tiny") as running:
        yield running


def remote(server, **options):
    return {"name": "remote", "url": server.url, "model": "tiny", "retry_for": 1.0, **options}


def requests(server, **options):
    part = {
        "model": {**TINY.model_dump(), "max_length": 2048},
        "environment": SHOP,
        "agent": AGENT,
        "inference": remote(server, **options),
    }
    collect = {**part, "collect": {"scenarios": 2, "group_size": 2, "concurrency": 1}}
    evaluate = {**part, "reward": REWARD, "evaluate": {"scenarios": 2}}
    return Request("collect", collect), Request("evaluate", evaluate)


def test_episodes_are_played_on_a_server_with_their_tokens(server, context):
    collect, _ = requests(server)
    artifact, _ = run_stage(collect, context)
    local, _ = run_stage(Request("collect", {**collect.spec, "inference": {"name": "embedded"}}), context)
    assert local.key != artifact.key
    theirs, ours = (list(read_trajectories(one.path / "trajectories.parquet")) for one in (artifact, local))
    assert [one.histories[0].token_ids for one in theirs] == [one.histories[0].token_ids for one in ours]
    context.warm.close()


def test_a_server_without_tokens_can_be_evaluated(server, context):
    artifact, _ = run_stage(requests(server, tokens=False)[1], context)
    assert artifact.metrics["failed"] == 0
    for trajectory in read_trajectories(artifact.path / "trajectories.parquet"):
        [history] = trajectory.histories
        assert history.token_ids == []
        assert [message.span for message in history.messages] == [None] * len(history.messages)
        assert {message.role for message in history.messages} >= {"user", "assistant"}
    context.warm.close()


def test_a_server_that_is_not_there_or_lacks_the_model_stops_the_stage(server, context):
    with pytest.raises(ResourceError, match=r"inference\.model: .* does not have 'other'"):
        run_stage(requests(server, model="other")[0], context)
    with pytest.raises(ResourceError, match=r"inference: http://127\.0\.0\.1:1/v1 is unreachable"):
        run_stage(requests(server, url="http://127.0.0.1:1/v1", retry_for=600)[0], context)


def test_training_on_episodes_without_tokens_is_refused():
    command = ["+experiment=smoke", "inference=remote", "inference.url=http://there/v1", "inference.model=tiny"]
    check([*command, "inference.tokens=false", "rounds=0"])
    with pytest.raises(SpecError, match=r"inference.tokens: false, but rounds=1 trains on the collected tokens"):
        check([*command, "inference.tokens=false"])
    with pytest.raises(SpecError, match=r"inference\.url"):
        check(["+experiment=smoke", "inference=remote"])


def test_the_solver_needs_no_server():
    """Else its stage would need --trust, and would count as one that cannot be repeated."""
    spec = compose(["+experiment=smoke", "inference=remote", "inference.url=http://127.0.0.1:1", "inference.model=m"])
    assert Requests(spec).demonstrate().spec["inference"]["name"] == "embedded"
    assert Requests(spec).collect(None, 1).spec["inference"]["name"] == "remote"
