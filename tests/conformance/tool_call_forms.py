"""Texts with tool calls in each form of `components.trajectories.call_forms`, as chat templates write them: generated
calls, text around them, texts cut short and broken ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from components.trajectories.call_forms import FORMS
from components.trajectories.call_forms.pythonic import write_pythonic
from tests.conformance.tool_call_texts import KEYS, NUMBERS, PYTHONIC, SEED, WORDS, Call, Text, damaged

ROUNDS = 25
"""Generated lists of calls of each form; each gives 12 texts."""
PARAMETERS = {
    "order": {"type": "string"},
    "n": {"type": "integer"},
    "price": {"type": "number"},
    "ok": {"type": "boolean"},
    "tags": {"type": "array"},
    "where": {"type": "object"},
    "note": {"type": ["string", "null"]},
    "any": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}
NAMES = ("find_order", "f", "look_up", "getWeather", "send2")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Works.",
            "parameters": {"type": "object", "properties": PARAMETERS},
        },
    }
    for name in NAMES
]


def typed_calls(rng: random.Random, *, name: str | None = None) -> list[Call]:
    """Return calls of `TOOLS` whose arguments have the types of their parameters."""
    return [
        (name or rng.choice(NAMES), {key: _typed(rng, key) for key in rng.sample(list(PARAMETERS), rng.randrange(5))})
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]


def _typed(rng: random.Random, key: str) -> Any:
    match key:
        case "order":
            return rng.choice(WORDS)
        case "n":
            return rng.choice((0, 1, -7, 10**18))
        case "price":
            return rng.choice((0.5, -2.25, 1e-9, 3))
        case "ok":
            return rng.choice((True, False))
        case "tags":
            return [_nested(rng, 2) for _ in range(rng.randrange(4))]
        case "where":
            return {key: _nested(rng, 2) for key in rng.sample(KEYS, rng.randrange(3))}
        case "note":
            return rng.choice((None, "Bern", "two words"))
    return rng.choice((3, "three", "Grüße"))


def _nested(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(("word", "word", "number", "constant", *(("list", "mapping") if depth else ())))
    if kind == "list":
        return [_nested(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == "mapping":
        return {key: _nested(rng, depth - 1) for key in rng.sample(KEYS, rng.randrange(3))}
    return rng.choice({"word": WORDS, "number": NUMBERS, "constant": (True, False, None)}[kind])


# Writers


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _listed(calls: list[Call]) -> str:
    return _json([{"name": name, "arguments": given} for name, given in calls])


def _elements(section: str, call: str, argument: str, end: str, close: str) -> Callable[[list[Call]], str]:
    """Return the writer of a form with elements."""

    def write(calls: list[Call]) -> str:
        written = (
            call.format(name) + "".join(argument.format(key, _text(value)) for key, value in given.items()) + end
            for name, given in calls
        )
        return f"{section}{''.join(written)}{close}"

    return write


def _each(write: Callable[[list[Call]], str]) -> Callable[[list[Call]], str]:
    """Return the writer of a form with a marker for each call."""
    return lambda calls: "\n".join(write([call]) for call in calls)


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    return _json(value)


def _invoke(prefix: str, section: str) -> Callable[[list[Call]], str]:
    return _elements(
        f"<{section}>\n",
        f'<{prefix}invoke name="{{}}">\n',
        f'<{prefix}parameter name="{{}}">{{}}</{prefix}parameter>\n',
        f"</{prefix}invoke>\n",
        f"</{section}>",
    )


def _dsml(calls: list[Call]) -> str:
    written = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="{_json(isinstance(value, str))}">{_text(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in given.items()
        )
        + "</｜DSML｜invoke>\n"
        for name, given in calls
    )
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def _cohere(calls: list[Call]) -> str:
    listed = [
        {"tool_call_id": str(at), "tool_name": name, "parameters": given} for at, (name, given) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{_json(listed)}<|END_ACTION|>"


def _section(begin: str, call: Callable[[int, str, str], str], end: str, joint: str = "") -> Callable[..., str]:
    def write(calls: list[Call]) -> str:
        return begin + joint.join(call(at, name, _json(given)) for at, (name, given) in enumerate(calls)) + end

    return write


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "function_elements": _each(
        _elements(
            "<tool_call>\n",
            "<function={}>\n",
            "<parameter={}>\n{}\n</parameter>\n",
            "</function>\n",
            "</tool_call>",
        )
    ),
    "key_value_elements": _each(
        _elements(
            "<tool_call>",
            "{}\n",
            "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
            "",
            "</tool_call>",
        )
    ),
    "minimax": _invoke("", "minimax:tool_call"),
    "dsml": _dsml,
    "atem": _invoke("atem:", "atem:function_calls"),
    "gemma": _each(lambda calls: f"<|tool_call>call:{calls[0][0]}{_gemma(calls[0][1])}<tool_call|>"),
    "marked_pythonic": lambda calls: f"<|tool_call_start|>{write_pythonic(calls)}<|tool_call_end|>",
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls),
    "deepseek": _section(
        _DEEPSEEK[0],
        lambda _, name, given: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{given}\n```<｜tool▁call▁end｜>"
        ),
        _DEEPSEEK[1],
        "\n",
    ),
    "deepseek_3_1": _section(
        _DEEPSEEK[0],
        lambda _, name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>",
        _DEEPSEEK[1],
    ),
    "kimi": _section(
        "<|tool_calls_section_begin|>",
        lambda at, name, given: (
            f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{given}<|tool_call_end|>"
        ),
        "<|tool_calls_section_end|>",
    ),
    "granite": lambda calls: f"<|tool_call|>{_listed(calls)}",
    "tagged_list": lambda calls: f"<tool_calls>{_listed(calls)}</tool_calls>",
    "cohere": _cohere,
    "json_text": lambda calls: "; ".join(_json({"name": name, "parameters": given}) for name, given in calls),
}
"""Writer of each form; `tool_call_texts.tagged` is that of the form `tagged_json`."""


def form_texts(form: str, rounds: int = ROUNDS) -> Iterator[Text]:
    """Yield 12 texts for each list of calls."""
    rng = random.Random(SEED)
    write = WRITERS[form]
    mark = write([("f", {})]).partition("f")[0]

    def text(kind: str, written: str, calls: list[Call] | None = None) -> Text:
        return Text(form, kind, written, None if calls is None else tuple(calls))

    for _ in range(rounds):
        calls = typed_calls(rng)
        written = write(calls)
        yield text("calls", written, calls)
        yield text("a name that no tool has", write(typed_calls(rng, name="unknown")))
        yield text("calls and calls", f"{written}\n{write(more := typed_calls(rng))}", calls + more)
        yield text("text before", f"I look it up.\n{written}", calls if FORMS[form].with_text else None)
        yield text("text after", f"{written}\nOne moment.", calls if FORMS[form].with_text else None)
        yield text("text of a call", f"It begins with {mark} and goes on{written[len(mark) :][:9]}")
        yield from damaged(rng, form, written)
        yield text("space", written.replace("\n", "").replace("><", "> \n <"))
    if form == "marked_pythonic":
        for body in PYTHONIC:
            yield text("unusual", f"<|tool_call_start|>{body}<|tool_call_end|>")
    if form == "mistral":
        for _ in range(rounds):
            calls = typed_calls(rng)
            yield text("a list", f"[TOOL_CALLS]{_listed(calls)}", calls)
    for written in ("", "Your order is on its way.", "It is [shipped].", '{"answer": 3}'):
        yield text("no call", written, None if form == "json_text" else [])
