"""Tests of the remote engine over real sockets: responses, and failing servers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import closing
from functools import partial

import aiohttp
import httpx
import pytest

from components import json_client, retry
from components.environments.worlds.shop import Shop
from components.errors import ContextOverflow, EngineError, ResourceError, SpecError, StalePolicy, TooManyFailures
from components.inference.app import AppOptions
from components.inference.engines.remote import RemoteEngine, RemoteSpec
from components.inference.protocol import ChatRequest, Sampling
from components.inference.server import ModelServer
from components.rollout.request import episode_requests
from components.rollout.spec import EpisodeLimits
from components.specs import validate
from tests.inference.faulty import EMPTY, Line, answer, completion, cut, status
from tests.inference.test_server import WEATHER
from tests.rollout.worlds import run_episodes

GOOD = completion({"content": "yes"}, token_ids=[7, 8], logprobs={"content": [{"logprob": -0.5}, {"logprob": -1.0}]})
GOOD = json.dumps({**json.loads(GOOD), "prompt_token_ids": [1, 2], "model": "shop"})
HELLO = ChatRequest([{"role": "user", "content": "hello"}], sampling=Sampling(0.5, 0.9, 4, 17, 0.05), seed=2**57 + 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


@pytest.fixture
def connect():
    """Return a factory of engines, which are closed after the test."""
    engines = []

    def make(url: str, **options) -> RemoteEngine:
        spec = RemoteSpec(**{"name": "remote", "url": url, "model": "shop", "timeout": 5, "retry_for": 5} | options)
        engines.append(RemoteEngine(spec))
        return engines[-1]

    yield make
    for instance in engines:
        instance.close()


def ask(engine: RemoteEngine, request: ChatRequest = HELLO):
    return asyncio.run(engine.chat(request))


def test_a_request_reaches_the_other_engine_as_it_is(connect, echo):
    request = ChatRequest(HELLO.messages, [WEATHER], "base", HELLO.sampling, HELLO.seed)
    completion = ask(connect(echo[1].url), request)
    assert echo[0].requests == [request]
    assert completion.message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert completion.message["content"] == ""
    assert (completion.finish_reason, completion.prompt_token_ids, completion.token_ids) == (
        "tool_calls",
        [1, 2, 3],
        [0],
    )
    assert (completion.logprobs, completion.policy) == ([-0.5], "base")


def test_variables_of_the_chat_template_are_sent():
    with Line(faults=[answer(GOOD)]) as line:
        spec = RemoteSpec(name="remote", url=line.url, model="shop", timeout=5, retry_for=0)
        with closing(RemoteEngine(spec, {"enable_thinking": False})) as engine:
            ask(engine)
        assert line.seen[-1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_ids_of_a_long_prompt_do_not_count_as_a_reply_that_is_too_large(connect):
    ids = [100_000] * 250_000
    with Line(faults=[answer(json.dumps({**json.loads(GOOD), "prompt_token_ids": ids}))]) as line:
        request = ChatRequest([{"role": "user", "content": " x" * len(ids)}], sampling=HELLO.sampling)
        assert ask(connect(line.url), request).prompt_token_ids == ids


def played(engine, *, train: int, samples: int, max_tokens: int, max_turns: int, concurrency: int):
    """Return episodes in the shop."""
    shop = partial(Shop, seed=3, train=train, heldout=2)
    options = {"sampling": Sampling(max_tokens=max_tokens), "max_turns": max_turns, "seed": 1}
    requests = episode_requests(shop().scenarios("train"), samples, **options)
    return run_episodes(engine, shop, requests, EpisodeLimits(concurrency=concurrency, max_failures=0))


def test_episodes_are_those_of_the_engine_itself(connect, make_engine):
    """Token by token: what is drawn depends on the seed of each request."""

    def play(engine):
        return played(engine, train=4, samples=1, max_tokens=24, max_turns=2, concurrency=1)

    options = {"max_length": 4096}
    with ModelServer(make_engine(**options), "shop") as server:
        served = play(connect(server.url))
    ours = play(make_engine(**options))
    for trajectory, other in zip(served, ours, strict=True):
        assert [history.token_ids for history in trajectory.histories] == [
            history.token_ids for history in other.histories
        ]
        spans = [message.span for history in trajectory.histories for message in history.messages]
        assert spans == [message.span for history in other.histories for message in history.messages]


def test_an_adapter_becomes_the_policy_and_goes_again(connect, make_engine, adapter_dir, tmp_path):
    with ModelServer(make_engine(), "shop", AppOptions(adapters=adapter_dir.parent)) as server:
        engine = connect(server.url)
        base = ask(engine)
        engine.load_policy("v1", str(adapter_dir))
        with pytest.raises(StalePolicy):
            ask(engine)
        trained = ask(engine, ChatRequest(HELLO.messages, policy="v1", sampling=HELLO.sampling, seed=HELLO.seed))
        assert trained.logprobs != base.logprobs
        engine.load_policy("v2", str(adapter_dir))
        again = ask(engine, ChatRequest(HELLO.messages, policy="v2", sampling=HELLO.sampling, seed=HELLO.seed))
        assert again.logprobs == trained.logprobs
        engine.load_policy("base", None)
        assert ask(engine).logprobs == base.logprobs
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        with pytest.raises(ResourceError, match=r"does not load the adapter .*below"):
            engine.load_policy("v3", str(elsewhere))
    with ModelServer(make_engine(), "shop") as server, pytest.raises(ResourceError, match="--adapters"):
        connect(server.url).load_policy("v1", str(adapter_dir))


def test_the_version_of_an_adapter_is_a_plain_name_other_than_base(make_engine, adapter_dir):
    with ModelServer(make_engine(), "shop", AppOptions(adapters=adapter_dir.parent)) as server:
        for version in ("", "base", "a b", "@", "v1/2"):
            body = {"lora_name": f"shop@{version}", "lora_path": str(adapter_dir)}
            answer = httpx.post(f"{server.url}/load_lora_adapter", json=body)
            assert answer.status_code == 400, version
            assert "VERSION" in answer.text or "expected a version of letters, digits" in answer.text, version


def test_a_server_that_changed_its_policy_is_found_out(connect, echo):
    engine = connect(echo[1].url)
    ask(engine)
    echo[0].policy = "v9"
    with pytest.raises(StalePolicy, match="shop@v9"):
        ask(engine)


def test_a_server_that_fails_for_a_while_is_asked_again(connect, caplog):
    short = completion({"content": "yes"}, token_ids=[7], logprobs={"content": []})
    faults = {
        "500": status(500),
        "503": status(503),
        "429": status(429, Retry_After="0.05"),
        "429 unreadable": status(429, Retry_After="tomorrow"),
        "cut": cut,
        "empty": EMPTY,
        "html": answer("<html>Bad gateway</html>"),
        "list": answer("[]"),
        "no choice": answer('{"choices": []}'),
        "short": answer(short.replace("{", '{"prompt_token_ids": [], ', 1)),
        "nan": answer(GOOD.replace("-0.5", "NaN")),
    }
    for name, fault in faults.items():
        with Line(faults=[fault, fault, answer(GOOD)]) as line:
            assert ask(connect(line.url)).token_ids == [7, 8], name
            assert len(line.seen) == 3, name
            assert line.seen[0] == line.seen[2], name
    assert "WARNING" not in caplog.text  # it was soon over


def test_what_goes_on_for_longer_is_told_once_and_when_it_is_over(connect, caplog, monkeypatch):
    monkeypatch.setattr(json_client, "QUIET", 0.0)
    with Line(faults=[status(503), status(503), answer(GOOD)]) as line:
        ask(connect(line.url))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "HTTP 503: overloaded; retrying for up to 5 s" in warnings[0]
    assert "answers again, after" in warnings[1]


def test_a_server_says_how_long_to_wait(connect):
    with Line(faults=[status(429, Retry_After="0.4"), answer(GOOD)]) as line:
        begun = time.monotonic()
        ask(connect(line.url))
        assert time.monotonic() - begun > 0.4


def test_a_server_that_answered_before_is_retried_when_it_is_unreachable(connect):
    with Line(faults=[answer(GOOD)]) as line:
        ask(connect(line.url))
    with pytest.raises(EngineError, match=r"no connection.*retried for 0\.5 s \(inference.retry_for\)"):
        ask(connect(line.url, retry_for=0.5))


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"], ids=["refused", "unknown host"])
def test_an_unreachable_server_is_an_error_at_first_contact(connect, host):
    with Line() as line:
        port = line.url.split(":")[2]
    message = rf"inference: .*{host}.* is unreachable: no connection.*correct its address.*inference.wait_for=SECONDS"
    with pytest.raises(ResourceError, match=message):
        ask(connect(f"http://{host}:{port}", retry_for=600))


def test_a_name_lookup_has_a_limit(connect, monkeypatch):
    monkeypatch.setattr(json_client, "LOOKUP", 0.1)

    async def hang(*_, **__):
        await asyncio.sleep(600)

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", hang)
    with pytest.raises(ResourceError, match=r"not resolved within 0\.1 s"):
        ask(connect("http://nowhere.invalid/v1", retry_for=600))


def test_a_server_that_is_starting_is_waited_for_on_request(connect):
    with Line() as line:
        port = int(line.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ResourceError, match=r"unreachable for 0\.3 s"):
        ask(connect(line.url, retry_for=0, wait_for=0.3))
    engine = connect(line.url, retry_for=0, wait_for=60)

    async def started_later():
        asking = asyncio.create_task(engine.chat(HELLO))
        await asyncio.sleep(0.3)
        with Line(faults=[answer(GOOD)], port=port):
            return await asking

    assert asyncio.run(started_later()).token_ids == [7, 8]


def test_a_server_that_is_silent_has_a_limit(connect):
    with (
        Line(faults=[lambda handler: time.sleep(3)] * 9) as line,
        pytest.raises(EngineError, match=r"no answer within 0\.2 s \(inference.timeout\)"),
    ):
        ask(connect(line.url, timeout=0.2, retry_for=0.5))


def test_empty_answers_do_not_go_on_for_ever(connect):
    with Line(faults=[EMPTY, EMPTY, status(500)] + [EMPTY] * 9) as line:
        with pytest.raises(EngineError, match="an empty answer, 3 times in a row"):
            ask(connect(line.url, retry_for=600))
        assert len(line.seen) == 6  # a server that answers 500 in between may have been started anew


def test_an_answer_that_is_reasoning_only_is_one(connect):
    with Line(faults=[answer(completion({"content": "", "reasoning_content": "Hm"}, finish_reason="length"))]) as line:
        result = ask(connect(line.url, tokens=False))
    assert (result.message["reasoning"], result.message["content"], result.finish_reason) == ("Hm", "", "length")


def test_what_asking_again_cannot_mend_is_raised_at_once(connect):
    for fault, error, message in (
        (status(401, "bad key"), ResourceError, "refuses the key"),
        (status(404, "no such model"), ResourceError, "no model shop"),
        (status(400, "unknown parameter: seed"), EngineError, "unknown parameter: seed"),
        (status(400, "This model's maximum context length is 8"), ContextOverflow, "maximum"),
        (status(500, "broken for good", x_should_retry="false"), EngineError, "broken for good"),
        (status(307, "elsewhere", Location="http://127.0.0.1:1/"), EngineError, "HTTP 307"),
        (answer(completion({"content": "yes"})), ResourceError, "inference.tokens=false"),
    ):
        with Line(faults=[fault]) as line:
            with pytest.raises(error, match=message):
                ask(connect(line.url))
            assert len(line.seen) == 1, message


def test_without_tokens_any_server_will_do(connect):
    with Line(faults=[answer(completion({"content": "yes"}))]) as line:
        reply = ask(connect(line.url, tokens=False), ChatRequest(HELLO.messages))
        assert reply.message == {"role": "assistant", "content": "yes"}
        assert (reply.prompt_token_ids, reply.token_ids, reply.logprobs) == ([], [], [])
        assert set(line.seen[0]) == {"model", "messages", "temperature", "max_tokens", "seed"}


def test_greedy_decoding_needs_no_server_that_takes_seeds(connect):
    with Line(faults=[answer(completion({"content": "yes"}))]) as line:
        ask(connect(line.url, tokens=False), ChatRequest(HELLO.messages, sampling=Sampling(temperature=0.0)))
        assert set(line.seen[0]) == {"model", "messages", "temperature", "max_tokens"}


def test_the_key_is_sent_and_never_shown(connect, monkeypatch, caplog):
    monkeypatch.setenv("SHOP_KEY", "sk-secret")
    faults = [status(503, "not for sk-secret"), answer(GOOD), status(400, "sk-secret is odd")]
    with Line(faults=faults) as line, caplog.at_level(logging.DEBUG):
        engine = connect(line.url, key_variable="SHOP_KEY")
        ask(engine)
        with pytest.raises(EngineError) as caught:
            ask(engine)
        assert line.headers[0]["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in caplog.text + str(caught.value) + engine.spec.model_dump_json()
    monkeypatch.delenv("SHOP_KEY")
    with pytest.raises(ResourceError, match="SHOP_KEY is not set"):
        connect(line.url, key_variable="SHOP_KEY")


def test_a_server_is_checked_before_it_is_used(connect, echo):
    connect(echo[1].url).check()
    with pytest.raises(ResourceError, match=r"inference.model: .* does not have 'shoe'; it has shop$"):
        connect(echo[1].url, model="shoe").check()
    with Line() as line, pytest.raises(ResourceError, match="no /models"):
        connect(line.url).check()
    with pytest.raises(ResourceError, match=r"inference.url: .* is no server that can be used"):
        connect(line.url, retry_for=0).check()


def test_what_is_no_address_is_refused():
    for url in ("localhost:8000", "ftp://server/v1", "http://", "http://me:secret@server/v1"):
        with pytest.raises(SpecError) as caught:
            validate(RemoteSpec, {"name": "remote", "url": url, "model": "shop"}, path="inference")
        assert caught.value.problems[0].path == "inference.url", url


def test_an_answer_that_nobody_waits_for_is_given_up(connect):
    with Line(faults=[lambda handler: time.sleep(2), answer(GOOD)]) as line:
        engine = connect(line.url)

        async def impatient() -> None:
            async with asyncio.timeout(0.2):
                await engine.chat(HELLO)

        with pytest.raises(TimeoutError):
            asyncio.run(impatient())
        assert ask(engine).token_ids == [7, 8]  # on another loop
        assert len(line.seen) == 2


def test_episodes_over_a_line_that_breaks_all_the_time(connect, make_engine):
    attempts = [[status(500)], [status(429, Retry_After="0")], [cut, EMPTY, EMPTY], [EMPTY]]

    def play(engine):
        return played(engine, train=8, samples=2, max_tokens=16, max_turns=3, concurrency=4)

    with ModelServer(make_engine(max_length=4096), "shop") as server, Line(server.url, attempts=attempts) as line:
        trajectories = play(connect(line.url))
        assert len(line.seen) > 1.5 * sum(trajectory.metrics["turns"] for trajectory in trajectories)
        line.attempts, line.faults = [], iter([None] * 5 + [status(500, x_should_retry="false")] * 99)
        with pytest.raises(TooManyFailures, match="EngineError"):
            play(connect(line.url))
    assert len(trajectories) == 16
    assert not any(trajectory.failure for trajectory in trajectories)
    assert all(trajectory.metrics["sampled_tokens"] > 0 for trajectory in trajectories)
