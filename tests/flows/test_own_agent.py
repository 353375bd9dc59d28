"""An agent of one's own in a run: its function is named in the configuration, its episodes are those of the stage."""

from __future__ import annotations

import json
import urllib.request

import pytest

from components.errors import TooManyFailures
from components.specs import validate
from components.trajectories.store import read_trajectories
from flows.experiment.spec import ExperimentSpec
from flows.stages.execute import run_stage
from tests.deployment.tiny import TINY
from tests.flows.test_online_rl import DATA, Recorder, changed
from tests.refusals import wrong_refusals

HERE = "tests.flows.test_own_agent"


def ask(base_url, api_key, model, messages):
    """Ask over plain HTTP; return the message of the answer."""
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["message"]


def agent(scenario, base_url, api_key, model, *, turns: int = 2):
    """Asks and asks again."""
    talk = [{"role": "user", "content": scenario.input["request"]}]
    for _ in range(turns):
        message = ask(base_url, api_key, model, talk)
        talk += [{"role": "assistant", "content": message["content"] or ""}, {"role": "user", "content": "And?"}]
    return {"success": False, "reward": 0.25}


def quiet(scenario, base_url, api_key, model):
    return agent(scenario, base_url, api_key, model, turns=1)["reward"]


def broken(scenario):
    raise KeyError("order")


def run(tmp_path, **given) -> Recorder:
    own = {"max_turns": 4, "max_tokens": 8, "function": given or f"{HERE}.agent"}
    model = {**TINY.model_dump(), "max_length": 2048}
    return Recorder(tmp_path, agent=own, model=model, allow=["tests"], warmup=None)


def test_its_episodes_are_those_of_the_stage(tmp_path, context):
    recorded = run(tmp_path)
    artifact, _ = run_stage(recorded.requests["collect[1]"], context)
    found = list(read_trajectories(artifact.path / "trajectories.parquet"))
    context.warm.close()
    assert found
    for one in found:
        assert one.failure is None
        assert one.outcome == {"success": False, "reward": 0.25}
        assert one.metrics["turns"] == 2
        sampled = [message for history in one.histories for message in history.messages if message.span]
        assert len(sampled) == 2
        assert all(0 < message.span[1] - message.span[0] <= 8 for message in sampled)
        assert sum(sum(history.sampled_mask()) for history in one.histories) == one.metrics["sampled_tokens"]


def test_who_says_nothing_of_success_is_named(tmp_path, context, caplog):
    recorded = run(tmp_path, _target_=f"{HERE}.quiet")
    run_stage(recorded.requests["evaluate[start]"], context)
    context.warm.close()
    assert f"{HERE}.quiet returns `success` for no episode" in caplog.text
    assert "Shop" not in caplog.text


def test_too_many_failures_say_where_and_what_can_be_done(tmp_path, context):
    recorded = run(tmp_path, _target_=f"{HERE}.broken")
    with pytest.raises(TooManyFailures) as raised:
        run_stage(recorded.requests["collect[1]"], context)
    context.warm.close()
    text = str(raised.value)
    assert text.startswith("collect, round 1: 1 of ")
    assert "KeyError: 'order'" in text
    assert text.endswith("The same command retries the failed episodes; collect.max_failures sets how many may fail")


def test_another_argument_is_another_agent(tmp_path):
    first, other = run(tmp_path), run(tmp_path, _target_=f"{HERE}.agent", turns=1)
    assert {"evaluate[start]", "collect[1]"} <= set(changed(first, other))
    assert changed(first, run(tmp_path)) == []


REFUSED = [
    ({"function": f"{HERE}.agent", "format": "react"}, r"agent\.format: react: applies to the agent loop"),
    (
        {"function": f"{HERE}.agent", "max_observation": 500},
        r"agent\.max_observation: 500: truncates observations of the agent loop",
    ),
    ({"code": {"seconds": 3}}, r"agent\.code: limits code execution, which agent\.format=native does not use"),
    ({"function": f"{HERE}.nobody"}, r"agent\.function.*'nobody' does not exist"),
    ({"function": "os.system"}, r"agent\.function.*belongs to Python's standard library"),
    ({"function": {"_target_": f"{HERE}.agent", "often": 2}}, r"agent\.function.*often"),
]


def test_what_cannot_be_is_named(tmp_path):
    data = {**DATA, "root": str(tmp_path), "allow": ["tests"]}
    assert wrong_refusals(REFUSED, lambda own: validate(ExperimentSpec, {**data, "agent": own})) == []
