"""Tests of responses with a form from the vLLM engine, against the small server, which enforces grammars as vLLM does.

The server draws evenly from the allowed tokens, so a log-probability has the number of tokens that its mask allows.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys

import jsonschema
import pytest

from components.deployment.export import export_merged
from components.errors import EngineError, SpecError
from components.inference.grammar import Grammars
from components.inference.protocol import ChatRequest, ResponseForm, Sampling
from components.inference.vllm.server import readable_tokenizer
from components.models.byte_level import byte_level_decoder
from components.trajectories.call_forms import FORMS as CALL_FORMS
from tests.deployment.tiny import with_unused_decoders
from tests.inference.test_forms import FORECAST, PING, SCHEMA, TALK, needs_llguidance, valid
from tests.inference.test_vllm import ask, seen

pytestmark = needs_llguidance
REQUIRED = ResponseForm(calls=("forecast", "ping"))


def request(form: ResponseForm, seed: int = 0, max_tokens: int = 300) -> ChatRequest:
    tools = [] if form.without_calls else [FORECAST, PING]
    return ChatRequest(TALK, tools, sampling=Sampling(1.0, max_tokens=max_tokens), seed=seed, form=form)


def log_sizes(grammars: Grammars, stop_ids: frozenset[int], asked: ChatRequest, tokens: list[int]) -> list[float]:
    """Return -log of the number of tokens that the embedded engine's mask allows at each token, with one form of
    whitespace."""
    matcher = asyncio.run(grammars.matcher(asked.form, asked.tools, compacted=True))
    values = []
    for token in tokens:
        allowed_V = matcher.allowed()
        assert allowed_V[token]
        values.append(-math.log(allowed_V.sum()))
        if token not in stop_ids:
            matcher.append(token)
    return values


FORMS = {
    "schema": ResponseForm(json_schema=json.dumps(SCHEMA), calls=()),
    "object": ResponseForm(json_schema='{"type": "object"}', calls=()),
    "escaped": ResponseForm(json_schema='{"enum": ["a::=b", "\\u2581"]}', calls=()),
    "required": REQUIRED,
    "one function": ResponseForm(calls=("forecast",)),
    "strict": ResponseForm(strict=True),
    "single": ResponseForm(strict=True, single=True),
    "schema or call": ResponseForm(json_schema='{"type": "integer"}', strict=True),
}


@pytest.mark.parametrize("native", [False, True])
def test_the_servers_mask_is_that_of_the_embedded_engine(start, connect, monkeypatch, native):
    engine = connect(start())
    if native:
        monkeypatch.setattr(engine.format, "call_form", CALL_FORMS["tagged_json"])
        monkeypatch.setattr(engine.format, "render", lambda *_, **__: "Will it rain?")
    grammars = Grammars(engine.format, len(engine.tokenizer), engine.stop_ids)
    for name, form in FORMS.items():
        for seed in range(3):
            asked = request(form, seed, 60)
            answer = ask(engine, asked)
            sizes = log_sizes(grammars, engine.stop_ids, asked, answer.token_ids)
            assert answer.logprobs == pytest.approx(sizes), name
            assert answer.altered, name


def test_finished_answers_have_their_form(start, connect):
    engine = connect(start())
    answers = [ask(engine, request(REQUIRED, seed)) for seed in range(8)]
    finished = [answer for answer in answers if answer.finish_reason != "length"]
    assert len(finished) >= 6
    for answer in finished:
        [call] = answer.message["tool_calls"]
        assert answer.finish_reason == "tool_calls"
        if call["function"]["name"] == "forecast":
            jsonschema.validate(json.loads(call["function"]["arguments"]), FORECAST["function"]["parameters"])
    schema = ResponseForm(json_schema=json.dumps(SCHEMA), calls=())
    texts = [ask(engine, request(schema, seed)) for seed in range(8)]
    finished = [answer for answer in texts if answer.finish_reason == "stop"]
    assert len(finished) >= 3
    assert all(valid(answer.message["content"], SCHEMA) for answer in finished)


def test_a_server_is_checked_once_before_its_first_grammar(start, connect):
    server = start()
    engine = connect(server)
    assert "structured_outputs" not in seen_bodies(server, lambda: ask(engine))[-1]
    bodies = seen_bodies(server, lambda: [ask(engine, request(REQUIRED, seed)) for seed in range(2)])
    assert [body["max_tokens"] for body in bodies] == [4, 300, 300]
    assert all(body["structured_outputs"]["grammar"].startswith("start: response end\n") for body in bodies)
    assert "response_format" not in bodies[-1]


def seen_bodies(server, act) -> list[dict]:
    before = len(seen(server, "/v1/completions"))
    act()
    return seen(server, "/v1/completions")[before:]


@pytest.mark.parametrize("fault", ["ignores", "raw"])
def test_a_server_that_does_not_enforce_grammars_is_refused(start, connect, fault):
    """One that ignores them, as old versions do, and one whose log-probabilities are not of the masked distribution."""
    engine = connect(start(fault=fault))
    with pytest.raises(SpecError, match=r"tool_choice: the server .* --structured-outputs-config.backend guidance"):
        ask(engine, request(REQUIRED))
    assert ask(engine).message["content"] == "policy/7", "other requests are answered"


def test_a_response_without_the_form_is_an_error(start, connect, monkeypatch):
    server = start(fault="ignores")
    engine = connect(server)

    async def passed(*_):
        pass

    monkeypatch.setattr(engine._forms, "check", passed)
    with pytest.raises(EngineError, match="tool_choice: the server's response does not have the form"):
        ask(engine, request(REQUIRED))


def test_a_form_that_cannot_be_enforced_is_refused_before_the_server(start, connect, monkeypatch):
    server = start()
    engine = connect(server)
    before = len(seen(server, "/v1/completions"))
    with pytest.raises(SpecError, match="response_format: the schema cannot be enforced"):
        ask(engine, request(ResponseForm(json_schema='{"type": "array", "uniqueItems": true}', calls=())))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SpecError, match=r"tools: needs the package llguidance"):
        ask(engine, request(ResponseForm(strict=True)))
    assert len(seen(server, "/v1/completions")) == before


@pytest.fixture
def converted(base_dir, tmp_path):
    """The model with a tokenizer as it is converted from GGUF. llguidance does not know the bytes of its tokens."""
    return with_unused_decoders(shutil.copytree(base_dir, tmp_path / "converted"))


def test_sentence_piece_decoders_are_removed_where_they_do_nothing(
    start, connect, base_dir, converted, tmp_path, monkeypatch
):
    tokenizer = json.loads((converted / "tokenizer.json").read_text())
    byte_level = tokenizer["decoder"]["decoders"][-1]
    assert byte_level["type"] == "ByteLevel"
    folder = readable_tokenizer(converted, tmp_path / "readable")
    assert json.loads((folder / "tokenizer.json").read_text())["decoder"] == byte_level
    assert readable_tokenizer(base_dir, tmp_path / "unchanged") is None
    vocabulary = tokenizer["model"]["vocab"]
    for token in ("<0x0A>", "▁a"):
        assert byte_level_decoder({**tokenizer, "model": {"vocab": {**vocabulary, token: 1}}}) is None
        assert byte_level_decoder({**tokenizer, "added_tokens": [{"content": token}]}) is None

    assert ask(connect(start(converted)), request(REQUIRED)).message["tool_calls"]
    monkeypatch.setattr("components.inference.vllm.server.readable_tokenizer", lambda *_: None)
    with pytest.raises(SpecError, match="a tokenizer that llguidance reads"):  # as an existing server has it
        ask(connect(start(converted)), request(REQUIRED))


def test_forms_work_from_an_exported_folder(start, connect, converted, tmp_path, monkeypatch):
    """A server of others has the folder's own tokenizer."""
    monkeypatch.setattr("components.inference.vllm.server.readable_tokenizer", lambda *_: None)
    export_merged(converted, None, tmp_path / "exported", "# card\n")
    engine = connect(start(tmp_path / "exported"))
    asked = request(ResponseForm(json_schema='{"enum": ["é\\n北京"]}', calls=()))
    assert json.loads(ask(engine, asked).message["content"]) == "é\n北京"
    assert ask(engine, request(REQUIRED)).message["tool_calls"]
