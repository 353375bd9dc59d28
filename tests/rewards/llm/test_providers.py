"""Judge through LiteLLM, over a real socket with OpenAI's protocol."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from components import retry
from components.errors import BudgetExceeded, JudgeError, ResourceError
from components.rewards.llm.budget import Meter
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.models.litellm import LiteLLMJudge
from components.rewards.protocol import RewardResources
from tests.rewards import judge_replies as replies
from tests.rewards.judge_server import Reply, judge_server

ROOT = Path(__file__).resolve().parents[3]
KEY = "sk-of-the-test-0123456789"
PROMPT = '<trajectory id="a">quality 0.25</trajectory>\n<trajectory id="b">quality 1</trajectory>'
QUESTION = [{"role": "system", "content": "Judge as JSON."}, {"role": "user", "content": PROMPT}]
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
MODELS = ["gpt-4.1-mini", "judge"]


pytestmark = pytest.mark.timeout(1800)  # where its files are not in memory, LiteLLM alone takes a minute to import


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.05)


@pytest.fixture(autouse=True, scope="module")
def _closed():
    """Surface LiteLLM's warnings about ended event loops here instead of in other tests."""
    yield
    gc.collect()


def spec(server=None, **options):
    extra = {"api_base": server.url} if server else {}
    return LiteLLMJudge(**{"model": "openai/gpt-4.1-mini", "retry_for": 5.0, "extra": extra} | options)


def ask(server, **options):
    return asyncio.run(spec(server, **options).build(means()).call(QUESTION, SCHEMA, "q", False))


def right(answer):
    return {score["trajectory_id"]: score["score"] for score in json.loads(answer.text)["scores"]} == {
        "a": 0.25,
        "b": 1.0,
    }


def means(folder=Path(), meter=None):
    return RewardResources(folder, None, meter or Meter(), folder / "answers")


def test_it_asks_for_json_by_its_schema_and_sends_the_key_of_the_environment():
    with judge_server(models=MODELS, key=KEY) as server:
        assert right(ask(server))
    (asked,) = server.requests
    assert asked.body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert asked.body["messages"] == QUESTION
    assert asked.body["max_tokens"] == 2048


def test_what_may_pass_is_asked_again(subtests):
    for reply in [
        replies.TOO_MANY, replies.OVERLOADED, replies.UNAVAILABLE, replies.HUNG_UP, replies.CUT, replies.NO_JSON,
        replies.ERROR_AT_200, replies.NO_CHOICES, replies.EMPTY, replies.NOTHING, replies.refused(502),
    ]:  # fmt: skip
        with subtests.test(reply=reply):
            with judge_server([reply], models=MODELS) as server:
                assert right(ask(server))
            assert len(server.requests) == 2


def test_it_waits_as_long_as_the_provider_says(subtests):
    for reply in [replies.wait(0.5), replies.wait_as_openai(0.5)]:
        with subtests.test(reply=reply):
            with judge_server([reply], models=MODELS) as server:
                assert right(ask(server))
            first, second = server.requests
            assert 0.5 <= second.came - first.came < 2


def test_pauses_grow_and_differ():
    with judge_server([replies.OVERLOADED] * 3, models=MODELS) as server:
        ask(server)
    came = [request.came for request in server.requests]
    pauses = [after - before for before, after in itertools.pairwise(came)]
    for pause, most in zip(pauses, (0.05, 0.1, 0.2), strict=True):
        assert most / 2 <= pause < most + 0.4


def test_what_never_passes_ends_and_says_how_long_it_was_tried():
    with (
        judge_server(lambda asked: replies.OVERLOADED, models=MODELS) as server,
        pytest.raises(JudgeError, match=r"overloaded; retried for 0\.5 s \(reward\.model\.retry_for\)"),
    ):
        ask(server, retry_for=0.5)
    with (
        judge_server(lambda asked: replies.EMPTY, models=MODELS) as server,
        pytest.raises(JudgeError, match="an empty answer, 3 times in a row"),
    ):
        ask(server)


def test_an_unreachable_address_is_an_error_at_first_contact():
    with judge_server([], models=MODELS) as server:
        pass
    message = r"reward\.model: openai/.* at http.* is unreachable: .*reward\.model\.wait_for=SECONDS"
    with socket.socket() as reserved:  # nobody else gets the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", urlsplit(server.url).port))
        with pytest.raises(ResourceError, match=message):
            ask(server, retry_for=60)


def test_an_answer_that_takes_too_long_is_not_waited_for():
    with (
        judge_server(lambda asked: replies.slow(1.5), models=MODELS) as server,
        pytest.raises(JudgeError, match=r"timed out: no answer within 0\.3 s \(reward\.model\.timeout\)"),
    ):
        ask(server, timeout=0.3, retry_for=0.0)


@pytest.mark.parametrize("variable", [None, "MY_KEY"])
def test_a_key_that_is_refused_ends_it_at_once_and_is_shown_nowhere(variable, monkeypatch, caplog, capfd):
    monkeypatch.setenv("MY_KEY", "sk-another-0123456789")
    with (
        caplog.at_level(logging.DEBUG),
        judge_server(models=MODELS, key="sesame") as server,  # it repeats the key that it refuses
        pytest.raises(ResourceError, match=r"refuses the key \(.*\*\*\*") as raised,
    ):
        ask(server, key_variable=variable)
    assert len(server.requests) == 0
    assert (variable or "reward.model.key_variable=") in str(raised.value)
    shown = str(raised.value) + caplog.text + "".join(capfd.readouterr())
    assert "0123456789" not in shown


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (replies.NO_MODEL, r"does not exist .*reward\.model\.model"),
        (replies.NO_QUOTA, "has no credit left"),
        (replies.refused(403, "not in your country", "unsupported_country"), "refuses the key"),
    ],
)
def test_what_no_retry_mends_ends_it_at_once(reply, words):
    with judge_server(lambda asked: reply, models=MODELS) as server, pytest.raises(ResourceError, match=words):
        ask(server)
    assert len(server.requests) == 1


def test_a_question_that_is_too_long_says_what_to_set():
    with (
        judge_server(lambda asked: replies.TOO_LONG, models=MODELS) as server,
        pytest.raises(JudgeError, match=r"8192 tokens.*reward\.model\.longest=200000"),
    ):
        ask(server)


def test_a_provider_that_does_not_know_a_format_is_asked_in_the_next_way_from_then_on():
    async def twice(client):
        return [await client.call(QUESTION, SCHEMA, "q", False) for _ in range(2)]

    with judge_server(replies.without_format(replies.NO_FORMAT, "json_schema"), models=MODELS) as server:
        assert all(map(right, asyncio.run(twice(spec(server).build(means())))))
    kinds = [request.body.get("response_format", {}).get("type") for request in server.requests]
    assert kinds == ["json_schema", "json_object", "json_object"]
    with judge_server(replies.without_format(replies.UNKNOWN_KEY), models=MODELS) as server:
        assert right(ask(server))
    assert "response_format" not in server.requests[-1].body


def test_a_parameter_that_the_model_does_not_take_is_named():
    with (
        judge_server(models=MODELS) as server,
        pytest.raises(ResourceError, match=r"temperature.*\+reward\.model\.extra\.temperature=null"),
    ):
        ask(server, model="openai/gpt-5-mini", temperature=0.5)
    assert server.requests == []


def test_a_refusal_is_an_answer():
    with judge_server([replies.REFUSAL], models=MODELS) as server:
        answer = ask(server)
    assert (answer.text, answer.refusal) == ("", "I can't help with that.")


# Prices


def test_prices_are_those_of_litellms_table_or_the_configurations(tmp_path):
    asked, said = 21, 39  # as the server counts
    for given, expected in ((None, (asked * 0.4 + said * 1.6) / 1e6), ({"input": 100, "output": 1000}, 0.0411)):
        with judge_server(models=MODELS) as server:
            client = JudgeClient(spec(server, price=given), means(tmp_path / str(given)[:6]))
            answer = asyncio.run(client.ask(QUESTION[1:], SCHEMA))
        assert (answer.prompt_tokens, answer.completion_tokens) == (asked, said)
        assert answer.cost == pytest.approx(expected, rel=1e-9)
        client.close()


def test_a_price_that_litellm_does_not_know_is_not_known(monkeypatch, subtests):
    """A model of the same name at another provider has no price, and neither has a 0 in the table."""
    monkeypatch.setenv("OPENROUTER_API_KEY", KEY)
    monkeypatch.setenv("OLLAMA_API_BASE", "http://127.0.0.1:9")
    for model in [
        "openai/judge",
        "hosted_vllm/gpt-4.1-mini",
        "openai/dall-e-3",
        "ollama/llama2",
        "openrouter/any/thing",
    ]:
        with subtests.test(model=model):
            assert not spec(model=model).build(means()).priced
            assert spec(model=model, price={"input": 0, "output": 0}).build(means()).priced


def test_an_answer_of_unknown_price_is_counted_as_such_and_never_as_nothing(tmp_path):
    for name, options, script in (("model", {"model": "openai/judge"}, []), ("usage", {}, [Reply(usage=None)])):
        meter = Meter()
        with judge_server(script, models=MODELS) as server:
            client = JudgeClient(spec(server, **options), means(tmp_path / name, meter))
            answer = asyncio.run(client.ask(QUESTION, SCHEMA))
            client.keep(answer)
            again = asyncio.run(client.ask(QUESTION, SCHEMA))
        assert (answer.cost, again.cost) == (None, None)
        assert (meter.calls, meter.cached, meter.unpriced, meter.spent) == (1, 1, 1, 0.0)
        client.close()


def test_a_budget_is_kept_by_litellms_price_and_refused_where_there_is_none(tmp_path):
    with judge_server(models=MODELS) as server:
        client = JudgeClient(spec(server), means(tmp_path, Meter(budget=1e-4)))
        asyncio.run(client.ask(QUESTION, SCHEMA))
        with pytest.raises(BudgetExceeded, match=r"of 0\.0001 is spent"):
            asyncio.run(client.ask(QUESTION, SCHEMA, repeat=1))
        client.close()
        client = JudgeClient(spec(server, model="openai/judge"), means(tmp_path, Meter(budget=1.0)))
        with pytest.raises(ResourceError, match=r"price of openai/judge is not known"):
            asyncio.run(client.ask(QUESTION, SCHEMA))
        client.close()
    assert len(server.requests) == 1


# The environment


def test_a_missing_key_is_named(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ResourceError, match=r"the environment lacks OPENAI_API_KEY; set it, .*key_variable=NAME"):
        spec().key()
    with pytest.raises(ResourceError, match=r"the environment variable MY_KEY is not set; set it to the key for"):
        spec(key_variable="MY_KEY").key()
    assert spec(model="hosted_vllm/mine", extra={"api_base": "http://127.0.0.1:9"}).key() is None


def test_a_provider_that_there_is_not_is_named(capfd):
    with pytest.raises(ResourceError, match=r"reward\.model\.model=foo/bar: LiteLLM knows no provider foo.*served"):
        spec(model="foo/bar").key()
    assert "".join(capfd.readouterr()) == ""


def test_what_may_not_stand_in_extra_is_refused(subtests):
    for name, words in [
        ("api_key", "no secrets such as api_key"),
        ("stream", "parameters other than stream"),
        ("num_retries", "parameters other than num_retries"),
    ]:
        with subtests.test(name), pytest.raises(ValidationError, match=words):
            spec(extra={name: "1"})


def test_the_address_is_in_no_key_and_other_parameters_are():
    first, second = spec(extra={"api_base": "http://a/v1", "top_p": 0.5}), spec(extra={"top_p": 0.5})
    assert first.key_part() == second.key_part() != spec().key_part()


def test_it_works_on_one_loop_after_another_with_many_at_once(caplog, capfd):
    async def many(client, count):
        return await asyncio.gather(*(client.call(QUESTION, SCHEMA, str(i), False) for i in range(count)))

    with judge_server(replies.for_share(0.2, replies.OVERLOADED), models=MODELS) as server:
        client = spec(server).build(means())
        for _ in range(3):
            assert all(map(right, asyncio.run(many(client, 20))))
    assert len(server.requests) >= 60
    assert [record for record in caplog.records if record.levelno >= logging.WARNING and "LiteLLM" in record.name] == []
    assert "".join(capfd.readouterr()) == ""


def test_a_process_of_its_own_reaches_no_network_says_nothing_and_leaves_no_connection():
    """All other addresses are blocked, and LiteLLM was not imported before. A connection that is left on a closed event
    loop is an error here, which would prevent the loop from closing."""
    code = f"""
import asyncio, socket, sys
connect, reached = socket.socket.connect, []
def guarded(self, address):
    if isinstance(address, tuple) and address[0] != "127.0.0.1":
        reached.append(address)
        raise OSError("no network")
    return connect(self, address)
def looked_up(host, *rest, _real=socket.getaddrinfo, **options):
    if host not in ("127.0.0.1", None):
        reached.append(host)
        raise OSError("no network")
    return _real(host, *rest, **options)
socket.socket.connect, socket.getaddrinfo = guarded, looked_up
from components.aio import in_order
from components.rewards.llm.models.litellm import LiteLLMJudge
from tests.rewards import judge_replies as replies
from tests.rewards.judge_server import judge_server
assert "litellm" not in sys.modules
async def ask(number):
    return (await way.call({QUESTION!r}, {SCHEMA!r}, str(number), False)).text
with judge_server([replies.OVERLOADED, replies.WRONG_KEY], models={MODELS!r}) as server:
    way = LiteLLMJudge(model="openai/gpt-4.1-mini", extra={{"api_base": server.url}}).build(None)
    assert way.priced
    try:
        asyncio.run(ask("q"))
    except OSError as error:
        assert "refuses the key" in str(error)
    print("said", asyncio.run(ask("q"))[:9])
    print(sum(1 for _ in range(2) for _ in in_order(ask, range(8), 4)))
assert reached == [], reached
"""
    stored = {name: value for name, value in os.environ.items() if not name.startswith("LITELLM")}
    environment = {**stored, "OPENAI_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'said {"scores"\n16\n', "")
