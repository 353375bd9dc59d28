"""Serving check: real engine, real server, real socket."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from components.deployment.answers import answers_of
from components.deployment.check import check_serving, opening_requests
from components.deployment.export import export_merged as export
from components.errors import EngineError
from components.inference.protocol import BASE_POLICY
from components.inference.server import engine_over_http
from tests.deployment.tiny import TINY, write_adapter

SERVE = partial(engine_over_http, max_length=TINY.max_length, device="cpu")


@pytest.fixture(scope="module")
def policy(base_dir, adapter_dir):
    """Return the engine with the trained adapter."""
    from components.inference.transformers.engine import TransformersEngine

    engine = TransformersEngine(base_dir, max_length=TINY.max_length, device="cpu")
    engine.load_policy("trained", str(adapter_dir))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def requests(held_out):
    return opening_requests(held_out, 3, policy="trained", max_tokens=12)


@pytest.fixture(scope="module")
def answers(policy, requests):
    return answers_of(policy, requests)


def test_requests_are_the_openings_of_different_scenarios(requests, held_out):
    assert len(requests) == 3
    assert [request.messages[1]["content"] for request in requests] == [
        f"Where is my order {index}? Grüße" for index in range(3)
    ]
    for request in requests:
        assert [message["role"] for message in request.messages] == ["system", "user"]
        assert request.tools == held_out[0].tools
        assert (request.policy, request.sampling.temperature, request.sampling.max_tokens) == ("trained", 0.0, 12)
    assert len(opening_requests(held_out, 100, policy="trained", max_tokens=12)) == 4


def test_an_export_answers_as_the_policy_does(base_dir, adapter_dir, tmp_path, answers, requests):
    export(base_dir, adapter_dir, tmp_path / "shop-agent", "")
    report = check_serving(tmp_path / "shop-agent", requests, answers, serve=SERVE)
    assert report["prompts"] == 3
    assert 3 <= report["tokens"] <= 36
    assert report["max_logprob_difference"] < 1e-5


def test_adapter_changes_the_answers(policy, requests, adapter_dir):
    """Without this, equal answers would prove nothing."""
    trained = asyncio.run(policy.chat(requests[0]))
    try:
        policy.load_policy(BASE_POLICY, None)
        base = asyncio.run(policy.chat(replace(requests[0], policy=BASE_POLICY)))
    finally:
        policy.load_policy("trained", str(adapter_dir))
    assert base.token_ids != trained.token_ids


def test_another_policys_export_is_caught(base_dir, tmp_path, answers, requests):
    other = write_adapter(base_dir, tmp_path / "adapter", seed=2)
    export(base_dir, other, tmp_path / "out", "")
    with pytest.raises(
        EngineError, match=r"differs from the policy trained on held-out prompt 0: token \d+ of the answer"
    ):
        check_serving(tmp_path / "out", requests, answers, serve=SERVE)


def test_a_changed_chat_template_is_caught(base_dir, adapter_dir, tmp_path, answers, requests):
    export(base_dir, adapter_dir, tmp_path / "out", "")
    template = tmp_path / "out" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>' + message", "<|im_start|> ' + message"))
    with pytest.raises(EngineError, match=r"token \d+ of the prompt"):
        check_serving(tmp_path / "out", requests, answers, serve=SERVE)


def test_error_of_the_server_is_reported(base_dir, adapter_dir, tmp_path, answers, requests):
    export(base_dir, adapter_dir, tmp_path / "out", "")
    with pytest.raises(EngineError, match=r"rejected a held-out prompt.*at most 32"):
        check_serving(tmp_path / "out", requests, answers, serve=partial(SERVE, max_length=32))


def test_a_check_that_compares_nothing_does_not_pass(tmp_path):
    with pytest.raises(EngineError, match="no held-out prompt"):
        check_serving(tmp_path, [], [], serve=SERVE)
