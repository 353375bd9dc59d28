"""Tests of tool calls as text: round trips, and no evaluation of invalid calls."""

from __future__ import annotations

import ast
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.trajectories.call_forms import FORMS
from components.trajectories.call_forms.pythonic import read_pythonic, write_pythonic
from components.trajectories.template_options import TemplateOptions
from tests.trajectories.families import Family, chat_format
from tests.trajectories.test_chat import FIND, assistant, tool, user

read_tagged = FORMS["tagged_json"].read
unicode = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("\"'\\\n[]{}()=,<>🙂é\u2028\0"), max_size=12
)
names = st.from_regex(r"\A[A-Za-z_][\w.-]{0,10}\Z") | st.sampled_from(
    ["class", "from", "True", "get-order", "mcp.find"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | unicode,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(unicode, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.tuples(names, st.dictionaries(names | unicode, values, max_size=3)), min_size=1, max_size=3)
said = unicode.map(str.strip).filter(lambda text: not text.startswith("["))


def parsed(found):
    return [(name, json.loads(arguments)) for name, arguments in found]


@given(calls)
def test_pythonic_calls_round_trip(made):
    content, found = read_pythonic(write_pythonic(made))
    assert content == ""
    assert parsed(found) == made
    # And in order, which shows where they are written again.
    assert [list(arguments) for _, arguments in parsed(found)] == [list(arguments) for _, arguments in made]


@given(calls, said.filter(bool))
def test_what_is_said_before_calls_is_kept(made, text):
    content, found = read_pythonic(f"{text}\n{write_pythonic(made)}")
    assert (content, parsed(found)) == (text, made)


@given(calls, said)
def test_tagged_calls_round_trip(made, text):
    blocks = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in made]
    written = text + "".join(f"\n<tool_call>\n{block}\n</tool_call>" for block in blocks)
    if "<tool_call>" in text:
        return
    content, found = read_tagged(written)
    assert (content, parsed(found)) == (text, made)


def test_a_tag_inside_an_argument_is_text():
    call = {"name": "say", "arguments": {"text": "</tool_call><tool_call>"}}
    assert parsed(read_tagged(f"<tool_call>{json.dumps(call)}</tool_call>")[1]) == [("say", call["arguments"])]


@given(st.dictionaries(st.from_regex(r"\A[a-z]{1,5}\Z"), values, max_size=3))
def test_reads_what_python_writes(arguments):
    """Literals in Python's spelling, with single quotes; `ast` is the independent reference."""
    import keyword

    arguments = {f"{name}_" if keyword.iskeyword(name) else name: value for name, value in arguments.items()}
    text = f"[f({', '.join(f'{name}={value!r}' for name, value in arguments.items())})]"
    keywords = ast.parse(text, mode="eval").body.elts[0].keywords
    expected = {one.arg: ast.literal_eval(one.value) for one in keywords}
    assert parsed(read_pythonic(text)[1]) == [("f", expected)]


SPELLINGS = {
    "[f()]": {},
    "  [ f ( a = 1 , ) , ]\n": {"a": 1},
    "[f(a=true, b=null, c=False, d=None)]": {"a": True, "b": None, "c": False, "d": None},
    "[f(a=-1.5e3, b=+2, c=.5)]": {"a": -1500.0, "b": 2, "c": 0.5},
    r'[f(a="\u00e9\x41\n\t\"\'\\", b="\ud83d\ude42", c="C:\dir")]': {"a": "éA\n\t\"'\\", "b": "🙂", "c": "C:\\dir"},
    "[f(a='two\nlines')]": {"a": "two\nlines"},
    '[f(from="here", class="x")]': {"from": "here", "class": "x"},
    '[f(**{"any key": [1, {"b": 2}]}, c=3)]': {"any key": [1, {"b": 2}], "c": 3},
}


def test_spellings():
    assert {text: parsed(read_pythonic(text)[1]) for text in SPELLINGS} == {
        text: [("f", arguments)] for text, arguments in SPELLINGS.items()
    }


NO_CALLS = [
    "",
    "Your order is on its way.",
    "[]",
    "[1]",
    '["f()"]',
    "[f]",
    'f(a="x")',
    '[f(a="x")',
    '[f(a="x")] and more',
    '[f("x")]',
    "[f(*[1])]",
    "[f(**1)]",
    "[f(a=K482)]",
    "[f(a=007)]",
    "[f(a=1 b=2)]",
    "[f(a=1, a=2)]",
    '[f(a=1, **{"a": 2})]',
    "[f(a=1+1)]",
    "[f(a=9**9**9)]",
    "[f(a={1: 2})]",
    "[f(a={1})]",
    "[f(a=1e999)]",
    "[f(a=inf)]",
    "[f(a=NaN)]",
    r'[f(a="\ud800")]',
    '[f(a="\ud800")]',
    r'[f(a="\U00FFFFFF")]',
    "[f(a=lambda: 1)]",
    '[f(a=f"{1}")]',
    '[f(a=__import__("os").system("touch evaluated"))]',
    '[__import__("os").system("touch evaluated")]',
    '[f(a=open("evaluated", "w"))]',
    "[f(a=" + "9" * 5000 + ")]",
]


def refused(read, text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return True
    return False


def test_what_is_no_list_of_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [text for text in NO_CALLS if not refused(read_pythonic, text)] == []
    assert not list(tmp_path.iterdir())


NO_TAGGED = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>find()</tool_call>",
    '<tool_call>{"name": "f", "arguments": {}}',
    '<tool_call>{"name": "f", "arguments": {}} more</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>["f"]</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>',
]


def test_what_is_no_tagged_call():
    assert [text for text in NO_TAGGED if not refused(read_tagged, text)] == []


def test_depth_is_an_error_and_no_crash():
    for read, text in (
        (read_pythonic, "[f(a=" + "[" * 100_000),
        (read_pythonic, "[f(a=" + '{"a":' * 100_000),
        (read_tagged, '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000),
    ):
        with pytest.raises((ValueError, RecursionError)):
            read(text)


def test_text_without_tags_is_kept_as_it_is():
    assert read_tagged(" as it is\n") == (" as it is\n", [])
    assert read_tagged('{"name": "f"}') == ('{"name": "f"}', [])


@given(unicode | st.from_regex(r"\A\[[a-z(=\"',)\]\\{}0-9.]{0,20}\Z"))
def test_any_text_is_read_or_refused(text):
    for read in (read_pythonic, read_tagged):
        try:
            content, found = read(text)
        except ValueError:
            continue
        for name, arguments in found:
            assert isinstance(json.loads(arguments), dict)
            assert name
        assert found or content == text


MISTRAL = """{{- '<s>' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
        {{- '[TOOL_CALLS]' if loop.first else ', ' }}{{ '[' if loop.first else '' }}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
        {{- ', "id": "' + call.id + '"}' }}{{ ']' if loop.last else '' }}
    {%- endfor %}{{ message.content + '</s>' }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.tool_call_id + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}
{%- endfor %}"""
KIMI = """{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- if message.role == 'tool' %}{{ '## Return of ' + message.tool_call_id + '\n' }}{% endif %}
{{- message.content }}
{%- if message.tool_calls %}{{ '<|tool_calls_section_begin|>' }}
    {%- for call in message['tool_calls'] %}
        {{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
        {{- (call['function']['arguments'] | tojson) + '<|tool_call_end|>' }}
    {%- endfor %}{{ '<|tool_calls_section_end|>' }}
{%- endif %}{{ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""
"""As Kimi K2's published template: a call has its id in place of its name."""


@pytest.mark.parametrize("named", [False, True])
def test_calls_and_results_have_the_ids_that_a_template_reads(subtests, named):
    """The model writes Kimi's, whose numbers count over the conversation (`make_tool_call_id` of vLLM 0.32)."""
    talk = [user("a")]
    for turn, count in enumerate((2, 1)):
        calls = [("find-order", {"order": f"K{turn}{index}"}) for index in range(count)]
        message = assistant("", *calls)
        for index, call in enumerate(message["tool_calls"]):
            call["id"] = f"call_{turn}_{index}"
        talk += [message, *(tool("b") | {"tool_call_id": call["id"]} for call in message["tool_calls"])]
    numbered = [f"functions.find-order:{number}" for number in range(3)]
    cases = {
        "mistral": (MISTRAL, r'"id": "(\d{9})"}', r"\[TOOL_RESULTS\](\d{9})b", None),
        "kimi": (KIMI, r"<\|tool_call_begin\|>(.*?)<", r"Return of (\S+)", numbered),
    }
    for form, (template, of_call, of_result, expected) in cases.items():
        with subtests.test(form):
            special = ("<s>", "</s>") if form == "mistral" else ("<|im_end|>", "<|im_middle|>")
            template = TemplateOptions(call_form=form if named else None).write(template)
            chat = chat_format(Family(form, template, special, (), eos=special[1]))
            assert (chat.call_form, chat.single_call) == (FORMS[form], False)
            text = chat.render(talk, [FIND], generate=True)
            ids = re.findall(of_call, text)
            assert len(set(ids)) == 3
            assert re.findall(of_result, text) == ids
            assert expected in (None, ids)
            (stream,) = chat.streams(talk[:-1], [FIND])
            read = [chat.parse(stream.token_ids[slice(*span)], turn, [FIND]) for turn, span in enumerate(stream.spans)]
            assert read == [message for message in talk if message["role"] == "assistant"]


def test_only_white_space_is_between_a_call_and_the_token_that_ends_it():
    template = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
    {%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}{{ 'AFTER' if message.tool_calls else '<|im_end|>\n' }}{% endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    special = ("<|im_start|>", "<|im_end|>", "<|call|>")
    ends = {r"\n<|call|>": "<|call|>", r"\nNo more.<|call|>": "<|im_end|>", "<|im_end|>": "<|im_end|>"}
    formats = {after: chat_format(Family("a", template.replace("AFTER", after), special)) for after in ends}
    assert {after: chat.call_end for after, chat in formats.items()} == ends
