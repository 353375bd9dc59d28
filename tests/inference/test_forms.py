"""Tests of responses with a form, and of changed logits, on a random model at temperature 1."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from dataclasses import replace
from importlib.util import find_spec

import jsonschema
import openai
import psutil
import pytest
import torch

from components.algorithms.policy_gradient.returns import turn_lengths
from components.errors import EngineBusy, SpecError
from components.inference import grammar, grammar_compiler, grammar_text
from components.inference.protocol import ChatRequest, LogitChange, ResponseForm, Sampling
from components.rollout.capture import Capture
from components.trajectories.call_forms import FORMS
from components.trajectories.schema import Scenario, Trajectory
from tests.inference.scripted import served

needs_llguidance = pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "kind": {"enum": ["rain", "sun", None]},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days", "kind", "hours"],
    "additionalProperties": False,
    "$defs": {"hour": {"type": "object", "properties": {"at": {"type": "boolean"}}, "additionalProperties": False}},
}
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Zürich", 'a "b"']},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "at night": {"type": "boolean"},
            },
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TALK = [{"role": "user", "content": "Will it rain?"}]


def forced(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def response_format(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def engine(base_dir):
    from components.inference.transformers.engine import TransformersEngine

    return TransformersEngine(base_dir, max_length=512, device="cpu")


@pytest.fixture(scope="module")
def client(engine):
    with served(engine, "tiny", decode=engine.tokenizer.decode) as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(model="tiny", messages=TALK, **{"max_tokens": 300} | options)


def valid(text: str, schema: dict) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


# JSON


@needs_llguidance
def test_every_finished_answer_validates_and_no_free_one_does(client):
    answers = ask(client, n=100, seed=1, response_format=response_format(SCHEMA)).choices
    finished = [choice.message.content for choice in answers if choice.finish_reason == "stop"]
    assert len(finished) > 60, "most answers end before max_tokens"
    assert all(valid(text, SCHEMA) for text in finished)
    assert len(set(finished)) == len(finished), "answers are sampled"
    assert not any(valid(choice.message.content, SCHEMA) for choice in ask(client, n=20, seed=1).choices)


@needs_llguidance
def test_json_object_is_any_object(client):
    answers = ask(client, n=60, seed=2, response_format={"type": "json_object"}).choices
    finished = [choice.message.content for choice in answers if choice.finish_reason == "stop"]
    assert len(finished) > 5
    assert all(isinstance(json.loads(text), dict) for text in finished)


@needs_llguidance
def test_a_streamed_answer_has_its_form_and_a_refusal_its_status(client):
    chunks = ask(client, seed=1, response_format=response_format(SCHEMA), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert valid(text, SCHEMA)
    with pytest.raises(openai.BadRequestError):
        ask(client, response_format=response_format({"type": "strange"}), stream=True)


@needs_llguidance
def test_a_greedy_answer_has_its_form(client):
    choice = ask(client, temperature=0, response_format=response_format({"enum": ["yes", "no"]})).choices[0]
    assert choice.message.content in ('"yes"', '"no"')


@needs_llguidance
def test_logprobs_are_of_the_masked_distribution(engine, reference):
    """Two answers: their first different token has two allowed values, whose probabilities add up to 1."""
    form = ResponseForm(json_schema=json.dumps({"enum": ["ab", "cb"]}))
    request = ChatRequest(TALK, sampling=Sampling(temperature=0.7, max_tokens=20), form=form, seed=3)
    answer = asyncio.run(engine.chat(request))
    assert answer.altered
    ids = answer.prompt_token_ids + answer.token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0].float() / 0.7
    options = [engine.format.encode(letter)[0] for letter in "ac"]
    at = 1  # after the quotation mark
    wanted = logits[len(answer.prompt_token_ids) + at - 1][options].log_softmax(-1)
    assert answer.token_ids[at] in options
    assert answer.logprobs[at] == pytest.approx(float(wanted[options.index(answer.token_ids[at])]), abs=1e-4)
    assert [value for place, value in enumerate(answer.logprobs) if place != at] == [0.0] * (len(answer.logprobs) - 1)


@needs_llguidance
def test_schemas_that_cannot_be_enforced_are_refused(client):
    special, closed = "a <|im_end|>", {"anyOf": [{"properties": {"<|im_end|>": {}}}]}
    schemas = [{"type": "array", "uniqueItems": True}, {"$ref": "http://127.0.0.1:9/schema"}, {"type": "strange"}]
    for schema in (*schemas, {"$ref": ""}, {"const": special}, closed):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, response_format=response_format(schema))
        assert caught.value.param == "response_format", schema
    for parameters in ({"pattern": "<|im_start|>"}, {"oneOf": [{}]}):
        function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, tool_choice="required", tools=[function])
        assert caught.value.param == "tools", parameters
    assert ask(client, max_tokens=2).choices, "the server goes on"


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, logit_bias={"99999": 1})
    assert caught.value.param.startswith("logit_bias")


def test_without_llguidance_the_refusal_has_the_install_command(client, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"pip install -e '\.\[structured\]'"):
        ask(client, response_format={"type": "json_object"})
    assert ask(client, response_format={"type": "text"}, max_tokens=2).choices


# Calls


@needs_llguidance
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("choice", ["required", forced("forecast")])
def test_a_required_call_is_made_with_valid_arguments(client, engine, monkeypatch, native, choice):
    """In both call formats; a single tokenizer does for both, because the formats are text."""
    if native:
        monkeypatch.setattr(engine.format, "call_form", FORMS["tagged_json"])
        monkeypatch.setattr(engine.format, "render", lambda *_, **__: "Will it rain?")
    answers = ask(client, n=40, seed=4, tools=[FORECAST, PING], tool_choice=choice).choices
    finished = [choice for choice in answers if choice.finish_reason != "length"]
    assert len(finished) >= 35
    called = set()
    for answer in finished:
        (call,) = answer.message.tool_calls
        called.add(call.function.name)
        assert not answer.message.content
        assert answer.finish_reason == "tool_calls"
        if call.function.name == "forecast":
            jsonschema.validate(json.loads(call.function.arguments), FORECAST["function"]["parameters"])
    assert called == ({"forecast", "ping"} if choice == "required" else {"forecast"})
    assert all(choice.message.tool_calls is None for choice in ask(client, n=5, tools=[FORECAST]).choices)


COSTLY = ResponseForm(json_schema='{"type": "integer", "multipleOf": 123456789, "minimum": 0}')
"""A form whose compilation takes minutes and gigabytes."""


@pytest.fixture
def patient(monkeypatch):
    """Compilations without limits that a test reaches; returns the patch."""
    monkeypatch.setattr(grammar, "exceeded_limit", lambda schema: None)
    for limit, value in (("CPU_SECONDS", 600), ("SECONDS", 600.0), ("MEMORY", 8 << 30)):
        monkeypatch.setattr(grammar_compiler, limit, value)
    monkeypatch.setattr(grammar, "PATIENCE", 600.0)
    return monkeypatch


@needs_llguidance
@pytest.mark.parametrize(("limit", "value"), [("CPU_SECONDS", 1), ("MEMORY", 16 << 20)])
def test_the_child_that_compiles_a_grammar_has_limits(engine, patient, limit, value):
    patient.setattr(grammar_compiler, limit, value)
    with pytest.raises(SpecError, match="response_format: the schema cannot be enforced: its grammar takes more than"):
        asyncio.run(engine._grammars.matcher(COSTLY, []))


@needs_llguidance
def test_a_schema_on_a_busy_machine_is_not_refused_as_too_costly(engine, patient):
    """The schema takes minutes of processor time, so the wall clock ends it first on any machine."""
    patient.setattr(grammar_compiler, "SECONDS", 1.0)
    grammars = grammar.Grammars(engine.format, engine._vocabulary, engine.stop_ids)
    with pytest.raises(EngineBusy, match=r"the machine is too busy: .*try again later"):
        asyncio.run(grammars.matcher(COSTLY, []))


@needs_llguidance
@pytest.mark.usefixtures("patient")
def test_a_hung_compilation_delays_no_other_and_ends_with_its_clients(engine):
    grammars = grammar.Grammars(engine.format, engine._vocabulary, engine.stop_ids)
    before = set(psutil.Process().children())

    def children() -> set[psutil.Process]:
        return set(psutil.Process().children()) - before

    async def play() -> None:
        hung = [asyncio.ensure_future(grammars.matcher(COSTLY, [])) for _ in range(2)]
        while not children():
            await asyncio.sleep(0.01)
        (child,) = children()  # both requests wait for the same compilation
        await grammars.matcher(ResponseForm(json_schema=json.dumps(SCHEMA)), [])
        hung[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung[0]
        assert child.is_running()
        hung[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung[1]
        while children():
            await asyncio.sleep(0.01)

    asyncio.run(play())


@needs_llguidance
@pytest.mark.usefixtures("patient")
def test_the_preparation_of_the_vocabulary_blocks_nothing_and_is_not_counted(engine, monkeypatch):
    grammars = grammar.Grammars(engine.format, engine._vocabulary, engine.stop_ids)
    preparing, release, limits = threading.Event(), threading.Event(), []
    token_bytes, timeout = grammar.token_bytes, asyncio.timeout

    def slow(*arguments):
        preparing.set()
        release.wait()
        return token_bytes(*arguments)

    monkeypatch.setattr(grammar, "token_bytes", slow)
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: limits.append(seconds) or timeout(seconds))

    async def play() -> None:
        forms = [ResponseForm(json_schema=json.dumps({"const": word})) for word in ("sun", "rain")]
        first = asyncio.ensure_future(grammars.matcher(forms[0], []))
        await asyncio.to_thread(preparing.wait)
        second = asyncio.ensure_future(grammars.matcher(forms[1], []))
        await asyncio.sleep(0)  # runs up to the preparation
        assert limits == []
        release.set()
        await asyncio.gather(first, second)
        assert len(limits) == 2

    asyncio.run(play())


def accepted(engine, form: ResponseForm, text: str, tools=(FORECAST, PING)) -> str:
    """Return the part of a text whose tokens are all allowed, plus `END` if the response may end after it."""
    matcher = asyncio.run(engine._grammars.matcher(form, list(tools)))
    tokens = engine.format.encode(text)
    for place, token in enumerate(tokens):
        if not matcher.allowed()[token]:
            return engine.format.text_of(tokens[:place])
        matcher.append(token)
    return text + "END" * bool(matcher.allowed()[sorted(engine.stop_ids)[0]])


PYTHONIC = {
    "It rains.\nIn [1] and f(x) it does.": True,
    "": True,
    "[forecast(days=3)]": True,
    'Let me see.\n[forecast(city="Bern", days=3, **{"at night": true}), ping()]': True,
    "[forecast(days=3)] then": False,
    "[forecast(days=99)]": False,
    "[forecast()]": False,
    "[rain(days=3)]": False,
    "Let me see.\n  [ forecast (days=99)]": False,
}
"""Whether a response is allowed. The list of calls ends it; what could be another list of calls cannot be written."""
TAGGED = {
    "It rains <tool> now.": True,
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>': True,
    'See:\n<tool_call>\n{"name": "forecast", "arguments": {"days": 3}}\n</tool_call>\nSo.': True,
    '<tool_call>\n{"name": "forecast", "arguments": {"days": 99}}\n</tool_call>': False,
    '<tool_call>{"name": "ping"}</tool_call>': False,
    '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>': False,
}


@needs_llguidance
def test_strict_tools_hold_the_calls_that_a_model_makes_to_their_schemas(engine, monkeypatch):
    for native, texts in ((False, PYTHONIC), (True, TAGGED)):
        monkeypatch.setattr(engine.format, "call_form", FORMS["tagged_json"] if native else None)
        assert {text: accepted(engine, ResponseForm(strict=True), text) == text + "END" for text in texts} == texts


@needs_llguidance
@pytest.mark.parametrize("native", [False, True])
def test_arguments_without_bounds_are_finite(engine, monkeypatch, native):
    """A number may have any exponent by its grammar; one that overflows would make the call text."""
    monkeypatch.setattr(engine.format, "call_form", FORMS["tagged_json"] if native else None)
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": ["number", "null"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "measure", "parameters": parameters}}]
    tagged = '<tool_call>\n{"name": "measure", "arguments": {"x": X, "y": Y}}\n</tool_call>'
    text = tagged if native else "[measure(x=X, y=Y)]"
    for x, y, finite in (("1.5", "null", True), ("1.5", "-20.5", True), ("1e999", "0", False), ("0", "1e999", False)):
        call = text.replace("X", x).replace("Y", y)
        assert (accepted(engine, ResponseForm(calls=("measure",)), call, tools) == call + "END") == finite, call


@needs_llguidance
@pytest.mark.parametrize("native", [False, True])
def test_without_parallel_calls_a_response_has_one_call_at_most(engine, monkeypatch, native):
    monkeypatch.setattr(engine.format, "call_form", FORMS["tagged_json"] if native else None)
    tagged = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    once, twice = (tagged, f"{tagged}\n{tagged}") if native else ("[ping()]", "[ping(), ping()]")
    for schema in (None, '{"type": "integer"}'):
        form = ResponseForm(json_schema=schema, strict=True)
        assert accepted(engine, form, twice) == twice + "END"
        assert accepted(engine, replace(form, single=True), once) == once + "END"
        assert accepted(engine, replace(form, single=True), twice) != twice + "END"


@needs_llguidance
@pytest.mark.parametrize("native", [False, True])
def test_with_a_schema_a_response_is_a_call_or_content(engine, monkeypatch, native):
    monkeypatch.setattr(engine.format, "call_form", FORMS["tagged_json"] if native else None)
    form = ResponseForm(json_schema='{"type": "integer"}', strict=True)
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>' if native else "[ping()]"
    for text in ("12", call):
        assert accepted(engine, form, text) == text + "END"
    for text in ("no", '<tool_call>\n{"name": "pong"' if native else "[pong()]"):
        assert not accepted(engine, form, text).endswith((text, "END"))


@needs_llguidance
def test_strict_tools_over_http(client):
    strict = {"type": "function", "function": {**PING["function"], "strict": True}}
    assert ask(client, tools=[strict], tool_choice=forced("ping"), max_tokens=60).choices[0].message.tool_calls
    assert ask(client, tools=[strict], max_tokens=10).choices[0].message.content
    schema = response_format({"type": "integer", "minimum": 0, "maximum": 9})
    (answer,) = ask(client, tools=[strict], max_tokens=60, response_format=schema, n=1).choices
    assert answer.message.tool_calls or int(answer.message.content) in range(10)
    with pytest.raises(openai.BadRequestError, match="'ping' is the name of several tools"):
        ask(client, tools=[strict, PING])


def test_none_offers_no_tools_and_reads_no_calls(client, engine):
    plain = ask(client, seed=5, max_tokens=20).choices[0].message
    chosen = ask(client, seed=5, max_tokens=20, tools=[FORECAST], tool_choice="none").choices[0].message
    assert (chosen.content, chosen.tool_calls) == (plain.content, None)
    request = ChatRequest(TALK, form=ResponseForm(calls=()))
    written = engine.format.encode("[ping()]")
    answer = engine._conversations.completion(request, [1], written, [0.0] * len(written), engine.stop_ids)
    assert answer.message == {"role": "assistant", "content": "[ping()]"}
    assert not answer.altered


def test_bytes_of_tokens_are_those_of_the_text(engine):
    """Also with the decoder of tokenizers from GGUF files: SentencePiece's steps before that of byte-level tokens."""
    from tokenizers import decoders

    from components.inference.token_texts import PROBE, _sentence_piece, token_bytes

    tokenizer = copy.deepcopy(engine.tokenizer)
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    for subject in (engine.tokenizer, tokenizer):
        known, special = token_bytes(subject, 300)
        probe = subject(PROBE, add_special_tokens=False).input_ids
        assert b"".join(known[token] for token in probe) == PROBE.encode()
        assert len(known) == 300
        assert 299 in special
    assert [_sentence_piece(name) for name in ("▁Haus", "<0x0A>", "ü")] == [b" Haus", b"\n", "ü".encode()]


def test_arguments_beyond_properties_are_refused_for_pythonic_calls():
    with pytest.raises(SpecError, match="anyOf"):
        grammar_text.pythonic_call([{"name": "f", "parameters": {"anyOf": []}}])
    with pytest.raises(SpecError, match="list of names"):
        grammar_text.pythonic_call([{"name": "f", "parameters": {"required": 1.5}}])
    with pytest.raises(SpecError, match="requires x"):
        grammar_text.pythonic_call([{"name": "f", "parameters": {"required": ["x"]}}])


# Training


@needs_llguidance
def test_training_leaves_out_constrained_responses_and_is_exact_on_the_others(engine, reference):
    """Each trained token's log-probability is that of the model without a mask."""
    capture = Capture(engine, Sampling(max_tokens=12), seed=1, most_calls=3)
    talk = list(TALK)
    for form in (ResponseForm(), ResponseForm(json_schema='{"enum": ["ab", "cb"]}'), ResponseForm()):
        answer = asyncio.run(capture.chat(ChatRequest(talk, form=form)))
        talk += [answer.message, {"role": "user", "content": "And now?"}]
    (history,) = capture.histories
    answers = [message for message in history.messages if message.role == "assistant"]
    assert [message.trained for message in answers] == [True, False, True]
    assert answers[1].content in ('"ab"', '"cb"')
    mask = history.sampled_mask()
    with torch.inference_mode():
        logps_TV = reference(torch.tensor([history.token_ids])).logits[0].float().log_softmax(-1)
    trained = [index for index, is_sampled in enumerate(mask) if is_sampled]
    spans = [message.span for message in answers]
    assert trained == [*range(*spans[0]), *range(*spans[2])]
    expected = [float(logps_TV[index - 1, history.token_ids[index]]) for index in trained]
    assert [history.logprobs[index] for index in trained] == pytest.approx(expected, abs=1e-4)
    trajectory = Trajectory("t", Scenario("s", {}, "train"), 0, [history])
    assert turn_lengths(trajectory) == [spans[0][1] - spans[0][0], 0, spans[2][1] - spans[2][0]]


@needs_llguidance
def test_the_endpoint_of_an_agent_in_training_enforces_forms_in_both_apis(engine):
    capture = Capture(engine, Sampling(max_tokens=60), seed=1, most_calls=3)
    schema = {"enum": ["ab", "cb"]}
    with served(engine, "policy", "key", engines={"key": capture}) as client:
        form = {"tools": [PING], "tool_choice": "required"}
        called = client.chat.completions.create(model="policy", messages=TALK, **form).choices[0].message
        assert called.tool_calls[0].function.name == "ping"
        text = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
        first = client.responses.create(model="policy", input="Rain?", text=text)
        assert first.output_text in ('"ab"', '"cb"')
        client.responses.create(model="policy", input="Sure?", previous_response_id=first.id)
    trained = [m.trained for history in capture.histories for m in history.messages if m.role == "assistant"]
    assert sorted(trained) == [False, False, True]
    assert capture.constrained == 2


def test_an_agent_in_training_cannot_change_logits(engine):
    engines = {"key": Capture(engine, Sampling(max_tokens=5), seed=1, most_calls=3)}
    with served(engine, "policy", "key", engines=engines) as client:
        for change in ({"logit_bias": {"5": 1}}, {"presence_penalty": 1}, {"frequency_penalty": 1}):
            with pytest.raises(openai.BadRequestError, match="collect sets the sampling distribution"):
                client.chat.completions.create(model="policy", messages=TALK, **change)
        with pytest.raises(openai.NotFoundError, match="answers conversations only"):
            client.completions.create(model="policy", prompt="x")


# Responses


@needs_llguidance
def test_responses_have_forms_too(client):
    text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(
        model="tiny", input="Rain?", max_output_tokens=400, text=text, extra_body={"seed": 1}
    )
    assert answer.status == "completed"
    assert valid(answer.output_text, SCHEMA)
    assert answer.text.format.type == "json_schema"
    tool = {"type": "function", "name": "forecast", "parameters": FORECAST["function"]["parameters"], "strict": True}
    choice = {"type": "function", "name": "forecast"}
    called = client.responses.create(
        model="tiny", input="Rain?", tools=[tool], tool_choice=choice, max_output_tokens=200, extra_body={"seed": 1}
    )
    (item,) = called.output
    assert (item.type, item.name) == ("function_call", "forecast")
    jsonschema.validate(json.loads(item.arguments), FORECAST["function"]["parameters"])
    assert called.tool_choice.name == "forecast"


# Logits


def test_biases_and_penalties_change_the_distribution_that_logprobs_are_of(engine, reference):
    """Against the formula of OpenAI's API reference on transformers' own logits."""
    bias = {70: 3.0, 71: -100.0}
    change = LogitChange(tuple(bias.items()), presence=0.5, frequency=1.5)
    sampling = Sampling(temperature=0.8, max_tokens=40)
    answer = asyncio.run(engine.chat(ChatRequest(TALK, sampling=sampling, change=change, seed=6)))
    ids, start = answer.prompt_token_ids + answer.token_ids, len(answer.prompt_token_ids)
    with torch.inference_mode():
        logits_TV = reference(torch.tensor([ids])).logits[0].float()
    expected = []
    for place, token in enumerate(answer.token_ids):
        logits_V = logits_TV[start + place - 1].clone()
        for other, value in bias.items():
            logits_V[other] += value
        for other in set(answer.token_ids[:place]):
            logits_V[other] -= 0.5 + 1.5 * answer.token_ids[:place].count(other)
        expected.append(float((logits_V / 0.8).log_softmax(-1)[token]))
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    assert answer.altered
    assert len(set(answer.token_ids)) < len(answer.token_ids), "a penalty applied"


def test_biases_and_penalties_over_http(client):
    forced_token = ask(client, max_tokens=5, logit_bias={"70": 100}, extra_body={"return_token_ids": True})
    assert forced_token.choices[0].token_ids == [70] * 5
    spread = ask(
        client,
        max_tokens=5,
        logit_bias={"70": 100, "71": 99},
        frequency_penalty=2,
        extra_body={"return_token_ids": True},
    )
    assert set(spread.choices[0].token_ids) == {70, 71}
    text = client.completions.create(
        model="tiny", prompt="x", max_tokens=5, logit_bias={"70": 100}, extra_body={"return_token_ids": True}
    )
    assert text.choices[0].token_ids == [70] * 5


@needs_llguidance
@pytest.mark.parametrize(("native", "most"), [(True, 300), (True, 90), (False, 300), (False, 30)])
def test_streamed_calls_are_those_without_streaming(client, engine, monkeypatch, native, most):
    """Tagged calls in several parts; also those that `max_tokens` cuts, which are text."""
    monkeypatch.setattr(engine.format, "call_form", FORMS["tagged_json"] if native else None)
    options = {"tools": [FORECAST], "tool_choice": "required", "seed": 4, "n": 8, "max_tokens": most}
    whole = ask(client, **options).choices
    parts: list[list] = [[] for _ in whole]
    for chunk in ask(client, stream=True, **options):
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    reasons, counts = set(), []
    for choice, mine in zip(whole, parts, strict=True):
        reasons.add(choice.finish_reason)
        assert mine[-1].finish_reason == choice.finish_reason
        assert "".join(part.delta.content or "" for part in mine) == (choice.message.content or "")
        deltas = [call.function for part in mine for call in part.delta.tool_calls or []]
        sent = "".join(function.arguments for function in deltas)
        if choice.message.tool_calls:
            assert sent == choice.message.tool_calls[0].function.arguments
            assert deltas[0].name == choice.message.tool_calls[0].function.name
            counts.append(len(deltas) - 1)
        elif deltas:
            with pytest.raises(ValueError):
                json.loads(sent)
    assert ("length" in reasons) == (most < 300)
    assert not counts or ((min(counts) > 5) if native else (set(counts) == {1}))
    assert counts or most < 300


@needs_llguidance
def test_annotations_of_a_schema_may_contain_special_tokens(client):
    schema = {"type": "boolean", "description": "true before <|im_end|>", "default": "<|im_end|>"}
    assert ask(client, response_format=response_format(schema)).choices[0].message.content in ("true", "false")
