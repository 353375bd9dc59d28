"""Texts with tool calls for the comparison with other parsers: generated calls, text around them, texts cut short and
broken ones. The same seed gives the same texts in every process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from components.trajectories.call_forms import FORMS
from components.trajectories.call_forms.pythonic import write_pythonic

Call = tuple[str, dict[str, Any]]
SEED = 7
ROUNDS = 60
"""Generated lists of calls of each form."""

WORDS = (
    "",
    "Bern",
    "two words",
    "Zürich",
    "東京",
    "🙂 ok",
    "مرحبا",
    'say "hi"',
    "it's",
    "both ' and \"",
    "back\\slash",
    r"\d+\s",
    "C:\\new\\table",
    "line\nbreak",
    "tab\there",
    "a, b) c] d}",
    "[f(x=1)]",
    '{"a": 1}',
    "<b>&amp;</b>",
    "</tool_call>",
    "<tool_call>",
    "null",
    "True",
    "\u2028",
    "\x7f",
    "e\u0301",
)
NAMES = ("find_order", "f", "look_up", "getWeather", "send2")
KEYS = ("order", "a", "query", "when", "n1", "unit_of_measure")
HARD_NAMES = ("_hidden", "mcp.find", "get-order", "größe", "print")
HARD_KEYS = ("from", "class", "None", "any key", "a-b", "a.b", "größe", "1st", "")
NUMBERS = (0, 1, -7, 10**18, 0.5, -2.25, 1e-9, 1e20, 3.0)


@dataclass(frozen=True)
class Text:
    form: str
    """Name of a form (`components.trajectories.call_forms`), or `pythonic`."""
    kind: str
    """Kind of text, such as `calls` or `cut short`."""
    text: str
    calls: tuple[Call, ...] | None = None
    """The calls that the text was written from; None for broken texts."""


def texts(rounds: int = ROUNDS) -> list[Text]:
    """Return the texts of both forms."""
    return [*_tagged(random.Random(SEED), rounds), *_pythonic(random.Random(SEED), rounds), *rendered()]


def rendered(calls_each: int = 8) -> Iterator[Text]:
    """Yield what the chat templates of the model families write for calls, with and without words."""
    from tests.trajectories.families import FAMILIES, LOOK_UP, chat_format

    rng = random.Random(SEED)
    for name, family in FAMILIES.items():
        if name == "deepseek_r1":
            continue  # its template opens <think> for generation only: ChatFormat refuses to write its answers
        chat = chat_format(family)
        if chat.call_form not in (None, FORMS["tagged_json"]):
            continue
        for number in range(calls_each):
            calls = _calls(rng, NAMES, KEYS)
            made = [
                {"id": f"call_1_{n}", "type": "function", "function": {"name": call, "arguments": json.dumps(given)}}
                for n, (call, given) in enumerate(calls)
            ]
            answer = {"role": "assistant", "content": "I look." * (number % 2), "tool_calls": made}
            (stream,) = chat.streams([{"role": "user", "content": "a"}, answer], [LOOK_UP])
            start, end = stream.spans[0]
            text = chat.text_of(stream.token_ids[start:end])
            form = "tagged_json" if chat.native_tools else "pythonic"
            yield Text(form, f"written by {name}", text, tuple(calls))


def tagged(calls: list[Call], *, ascii_only: bool = False, separator: str = "\n") -> str:
    """Return calls as the templates of Qwen and Hermes write them."""
    blocks = [json.dumps({"name": name, "arguments": given}, ensure_ascii=ascii_only) for name, given in calls]
    return "\n".join(f"<tool_call>{separator}{block}{separator}</tool_call>" for block in blocks)


def _tagged(rng: random.Random, rounds: int) -> Iterator[Text]:
    def text(kind: str, written: str, calls: list[Call] | None = None) -> Text:
        return Text("tagged_json", kind, written, None if calls is None else tuple(calls))

    for _ in range(rounds):
        calls = _calls(rng, NAMES, KEYS)
        written = tagged(calls)
        yield text("calls", written, calls)
        yield text("calls, escaped", tagged(calls, ascii_only=True), calls)
        yield text("calls on one line", tagged(calls, separator=""), calls)
        yield text("names of any letters", tagged(hard := _calls(rng, HARD_NAMES, HARD_KEYS)), hard)
        yield text("text before", f"I look it up.\n{written}", calls)
        yield text("text after", f"{written}\nOne moment.", calls)
        yield from damaged(rng, "tagged_json", written)
    yield text("text between", "A <tool_call>{}</tool_call> B <tool_call>{}</tool_call> C".format(*2 * [_block("f")]))
    for body in TAGGED_BODIES:
        yield text("unusual", f"<tool_call>{body}</tool_call>")
        yield text("unusual", f"{tagged([('f', {})])}\n<tool_call>{body}</tool_call>")
    for written in ("", "Your order is on its way.", "tool_call", "<tool_call", "</tool_call>", "<TOOL_CALL>{}"):
        yield text("no call", written, [])


def _block(name: str) -> str:
    return json.dumps({"name": name, "arguments": {}})


TAGGED_BODIES = (
    "",
    "{}",
    "[]",
    "find()",
    '{"name": "f"}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": []}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "parameters": {"a": 1}}',
    '{"name": 1, "arguments": {}}',
    '{"name": null, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"arguments": {"a": 1}, "name": "f"}',
    '{"name": "f", "arguments": {"a": 1}, "id": 7}',
    '{"name": "f", "arguments": {"a": 1, "a": 2}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": -Infinity}}',
    '{"name": "f", "arguments": {"a": 1e999}}',
    r'{"name": "f", "arguments": {"a": "\ud800"}}',
    r'{"name": "f", "arguments": {"a": "\ud83d\ude42"}}',
    '{"name": "f", "arguments": {"a": "raw\nline"}}',
    r'{"name": "f", "arguments": {"a": "\d"}}',
    "{'name': 'f', 'arguments': {}}",
    '{"name": "f", "arguments": {"a": 1,}}',
    '{"name": "f", "arguments": {"a": True}}',
    '{"name": "f", "arguments": {}} and more',
    '{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}',
    '[{"name": "f", "arguments": {}}]',
    '"f"',
    '\ufeff{"name": "f", "arguments": {}}',
    '{"name": "f", "arguments": {}}<tool_call>',
)


def _pythonic(rng: random.Random, rounds: int) -> Iterator[Text]:
    def text(kind: str, written: str, calls: list[Call] | None = None) -> Text:
        return Text("pythonic", kind, written, None if calls is None else tuple(calls))

    for _ in range(rounds):
        calls = _calls(rng, NAMES, KEYS)
        written = write_pythonic(calls)
        yield text("calls", written, calls)
        yield text("calls in Python's spelling", _python(calls), calls)
        yield text("names of any letters", write_pythonic(hard := _calls(rng, HARD_NAMES, HARD_KEYS)), hard)
        yield text("text before", f"I look it up.\n{written}", calls)
        yield text("text after", f"{written}\nOne moment.")
        yield from damaged(rng, "pythonic", written)
    for written in PYTHONIC:
        yield text("unusual", written)
    for written in ("", "Your order is on its way.", "[]", "[1]", '["f()"]', "[f]", "f(a=1)", "[see](http://a.b)"):
        yield text("no call", written, [])


PYTHONIC = (
    "[f()]",
    " [f(a=1)]",
    "[f(a=1)]\n",
    "[ f ( a = 1 , ) , ]",
    "[f(a=1),\n g(b=2)]",
    "[f(a=true, b=null, c=false)]",
    "[f(a=-1.5e3, b=+2, c=.5, d=1.)]",
    "[f(a='two\nlines')]",
    '[f(a="""three\n"quotes\\"""")]',
    "[f(a='''x''', b='')]",
    "[f(a=(1, 2))]",
    "[f(a=(1,))]",
    "[f(a=())]",
    "[f(a=(1))]",
    "[f(a={1, 2})]",
    '[f(a="x" "y")]',
    "[f(a=f'x')]",
    "[f(a=f'{x}')]",
    r"[f(a=r'\d')]",
    "[f(a=b'x')]",
    "[f(a=0x10)]",
    "[f(a=1_000)]",
    "[f(a=007)]",
    "[f(a=1j)]",
    "[f(a=1e999)]",
    "[f(a=NaN)]",
    "[f(a=inf)]",
    r'[f(a="\x41\u00e9\U0001f642\n\t\a")]',
    r'[f(a="\033[1m\0\101")]',
    r'[f(a="\d\/")]',
    r'[f(a="\N{BULLET}")]',
    r'[f(a="\ud83d\ude42")]',
    r'[f(a="\ud800")]',
    '[f(a="x\\\ny")]',
    '[f("x")]',
    "[f(1, a=2)]",
    "[f(*[1])]",
    '[f(**{"a": 1})]',
    "[f(a=1, a=2)]",
    "[f(a={1: 2})]",
    "[f(a={'x': 1, **{}})]",
    "[f(a=1+1)]",
    "[f(a=-True)]",
    "[f(a=not True)]",
    "[f(a=g())]",
    "[f(a=[x for x in []])]",
    "[f(a=K482)]",
    "[f(a=...)]",
    "[f()()]",
    "[f(a=1)][0]",
    "[f(a=1)]; g()",
    "[f(a=1)]\ng(b=2)",
    "[f(a=1)] # done",
    "[f(a=1), 2]",
    "[[f(a=1)]]",
    "(f(a=1),)",
    "```python\n[f(a=1)]\n```",
    '[{"name": "f", "arguments": {}}]',
    '[__import__("os").system("true")]',
)


def _python(calls: list[Call]) -> str:
    """Return calls with the literals that Python prints."""
    written = [(name, ", ".join(f"{key}={value!r}" for key, value in given.items())) for name, given in calls]
    return "[" + ", ".join(f"{name}({arguments})" for name, arguments in written) + "]"


def damaged(rng: random.Random, form: str, written: str) -> Iterator[Text]:
    for _ in range(3):
        yield Text(form, "cut short", written[: rng.randrange(1, len(written))])
    at = rng.randrange(len(written))
    yield Text(form, "a character missing", written[:at] + written[at + 1 :])
    yield Text(form, "a character more", written[:at] + rng.choice("\"'\\[](){},:=<>\nx0") + written[at:])


def _calls(rng: random.Random, names: tuple[str, ...], keys: tuple[str, ...]) -> list[Call]:
    return [
        (rng.choice(names), {key: _value(rng, 3) for key in rng.sample(keys, rng.randrange(4))})
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]


def _value(rng: random.Random, depth: int) -> Any:
    kinds = ["word", "word", "number", "constant", *(["list", "mapping"] if depth else [])]
    match rng.choice(kinds):
        case "word":
            return rng.choice(WORDS)
        case "number":
            return rng.choice(NUMBERS)
        case "constant":
            return rng.choice((True, False, None))
        case "list":
            return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*KEYS, *HARD_KEYS, *WORDS)): _value(rng, depth - 1) for _ in range(rng.randrange(3))}
