"""Tests of the text that is certain while a response is sampled: it is always a beginning of the finished content."""

from __future__ import annotations

import copy
import functools
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.inference.growing_text import GrowingCalls, before_possible_stop, growing_message, text_before
from components.trajectories.call_forms import FORMS
from components.trajectories.chat import ChatFormat

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALL_PARTS = [
    '"a": 1', '"a"', ":", ",", '"b\\n\\u00e9"', "1e5", "-0", "01", "NaN", "[", "]", "{", "}", "}}</tool_call>", " ",
    '"c": [true, {"d": null}]', '"', "\n", "<tool_call>", "\\ud83d",
]  # fmt: skip
CALLS = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', "f(x=1)", "[f(x=1)]", "\n[f(x=1)]"]
PARTS = ["<tool", "[", "]", "\n", " ", "(", ")", "f", "a", "é", "<", "[]", "1, ", ",", "\t", "END", "E", "N", '"']
PIECES = st.lists(st.sampled_from([*CALLS, *PARTS]), max_size=12).map("".join)
STOPS = st.lists(st.sampled_from(["END", "N", "\n", "\n\n", "]", "a\n[", "</tool_call>"]), max_size=3)


@functools.cache
def tokenizer_of(kind: str):
    """A tokenizer of bytes, or of words and, for other characters, bytes, with the decoder of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from components.models.random_weights import CHATML

    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        built = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
    else:
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abfENDx()[]<>/{}_\n1é", "▁a", "▁▁"]
        vocabulary, merges = {token: index for index, token in enumerate(tokens)}, [("▁", "a"), ("▁", "▁")]
        built = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        built.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|im_end|>", chat_template=CHATML)


@functools.cache
def chat_of(kind: str, native: bool) -> ChatFormat:
    chat = ChatFormat(tokenizer_of(kind))
    chat.call_form = FORMS["tagged_json"] if native else None
    return chat


def content_of(chat: ChatFormat, ids: list[int], stop: list[str]) -> str:
    """The content of the finished response, as `Conversations.completion` makes it."""
    text = chat.text_of(ids)
    before = text_before(text, stop)
    return str(chat.parse_text(text if before is None else before, 0)["content"])


@pytest.mark.parametrize("native", [False, True])
@given(text=PIECES, more=PIECES)
def test_certain_text_begins_the_content_whatever_follows(native, text, more):
    chat = chat_of("bytes", native)
    certain = chat.certain_text(text)
    assert chat.parse_text(text + more, 0)["content"].startswith(certain)
    assert text.startswith(certain)


@given(
    space=st.sampled_from(["", "\n\n", " ", "\t"]),
    name=st.text(max_size=5),
    arguments=st.dictionaries(st.text(), VALUES, max_size=4),
    spelling=st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": True, "indent": "\t"}]),
    seed=st.integers(0, 10**6),
)
def test_calls_grow_to_the_arguments_of_the_finished_ones(space, name, arguments, spelling, seed):
    """Whatever their spelling and parts are: all of them but the last brace, each as soon as it is certain."""
    rng, text = random.Random(seed), "Look."
    for called in (arguments, {}, {"again": arguments})[: rng.randrange(1, 4)]:
        call = json.dumps({"name": name, "arguments": called}, **{"ensure_ascii": False} | spelling)
        text += f"{space}<tool_call>{space}{call}{space}</tool_call>" + rng.choice(["", " and", "\n"])
    finished = FORMS["tagged_json"].read(text)[1]
    growing, sent = GrowingCalls(3), []
    for end in range(1, len(text) + 1):
        if rng.random() < 0.7 or end == len(text):
            sent += growing.extend(text[:end])
    assert list(dict.fromkeys((part.index, part.id) for part in sent)) == [
        (index, f"call_3_{index}") for index in range(len(finished))
    ]
    for index, (named, written) in enumerate(finished):
        parts = [part for part in sent if part.index == index]
        assert {part.name for part in parts} == {named}
        assert "".join(part.arguments for part in parts) + "}" == written


@given(text=st.lists(st.sampled_from(CALL_PARTS), max_size=12).map("".join), seed=st.integers(0, 10**6))
def test_a_call_is_never_complete_before_the_answer_ends(text, seed):
    """Also in texts that are no JSON; of those that are calls, it is a beginning, unless a key repeats."""
    text = '<tool_call>{"name": "f", "arguments": {' + text
    growing, rng, sent = GrowingCalls(0), random.Random(seed), {0: ""}
    for end in range(1, len(text) + 1):
        if rng.random() < 0.5 or end == len(text):
            for part in growing.extend(text[:end]):
                sent[part.index] = sent.get(part.index, "") + part.arguments
    for arguments in sent.values():
        with pytest.raises(ValueError):
            json.loads(arguments)
    try:
        calls = FORMS["tagged_json"].read(text)[1]
    except ValueError:
        return
    assert len(sent) == len(calls)
    pairs = json.loads(re.search(r'"arguments": (.*?)\s*}\s*</tool_call>', text, re.DOTALL)[1], object_pairs_hook=list)
    if len(pairs) == len(dict(pairs)):
        assert calls[0][1] == sent[0] + "}"


def test_what_a_call_makes_certain():
    growing, text, seen = GrowingCalls(0), "", []
    for part in ('<tool_call>{"name": "f"', ', "arguments": {', '"a', "b\\u00", 'e9": -1', "2e1", ", ", '"c":[', "]}}"):
        text += part
        seen.append([delta.arguments for delta in growing.extend(text)])
    assert seen == [[], ["{"], ['"a'], ["b"], ['é": '], [], ["-120.0, "], ['"c": ['], ["]"]]
    more = '</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "h"'
    assert [(delta.index, delta.name, delta.arguments) for delta in growing.extend(text + more)] == [
        (1, "g", '{"x": 1')
    ]


def test_calls_in_another_order_or_with_other_keys_are_not_reported():
    for text in ('{"arguments": {"a": 1}, "name": "f"}', '{"name": "f", "id": 1, "arguments": {}}', '{"name": "f"}'):
        assert FORMS["tagged_json"].read(f"<tool_call>{text}</tool_call>")[1]
        assert GrowingCalls(0).extend(f"<tool_call>{text}</tool_call>") == []


def test_no_call_is_reported_after_another_that_is_not():
    """Its place among the calls of the response would not be certain."""
    first = '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 1}</tool_call>'
    last = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert [name for name, _ in FORMS["tagged_json"].read(first + last)[1]] == ["f", "g"]
    assert [delta.name for delta in GrowingCalls(0).extend(first + last)] == ["f"]


def test_white_space_before_a_text_is_kept_with_and_without_calls():
    for native, call in ((True, '<tool_call>{"name": "f"}</tool_call>'), (False, "\n[f()]")):
        chat = chat_of("bytes", native)
        assert chat.certain_text("\n\n Hello") == "\n\n Hello"
        assert chat.certain_text("\n ") == ""
        message = chat.parse_text(f"\n\n Hello{call}", 0)
        assert (message["content"], len(message["tool_calls"])) == ("\n\n Hello", 1)
        message = chat.parse_text(f"\n {call}", 0)
        assert (message["content"], len(message["tool_calls"])) == ("", 1)


@pytest.mark.parametrize("native", [False, True])
def test_ordinary_text_is_not_held_back(native):
    chat = chat_of("bytes", native)
    for text in ("Hello", "a [link](b)", "1 < 2", "x\n\ny", "[1, 2]", "Hello\n[see](x) more", "f(x)"):
        assert chat.certain_text(text + ".") == text + "."
    held = ["<tool", "A <tool_call>", "<tool_call>{}</tool_call>"] if native else ["[f", "A\n", "A\n[f(", "[f(x=1)] b"]
    for text in held:
        assert chat.certain_text(text) == ("A" if text[0] == "A" else "")


@given(text=PIECES, more=PIECES, stop=STOPS)
def test_text_before_a_possible_stop_string_is_before_every_stop_string(text, more, stop):
    certain = before_possible_stop(text, stop)
    whole = text_before(text + more, stop)
    if text_before(text, stop) is not None:
        whole = text_before(text, stop)  # sampling ends there
    assert (text + more if whole is None else whole).startswith(certain)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@given(text=PIECES, stop=STOPS, seed=st.integers(0, 10**6), noise=st.booleans())
def test_increments_are_a_beginning_of_the_content(kind, native, text, stop, seed, noise):
    """Also of random tokens, which are often bytes of no character."""
    chat = chat_of(kind, native)
    rng = random.Random(seed)
    ids = chat.encode(text)
    if noise:
        ids = [rng.randrange(256) if rng.random() < 0.5 else token for token in ids for _ in range(rng.randrange(1, 4))]
    growing = growing_message(chat, stop)
    sent, done = "", 0
    for end in range(1, len(ids) + 1):
        if text_before(chat.text_of(ids[:end]), stop) is not None:
            break  # the engine samples no further
        if rng.random() < 0.5 or end == len(ids):
            sent += growing.extend(ids[done:end])
            done = end
        assert content_of(chat, ids[:end], stop).startswith(sent)
    assert content_of(chat, ids[: max(end, 1)] if ids else [], stop).startswith(sent)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_no_part_of_a_character_is_reported(kind):
    """Every prefix is a beginning of the text, so it has no replacement characters; the text is complete at the end."""
    chat = chat_of(kind, False)
    text = "a é 北京 🙂👩‍👩‍👧 a"
    growing = growing_message(chat, ())
    parts = [growing.extend([token]) for token in chat.encode(text)]
    assert "".join(parts) == text
    assert [part for part in parts if "\ufffd" in part] == []
    assert len([part for part in parts if part]) > (10 if kind == "bytes" else 4)


@pytest.mark.parametrize("native", [False, True])
def test_text_that_cannot_be_a_call_is_not_held_back(native):
    """As with `tool_choice: none`, and in text completions."""
    chat = chat_of("bytes", native)
    for text in ("<tool_call>{}", "[f(x=1)]", "\n \n"):
        growing = growing_message(chat, (), calls=False)
        assert (growing.extend(chat.encode(text)), growing.calls) == (text, [])


CALLED = {
    "function_elements": "<tool_call><function=f><parameter=x>\n{}\n</parameter></function></tool_call>",
    "gemma": '<|tool_call>call:f{{x:<|"|>{}<|"|>}}<tool_call|>',
    "mistral": '[TOOL_CALLS]f[ARGS]{{"x": "{}"}}',
}
"""A call as forms write it whose calls are reported when they have ended."""


def marked_chat(form: str) -> ChatFormat:
    chat = copy.copy(chat_of("bytes", True))
    chat.call_form = FORMS[form]
    return chat


def test_calls_that_have_ended_grow_to_the_finished_ones_without_their_last_brace(subtests):
    """A broken call after them makes all of the response text, so none may be complete before it ends."""
    for form, call in CALLED.items():
        for broken in (False, True):
            with subtests.test(form=form, broken=broken):
                chat = marked_chat(form)
                text = "Look. " + call.format("a") + call.format("</tool_call> } ]") + call.format("b")
                growing, sent = growing_message(chat, ()), []
                for token in chat.encode(text[:-2] + "?" if broken else text):
                    growing.extend([token])
                    sent += growing.calls
                finished = chat.call_form.read(text)[1]
                assert [part.arguments + "}" for part in sent] == [arguments for _, arguments in finished][: len(sent)]
                assert [part.id for part in sent] == ["call_0_0", "call_0_1", "call_0_2"][: 2 if broken else 3]


def test_a_single_call_is_reported_without_those_that_make_it_text():
    chat = marked_chat("gemma")
    chat.single_call = True
    growing = growing_message(chat, ())
    growing.extend(chat.encode(CALLED["gemma"].format("a") * 2))
    assert [(part.index, part.arguments) for part in growing.calls] == [(0, '{"x": "a"')]


def test_a_growing_call_is_read_in_linear_time(monkeypatch):
    """Not for each token, nor for each end within an argument."""
    chat, read = marked_chat("function_elements"), []
    inner = type(chat.call_form).read_calls
    monkeypatch.setattr(
        type(chat.call_form), "read_calls", lambda form, text, *at: (read.append(len(text)), inner(form, text, *at))[1]
    )
    text = CALLED["function_elements"].format("</tool_call>" * 200)
    growing, sent = growing_message(chat, ()), []
    for token in chat.encode(text):
        growing.extend([token])
        sent += growing.calls
    assert sum(read) < 8 * len(text)
