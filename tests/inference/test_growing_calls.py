"""Tests of streamed calls over a real socket: put together, the deltas are the answer without streaming."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import openai
import pytest

from components.inference.growing_text import growing_response
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Increment
from components.trajectories.reasoning import ReasoningForm
from tests.inference.scripted import served
from tests.inference.test_growing_text import chat_of
from tests.inference.test_streaming import QUESTION, call_deltas, chat, contents

FIRST = '<tool_call>{"name": "look", "arguments": {"city": "Zürich", "days": [1, 2]}}</tool_call>'
SECOND = '\n<tool_call>{"name": "wind", "arguments": {}}</tool_call>'
THIRD = '\n<tool_call>{"name": "rain", "arguments": {"at": {"hour": 6e0}}}</tool_call>'
TAGGED = FIRST + SECOND + THIRD
PYTHONIC = '[look(city="Zürich", days=(1, 2)), wind(), rain(at={"hour": 6.0})]'
CALLS = [("look", '{"city": "Zürich", "days": [1, 2]}'), ("wind", "{}"), ("rain", '{"at": {"hour": 6.0}}')]
INVALID = FIRST + '<tool_call>{"name": "wind", "arguments": []}</tool_call>'
CUT = [(FIRST + SECOND + THIRD[:60], True), (TAGGED[:-5], True), (FIRST[:55], True), (PYTHONIC[:50], False)]


class TextEngine:
    """Samples the tokens of a text, as an engine with the tokenizer of `chat_of` would."""

    policy = BASE_POLICY

    def __init__(self, text: str, native: bool, reasoning: ReasoningForm | None = None):
        self.chat_format = copy.copy(chat_of("bytes", native))
        self.chat_format.reasoning = reasoning
        self.ids = self.chat_format.encode(text)
        self.text = text

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        growing = growing_response(self.chat_format, request)
        for token in self.ids if request.listener is not None else ():
            text = growing.extend([token])
            parts = {"calls": growing.calls, "reasoning": growing.reasoning}
            request.listener(Increment(text, [token], [-0.5], [1], self.policy, **parts))
            await asyncio.sleep(0)
        message = self.chat_format.parse_text(self.text, 0)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        completion = ChatCompletion(message, reason, [1], self.ids, [-0.5] * len(self.ids), self.policy)
        return replace(completion, reasoning_tokens=12 if "reasoning" in message else 0)


@pytest.mark.parametrize("text", ["", "Let me see: "])
@pytest.mark.parametrize(("calls", "native"), [(TAGGED, True), (PYTHONIC, False)])
def test_the_deltas_of_calls_are_those_of_the_whole_answer(text, calls, native):
    with served(TextEngine(f"{text}\n{calls}" if text else calls, native)) as client:
        whole = chat(client).choices[0].message
        with client.chat.completions.stream(model="m", messages=QUESTION) as stream:
            events = list(stream)
            streamed = stream.get_final_completion().choices[0].message
        final = client.responses.create(model="m", input="Say it.")
        grown = list(client.responses.create(model="m", input="Say it.", stream=True))
    assert [(call.function.name, call.function.arguments) for call in whole.tool_calls] == CALLS
    assert [(call.function.name, call.function.arguments) for call in streamed.tool_calls] == CALLS
    assert [call.id for call in streamed.tool_calls] == [call.id for call in whole.tool_calls]
    assert (streamed.content or "") == (whole.content or "")
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == CALLS, "OpenAI's client ends each call when it is whole"
    calls_of = [
        [(item.name, item.arguments) for item in r.output if item.type == "function_call"]
        for r in (final, grown[-1].response)
    ]
    assert calls_of == [CALLS, CALLS]
    deltas = [event for event in grown if event.type == "response.function_call_arguments.delta"]
    for item, (_, arguments) in zip(dict.fromkeys(event.item_id for event in deltas), CALLS, strict=True):
        mine = [event.delta for event in deltas if event.item_id == item]
        assert "".join(mine) == arguments
        assert len(mine) > 1 if native else len(mine) == 1


@pytest.mark.parametrize(("text", "native"), [*CUT, (INVALID, True), (f"Look: {INVALID}", True)])
def test_calls_that_are_cut_off_or_invalid_are_the_text_of_the_answer(text, native):
    """None of them is complete in a stream, so that no client executes it."""
    with served(TextEngine(text, native)) as client:
        whole = chat(client).choices[0].message
        chunks = list(chat(client, stream=True))
        events = list(client.responses.create(model="m", input="Say it.", stream=True))
        with client.responses.stream(model="m", input="Say it.") as stream:
            final = stream.get_final_response()
    assert (whole.content, whole.tool_calls) == (text, None)
    assert "".join(contents(chunks)) == events[-1].response.output_text == final.output_text == text
    assert "}" not in "".join(call.function.arguments for call in call_deltas(chunks))
    assert (chunks[-1].choices[0].finish_reason, final.status) == ("stop", "completed")
    assert not [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [item.type for item in final.output] == ["message"]
    begun = [event.item.id for event in events if event.type == "response.output_item.added"]
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert sorted(begun) == sorted(item.id for item in ended)
    assert [item.status for item in ended if item.type == "function_call"] == ["incomplete"] * (len(begun) - 1)
    assert len(begun) == 1 + (text.count('"arguments": {') if native else 0)


def test_a_second_call_begins_in_a_response_before_the_answer_is_complete():
    with served(TextEngine(TAGGED, True)) as client:
        events = list(client.responses.create(model="m", input="Say it.", stream=True))
    kinds = [
        (event.type.removeprefix("response."), event.output_index) for event in events if hasattr(event, "output_index")
    ]
    first_end = kinds.index(("function_call_arguments.done", 0))
    assert kinds.index(("output_item.added", 2)) < first_end
    assert kinds[:first_end].count(("function_call_arguments.delta", 2)) > 3
    assert isinstance(events[-1], openai.types.responses.ResponseCompletedEvent)


@pytest.mark.parametrize("answer", ["It is mild.", FIRST, ""], ids=["text", "call", "cut short"])
def test_reasoning_is_a_field_and_an_item_of_its_own(answer):
    """Streamed, its deltas come before those of the answer."""
    text = f"<think>\nShall I {FIRST}?\n" + (f"</think>\n\n{answer}" if answer else "")
    engine = TextEngine(text, True, ReasoningForm("<think>", "</think>", opened=False))
    with served(engine) as client:
        whole = chat(client).choices[0].message
        chunks = list(chat(client, stream=True))
        final = client.responses.create(model="m", input="Say it.")
        with client.responses.stream(model="m", input="Say it.") as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        sent_back = [{"role": "user", "content": "a"}, *final.output, {"role": "user", "content": "b"}]
        again = client.responses.create(
            model="m",
            input=[item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in sent_back],
        )
    reasoning = f"Shall I {FIRST}?"
    assert whole.reasoning_content.rstrip("\n") == reasoning
    assert (whole.content or "") == (answer if answer != FIRST else "")
    assert [call.function.name for call in whole.tool_calls or []] == (["look"] if answer == FIRST else [])
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
    parts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(parts).rstrip("\n") == reasoning
    assert len(parts) > 10
    assert "".join(contents(chunks)) == (answer if answer != FIRST else "")
    kinds = [item.type for item in final.output]
    assert kinds == ["reasoning", "function_call" if answer == FIRST else "message"]
    assert final.output[0].content[0].text.rstrip("\n") == reasoning
    assert [item.type for item in streamed.output] == kinds
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == streamed.output[0].content[0].text
    assert again.status == "completed"
    assert final.usage.output_tokens_details.reasoning_tokens == 12
