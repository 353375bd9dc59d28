"""Tests of the LiteLLM engine over real sockets: OpenAI's protocol, costs, keys, and refusals."""

from __future__ import annotations

import asyncio
import gc

import pytest
from pydantic import ValidationError

from components import retry
from components.errors import EngineError, ResourceError, StalePolicy
from components.inference.engines.litellm import LiteLLMEngine, LiteLLMSpec
from components.inference.protocol import ChatRequest, Sampling
from components.litellm_client import litellm
from components.specs.served import PriceSpec
from tests.inference.faulty import EMPTY, Line, answer, completion, status
from tests.inference.test_server import WEATHER
from tests.rollout.worlds import discard_litellm_clients

HELLO = ChatRequest([{"role": "user", "content": "hello"}], [WEATHER], sampling=Sampling(0.5, max_tokens=17), seed=5)
GOOD = completion({"content": "yes"})

pytestmark = pytest.mark.timeout(1800)  # where its files are not in memory, LiteLLM alone takes a minute to import


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test-0123456789")


@pytest.fixture(autouse=True, scope="module")
def _closed():
    """Surface LiteLLM's warnings about ended event loops here instead of in other tests."""
    yield
    gc.collect()


def ask(url: str, request: ChatRequest = HELLO, **options):
    extra = {"api_base": url, **options.pop("extra", {})}
    spec = LiteLLMSpec(**{"model": "openai/shop", "extra": extra, "retry_for": 5.0} | options)
    return asyncio.run(LiteLLMEngine(spec).chat(request))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning")
def test_other_code_in_the_process_calls_litellm_on_its_own_event_loops(echo):
    async def call(url):
        messages = [{"role": "user", "content": "x"}]
        await litellm().acompletion(model="openai/shop", messages=messages, api_base=url, max_retries=0)

    for _ in range(2):
        ask(echo[1].url)
        asyncio.run(call(echo[1].url))
    discard_litellm_clients()


def test_a_request_reaches_the_model_with_its_tools_and_its_tokens_are_counted(echo):
    engine, server = echo
    answered = ask(server.url, price=PriceSpec(input=1e6, output=2e6))
    (request,) = engine.requests
    assert request.messages == HELLO.messages
    assert request.tools == HELLO.tools
    assert (request.sampling, request.seed) == (HELLO.sampling, HELLO.seed)
    assert answered.message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert (answered.finish_reason, answered.token_ids, answered.policy) == ("tool_calls", [], "base")
    assert answered.usage is not None
    assert (answered.usage.prompt_tokens, answered.sampled_tokens) == (3, 1)
    assert answered.usage.cost == pytest.approx(3 * 1.0 + 1 * 2.0)
    unpriced = ask(server.url).usage
    assert unpriced is not None
    assert unpriced.cost is None


def test_what_may_pass_is_retried():
    for fault in (status(429), EMPTY, status(503)):
        with Line(faults=[fault, answer(GOOD)]) as line:
            assert ask(line.url).message["content"] == "yes"


def test_what_does_not_pass_ends_at_once():
    for reply, error, message in (
        (status(401), ResourceError, "refuses the key"),
        (status(404), ResourceError, "does not exist .*inference.model"),
        (status(400), EngineError, "openai/shop"),
    ):
        with Line(faults=[reply]) as line, pytest.raises(error, match=message):
            ask(line.url)


def test_parameters_of_a_request_can_be_added_and_removed(echo):
    engine, server = echo
    ask(server.url, extra={"temperature": None, "top_p": 0.5})
    assert (engine.requests[0].sampling.top_p, engine.requests[0].sampling.temperature) == (0.5, 1.0)


def test_it_holds_no_trained_policy(monkeypatch):
    engine = LiteLLMEngine(LiteLLMSpec(model="openai/shop"))
    engine.load_policy("base", None)
    with pytest.raises(ResourceError, match="cannot load a trained policy"):
        engine.load_policy("v1", "/somewhere")
    with pytest.raises(StalePolicy, match="asked for policy v1"):
        asyncio.run(engine.chat(ChatRequest(HELLO.messages, policy="v1")))


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    for options, message in (
        ({}, "the environment lacks OPENAI_API_KEY"),
        ({"key_variable": "NOT_SET_1"}, "inference.key_variable: the environment variable NOT_SET_1 is not set"),
        ({"model": "nowhere/model"}, "LiteLLM knows no provider nowhere"),
    ):
        with pytest.raises(ResourceError, match=message):
            LiteLLMSpec(**{"model": "openai/shop"} | options).check_prerequisites()
    with pytest.raises(ValidationError, match="no secrets such as api_key"):
        LiteLLMSpec(model="openai/shop", extra={"api_key": "sk-0123456789"})


def test_the_address_is_no_part_of_the_key():
    def key(**options):
        return LiteLLMSpec(**{"model": "openai/shop"} | options).key_part()

    assert key(extra={"api_base": "http://127.0.0.1:1/v1"}) == key(timeout=5.0)
    assert key(extra={"top_p": 0.5}) != key()
    assert key(model="openai/other") != key()
