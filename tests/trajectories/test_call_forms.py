"""Tests of the forms of tool calls: each reads what its family writes, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.trajectories.call_forms import FORMS, MARKS
from components.trajectories.call_forms.marked import MarkedForm


def function_tool(name: str, **parameters):
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    function_tool(
        "find_order",
        order={"type": "string"},
        n={"type": "integer"},
        tags={"type": "array"},
        at={"type": ["object", "null"]},
    )
]
ARGUMENTS = {"order": '3 "K"\n<b>Grüße</b>', "n": 3, "tags": ["a", {"b": [None, True]}], "at": None}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
ELEMENTS = [("order", ARGUMENTS["order"]), ("n", "3"), ("tags", '["a", {"b": [null, true]}]'), ("at", "null")]


def elements(form: str) -> str:
    return "".join(form.format(key, value) for key, value in ELEMENTS)


WRITTEN = {
    "tagged_json": f'<tool_call>\n{{"name": "find_order", "arguments": {JSON}}}\n</tool_call>',
    "function_elements": "<tool_call>\n<function=find_order>\n"
    + elements("<parameter={}>\n{}\n</parameter>\n")
    + "</function>\n</tool_call>",
    "key_value_elements": "<tool_call>find_order\n"
    + elements("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
    + "</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="find_order">\n'
    + elements('<parameter name="{}">{}</parameter>\n')
    + "</invoke>\n</minimax:tool_call>",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find_order">\n'
    + "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(key == "order").lower()}">{value}</｜DSML｜parameter>\n'
        for key, value in ELEMENTS
    )
    + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "atem": '<atem:function_calls>\n<atem:invoke name="find_order">\n'
    + elements('<atem:parameter name="{}">{}</atem:parameter>\n')
    + "</atem:invoke>\n</atem:function_calls>",
    "gemma": '<|tool_call>call:find_order{order:<|"|>3 "K"\n<b>Grüße</b><|"|>,n:3,'
    'tags:[<|"|>a<|"|>,{b:[null,true]}],at:null}<tool_call|>',
    "marked_pythonic": '<|tool_call_start|>[find_order(order="3 \\"K\\"\\n<b>Grüße</b>", n=3, '
    'tags=["a", {"b": [None, True]}], at=None)]<|tool_call_end|>',
    "mistral": f'[TOOL_CALLS][{{"name": "find_order", "arguments": {JSON}, "id": "abcdefghi"}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find_order\n"
    f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_3_1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find_order<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find_order:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "find_order", "arguments": {JSON}}}]',
    "tagged_list": f'<tool_calls>[{{"name": "find_order", "arguments": {JSON}}}]</tool_calls>',
    "cohere": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "find_order", "parameters": '
    f"{JSON}}}\n]<|END_ACTION|>",
    "harmony": f" to=functions.find_order<|channel|>commentary json<|message|>{JSON}",
    "json_text": f'{{"name": "find_order", "parameters": {JSON}}}',
}
"""A call as the templates of each family write it."""
SECOND = {
    "mistral": f"[TOOL_CALLS]find_order[ARGS]{JSON}",
    "json_text": f'<|python_tag|>{{"name": "find_order", "parameters": {JSON}}}',
    "harmony": f"<|channel|>commentary to=functions.find_order <|constrain|>json<|message|>{JSON}",
    "granite": f'<tool_call>[{{"name": "find_order", "arguments": {JSON}}}]',
}
"""Second spellings of some families."""


def read(name: str, text: str):
    """Return content and calls with parsed arguments; None if a call is invalid."""
    try:
        content, calls = FORMS[name].read(text, TOOLS)
    except (ValueError, RecursionError):
        return None
    return content, [(function, json.loads(arguments)) for function, arguments in calls]


def test_each_form_reads_what_its_family_writes():
    assert WRITTEN.keys() == FORMS.keys()
    call = ("find_order", ARGUMENTS)
    assert {name: read(name, text) for name, text in WRITTEN.items()} == dict.fromkeys(WRITTEN, ("", [call]))
    assert {name: read(name, text) for name, text in SECOND.items()} == dict.fromkeys(SECOND, ("", [call]))
    spoken = {name: f"Let me see.\n{text}" for name, text in WRITTEN.items() if FORMS[name].with_text}
    assert {name: read(name, text) for name, text in spoken.items()} == dict.fromkeys(spoken, ("Let me see.", [call]))


def test_each_form_reads_several_calls():
    between = {"harmony": "<|end|><|start|>assistant"}
    joined = {name: text + between.get(name, "\n") + text for name, text in WRITTEN.items()}
    expected = ("", [("find_order", ARGUMENTS)] * 2)
    assert {name: read(name, text) for name, text in joined.items()} == dict.fromkeys(WRITTEN, expected)
    assert read("json_text", ";".join([WRITTEN["json_text"]] * 2)) == expected


def test_a_call_that_is_cut_short_is_none():
    """Otherwise a call without the rest of its arguments would be executed."""
    executed = {
        (name, end): calls
        for name, text in WRITTEN.items()
        for end in range(len(text))
        if (result := read(name, text[:end])) and (calls := result[1])
    }
    assert executed == {}
    assert [name for name, text in WRITTEN.items() if not FORMS[name].attempts_call(text[:-1])] == []


def test_a_misspelled_end_makes_no_longer_argument():
    """Otherwise a call would be executed whose argument has the text of the next ones."""
    ends = {
        "function_elements": "</parameter>",
        "key_value_elements": "</arg_value>",
        "minimax": "</parameter>",
        "dsml": "</｜DSML｜parameter>",
        "atem": "</atem:parameter>",
    }
    for name, end in ends.items():
        for damaged in (end.replace("/", "", 1), end.replace("a", "", 1), end[:-1]):
            assert read(name, WRITTEN[name].replace(end, damaged, 1)) is None, (name, damaged)
    key = WRITTEN["key_value_elements"].replace("</arg_key>", "</argkey>", 1)
    assert read("key_value_elements", key) is None


def test_a_repeated_or_damaged_key_makes_a_call_invalid():
    """Otherwise one of its values would be lost."""
    texts = {
        "gemma": ["{x:1,x:2}", '{<|"|>x<|"|>:1,x:2}', '{<|"|>a<|"|> <|"|>b<|"|>:1}'],
        "function_elements": ["<parameter=x>1</parameter><parameter=x>2</parameter>"],
    }
    around = {
        "gemma": "<|tool_call>call:f{}<tool_call|>",
        "function_elements": "<tool_call><function=f>{}</function></tool_call>",
    }
    for name, damaged in texts.items():
        for text in damaged:
            assert read(name, around[name].format(text)) is None, text
    assert read("gemma", around["gemma"].format('{<|"|>a b<|"|>:1}')) == ("", [("f", {"a b": 1})])


def test_text_without_calls_is_unchanged():
    texts = ("", "It is [shipped].", " {} and <b>\n", '{"answer": 3, "name": "x", "why": ""}' + "!", "\n\n")
    for name in FORMS:
        for text in texts if name != "json_text" else texts[:2]:
            assert read(name, text) == (text, []), (name, text)


@pytest.mark.parametrize("name", FORMS)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *(*MARKS, *WRITTEN.values(), "</tool_call>", "<tool_", "[", "{", '"', " ", "\n", "a", "ü"),
                *("<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>", "<|start|>assistant"),
            ]
        ),
        max_size=5,
    ),
    cut=st.integers(0, 400),
)
def test_a_growing_text_shows_what_the_whole_text_has(name, pieces, cut):
    """Streams report text and calls before the answer is complete; they cannot take them back."""
    text = "".join(pieces)
    form, result = FORMS[name], read(name, text)
    content = result[0] if result else text
    assert content.startswith(form.certain_text(text[:cut]))
    if result and isinstance(form, MarkedForm):
        ended, at = form.ended_calls(text[:cut], TOOLS)
        ended += form.ended_calls(text, TOOLS, at)[0]
        assert [(function, json.loads(arguments)) for function, arguments in ended] == result[1][: len(ended)]


def test_an_object_is_a_call_only_where_tools_are_offered():
    """Llama's calls have no marker: without tools, an object with name and parameters is an answer in JSON."""
    text = WRITTEN["json_text"]
    assert FORMS["json_text"].read(text) == (text, [])
    assert len(FORMS["json_text"].read(text, TOOLS)[1]) == 1
    assert [FORMS["json_text"].start(space + text) for space in ("", "\n\n")] == [0, 2]


def test_values_have_the_types_of_their_parameters():
    """Forms that write values as plain text: a text of digits is a number only where the parameter is one."""

    def value(schema, text):
        offered = [function_tool("f", x=schema)] if schema else []
        for tool in offered:
            tool["function"]["parameters"]["$defs"] = {"a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
        call = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
        return json.loads(FORMS["function_elements"].read(call, offered)[1][0][1])["x"]

    cases = [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, '["3"]', ["3"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"type": "integer"}, "three", "three"),
        ({"enum": ["1", "2"]}, "1", "1"),
        (None, "3", 3),
        ({"$ref": "#/$defs/a~1b"}, "3", "3"),
        ({"anyOf": [{"$ref": "#/$defs/a%7E1b"}, {"type": "null"}]}, "3", "3"),
        ({"$ref": "#/$defs/loop"}, "3", 3),
        ({"$ref": "#/$defs/none"}, "3", 3),
        ({"$ref": "https://example.com/schema"}, "3", 3),
        ({"enum": 5, "anyOf": 5, "type": [["string"]], "$ref": 5}, "3", 3),
        (["string"], "3", 3),
    ]
    assert [value(schema, text) for schema, text, _ in cases] == [expected for *_, expected in cases]
