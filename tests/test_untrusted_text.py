"""Functions that read what a policy, a judge or a server wrote: on 100 kB of hostile text they end soon, and on twice
as much they take no more than about twice as long."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from components.answer_text import last_number
from components.environments.adapters.agentgym_actions import Action, tagged
from components.environments.service.customer import agrees, clear, says
from components.environments.tools import InvalidAction
from components.environments.worlds.email_search.answers import is_right
from components.environments.worlds.questions.base import same
from components.errors import JudgeError
from components.filters.distinct import shingles
from components.json_text import find_json
from components.redaction import mask_text
from components.rewards.llm.answers import read_scores
from components.rewards.llm.transcript import as_text
from components.rewards.rules import answers, code_tests, json_schema
from components.rewards.rules.accuracy import Choice, Exact
from components.rewards.rules.answer_format import Tags
from components.rewards.rules.patterns import Pattern
from components.rollout.code import _BLOCK
from components.rollout.formats import ChatActions, React, UnparsedAction
from components.rollout.observations import clean
from components.rollout.tool_schemas import misfit
from components.trajectories.call_forms import FORMS, attempts_call
from components.trajectories.call_forms.pythonic import read_pythonic

pytestmark = pytest.mark.security

SIZE = 100_000
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def _react(text):
    form = React()
    form.opening([], [TOOL])
    return form.read({"role": "assistant", "content": text})


def _chat(text):
    form = ChatActions()
    form.opening([], [])
    return form.read({"role": "assistant", "content": text})


READERS = {
    "tagged calls": FORMS["tagged_json"].read,
    "pythonic calls": read_pythonic,
    "react": _react,
    "invalid call": lambda text: attempts_call(text, [TOOL]),
    "chat": _chat,
    "block of code": _BLOCK.findall,
    "observation": lambda text: clean(text, 2 * SIZE),
    "judge's JSON": lambda text: find_json(text, lambda _: False),
    "judge's scores": lambda text: read_scores({"a": text, "b": "1"}),
    "transcript": as_text,
    "tag": lambda text: answers.tagged(text, "answer"),
    "boxed": answers.boxed,
    "tags": Tags(["think", "answer"]).wrong,
    "choice": Choice().chosen,
    "number": last_number,
    "exact": lambda text: Exact(punctuation=False).same(text, text[1:]),
    "JSON of a schema": lambda text: json_schema.misfit(text, {"type": "object"}),
    "program": code_tests.program,
    "shingles": lambda text: shingles(text, 3),
    "masked": mask_text,
    "agentgym": lambda text: tagged(Action(text, "")),
    "question": lambda text: (same(text, 3), same(text, "a"), same(text, ["a", "b"])),
    "email": lambda text: [is_right(kind, text, "1", "?") for kind in ("money", "code", "number")],
    "customer": lambda text: (says(text, "45"), agrees(text), clear(text)),
    "arguments": lambda text: misfit(
        {"name": "f", "parameters": {"properties": {"a": {"pattern": "^(a|aa)+$"}}}}, {"a": text}
    ),
}
UNITS = {
    "letters": "a", "digits": "1", "blanks": " ", "lines": "\n", "tabs": "\t", "quotes": '"', "backslashes": '\\"',
    "opening brackets": "[", "opening braces": "{", "lists": "[1,", "mappings": '{"a":', "calls": "\n[f(a=",
    "calls with text": "\n[f(a=['x',", "calls of quotes": "\n[f(a=[\",'", "lines of a list": "\n['x',",
    "tag": "<tool_call>",
    "empty tags": "<tool_call>{}</tool_call>", "tagged": '<tool_call>{"name": "f"}</tool_call>', "think": "<think>",
    "answer": "<answer> ", "search": "<search>", "fences": "```", "open fences": "```json\n",
    "python": "```python\nx\n",
    "blank fences": "```\n\n", "actions": "Action: f\n", "observations": "\n  Observation", "boxes": "\\boxed{",
    "angles": "< ", "closing": "</", "numbers": "1,111,", "dots": "1.", "minus": "-", "exponents": "1e",
    "choices": "(A) ",
    "words": "the answer is ", "punctuation": "!?", "escapes": "\x1b[", "titles": "\x1b]", "marks": "<|a",
    "urls": "a://b:", "schemes": "x+", "combining": "\u0315\u0300", "surrogates": "\ud83d", "CRLF": "\r\n",
    "commas": ",", "nulls": "\x00", "emoji": "😀", "mixed": "a b\n\"'[{<```", "slashes": "/ ",
}  # fmt: skip


def _hostile(size):
    """Return texts of about this many characters, by name."""
    for name, unit in UNITS.items():
        text = unit * (size // len(unit))
        yield name, text
        yield f"{name}, closed", f"[f(a={text}\n```</answer>]"
    yield "combining in two runs", "a" + "\u0315" * (size // 2) + "\u0300" * (size // 2)
    yield "spaces after an angle", "<" + " " * size
    yield "spaces in a fence", " ```json" + "\n" * size
    yield "a list at many starts", "[" * 200 + "1," * (size // 2)
    yield "a string at many starts", "[" * 200 + '"' + "a" * size


def _seconds(read, text):
    began = time.thread_time()
    with contextlib.suppress(ValueError, RecursionError, UnparsedAction, InvalidAction, JudgeError):
        read(text)
    return time.thread_time() - began


@pytest.mark.parametrize("name", READERS)
def test_readers_take_linear_time(name):
    read = READERS[name]
    slow = {}
    for (attack, text), (_, double) in zip(_hostile(SIZE), _hostile(2 * SIZE), strict=True):
        if (took := _seconds(read, text)) < 0.5:  # 5 µs a character: what was quadratic took 10 s and more
            continue
        once = min(took, _seconds(read, text))
        if (twice := _seconds(read, double)) > max(3 * once, 3.0):
            slow[attack] = (once, twice)
    assert slow == {}


def test_operator_pattern_times_out_without_blocking_the_event_loop():
    reward = Pattern(r"^(a|aa)+$", seconds=0.5)

    def attacked():
        with pytest.raises(JudgeError, match=r"was not done after 0\.5 s"):
            reward.search("a" * 100 + "!")
        with pytest.raises(JudgeError, match=r"was not done after 0\.5 s"):
            reward.count(("a" * 100 + "!") * 100)

    async def beside():
        ticks = 0
        work = asyncio.create_task(asyncio.to_thread(attacked))
        while not work.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await work
        return ticks

    assert asyncio.run(beside()) >= 10


class TestSchemasOfServers:
    """Tools of an MCP server, with the server's schema and the policy's arguments."""

    def _misfit(self, schema, argument):
        return misfit({"name": "f", "parameters": {"properties": {"a": schema}}}, {"a": argument})

    def test_catastrophic_backtracking_is_a_mismatch(self):
        bomb = "a" * 100 + "!"
        assert "not done after 1 s" in self._misfit({"pattern": "^(a|aa)+$"}, bomb)
        assert "not done after 1 s" in self._misfit({"patternProperties": {"^(a|aa)+$": {}}}, {bomb: 1})
        assert "not done after 1 s" in self._misfit(
            {"patternProperties": {"^(a|aa)+$": {}}, "additionalProperties": False}, {bomb: 1}
        )
        assert "not done after 1 s" in self._misfit({"items": {"pattern": "^(a|aa)+$"}}, [bomb] * 1000)

    @pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
    def test_references_that_double_at_each_level_are_a_mismatch(self, keyword):
        last = {} if keyword == "allOf" else False
        levels = {f"a{n}": {keyword: [{"$ref": f"#/$defs/a{n - 1}"}] * 2} for n in range(1, 31)}
        function = {"name": "f", "parameters": {"$defs": {"a0": last, **levels}, "$ref": "#/$defs/a30"}}
        assert "not done after 50000 steps" in misfit(function, {})

    def test_references_without_end_are_a_mismatch_and_recursive_values_are_not(self):
        assert "nested too deeply" in misfit({"name": "f", "parameters": {"$ref": "#"}}, {})
        tree = {"name": "f", "parameters": {"properties": {"a": {"$ref": "#"}}}}
        assert misfit(tree, {"a": {"a": {"a": {}}}}) == ""

    def test_patterns_keep_their_meaning(self):
        assert self._misfit({"pattern": "^a+$"}, "aaa") == ""
        assert "does not match" in self._misfit({"pattern": "^a+$"}, "b")
        closed = {
            "properties": {"x": {}},
            "patternProperties": {"^y": {"type": "integer"}},
            "additionalProperties": False,
        }
        assert self._misfit(closed, {"x": 1, "y1": 2}) == ""
        assert "not of type 'integer'" in self._misfit(closed, {"y1": "2"})
        assert "z" in self._misfit(closed, {"z": 1})
        assert self._misfit({"additionalProperties": False, "properties": {"x": {}}}, {"x": 1}) == ""
        assert "unexpected" in self._misfit({"additionalProperties": False}, {"x": 1})
        assert "is no regular expression" in self._misfit({"pattern": "("}, "x")
        assert self._misfit({"unevaluatedProperties": False, "properties": {"x": {}}}, {"x": 1}) == ""
        both = {"unevaluatedProperties": False, "patternProperties": {"x": {}}}
        assert "cannot be checked" in self._misfit(both, {"x": 1})

    def test_unique_items_are_compared_by_hash(self):
        unique = {"uniqueItems": True}
        many = [{"a": number} for number in range(20_000)]
        began = time.thread_time()
        assert self._misfit(unique, many) == ""
        assert time.thread_time() - began < 5  # pairwise: minutes
        assert "non-unique" in self._misfit(unique, [*many, {"a": 7}])
        for equal in ([1, 1.0], [[1], [1]], [{"a": [True]}, {"a": [True]}], ["a", "a"], [None, None]):
            assert "non-unique" in self._misfit(unique, equal)
        for other in ([1, True], [0, False], [[1], [2]], ["1", 1], [{}, []], [{"a": 1}, {"a": True}]):
            assert self._misfit(unique, other) == ""


def test_readers_keep_their_results():
    """Texts for which the linear readers must agree with the previous implementations."""
    assert find_json('<think>{"a": 1}</think>```json\n\n{"a": 2}\n```', lambda data: True) == {"a": 2}
    assert find_json('<thinking>never closed {"a": 1}', lambda data: True) == {"a": 1}
    assert find_json('```json\n{"a": 1}', lambda data: True) == {"a": 1}
    assert json_schema.misfit(" ```json \n\n{}\n\n ``` \n", {"type": "object"}) == ""
    assert json_schema.misfit("```\n{}\n```", {"type": "object"}) == ""
    assert json_schema.misfit("```json {}\n```", {"type": "object"}).startswith("no JSON")
    assert as_text("<  /  tools>") == '"\\u003c  /  tools>"'
    assert as_text("<toolsx>") == '"<toolsx>"'
    assert Choice().chosen("I think\n\n  (b).\n B) Paris") == "B"
    assert Choice().chosen("\n\n * C: because") == "C"
    assert _react("Thought: x\n \n  Action: f {}\n\n  Observation: y")["tool_calls"][0]["function"]["name"] == "f"
    assert attempts_call("text\n  [ find ( x", [TOOL])
    assert not attempts_call("text [find(x)]", [TOOL])
    assert read_pythonic("say\n[1, 2]\n[find(a=1)]") == ("say\n[1, 2]", [("find", '{"a": 1}')])
    assert [same(text, 3) for text in (" 3 kg. ", "3.0", "-3", "3 kg cm")] == [True, True, False, False]
    assert tagged(Action("</answer><answer>x</answer>", "")) == "</answer><answer>x</answer>"
    with pytest.raises(InvalidAction):
        tagged(Action("</answer><answer>", ""))
    assert _BLOCK.findall("```py\na\n```\n```\nb\n```  \n```\nc") == [
        ("py", "a\n", "```"), ("", "b\n", "```"), ("", "c", ""),
    ]  # fmt: skip
