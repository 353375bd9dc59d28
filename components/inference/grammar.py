"""Grammars of response forms in the model's own format, and masks of the tokens that they allow.

The masks are llguidance's (https://github.com/guidance-ai/llguidance): after each token, those that can continue a text
of the grammar, and the end of the turn where the text is complete. A call has the format that `ChatFormat` parses,
with arguments of the tool's schema. Schemas with keywords that llguidance cannot enforce are rejected, so responses
that end validate, except for numbers at an exclusive bound, which llguidance 1.9 may write.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from components.errors import Problem, SpecError
from components.inference.finite_numbers import with_finite_numbers
from components.inference.response_form import ResponseForm
from components.inference.special_literals import special_literal
from components.inference.token_bytes import TokenBytes
from components.specs.wording import shortened
from components.trajectories.chat import ChatFormat
from components.trajectories.tool_calls import WORD

NEEDED = "needs the package llguidance on the server: pip install -e '.[structured]'"
MOST_COMPILED = 64
"""Maximum number of grammars that stay compiled."""
WHITESPACE = r"[\x20\x0A]{1,16}"
"""Whitespace between the parts of a JSON text: limited, so that no response consists of it."""
_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", **_OPTIONS}
del _COMPACT["whitespace_pattern"]
_MORE = '(", " call)*'
"""Further calls of a list."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without `parameters`."""
_PLAIN = {
    "$comment", "$defs", "$id", "$schema", "additionalProperties", "default", "definitions", "description", "examples",
    "properties", "required", "title", "type",
}  # fmt: skip
"""Keywords of a parameters' schema that can be written as the keyword arguments of a pythonic call."""


class Grammars:
    """Compiler of forms for one model. chat: its format. vocabulary: number of its logits. stop_ids: tokens that end a
    response."""

    def __init__(self, chat: ChatFormat, vocabulary: int, stop_ids: frozenset[int]):
        self._chat = chat
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._tokenizer: Any = None
        """llguidance's tokenizer, built on first use."""
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        """Matchers before the first token, by grammar."""

    def matcher(self, form: ResponseForm, tools: Sequence[dict[str, Any]]) -> Matcher:
        """Return the matcher of a response. Raises SpecError for a form that cannot be enforced, or without
        llguidance."""
        key = parameter_of(form)
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise SpecError([Problem(key, NEEDED)]) from None
        if self._chat.channel:
            text = "this model writes its answer in a channel, and a form cannot be enforced there; leave it out"
            raise SpecError([Problem(key, text)])
        return self.compiled(self.text(form, tools), key)

    def compiled(self, text: str, key: str) -> Matcher:
        """Return the matcher of a Lark grammar. key: parameter of the request, for errors. Raises SpecError for a
        grammar that cannot be enforced."""
        import llguidance

        if self._tokenizer is None:
            try:
                wrapped = llguidance.TokenizerWrapper(TokenBytes(self._chat.tokenizer, self._vocabulary))
                stops = sorted(token for token in self._stop_ids if token < self._vocabulary)
                self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=self._vocabulary, eos_token=stops)
            except ValueError as error:
                raise SpecError(
                    [Problem(key, f"llguidance does not support this model's tokenizer: {error}")]
                ) from None
        compiler = llguidance.LLMatcher
        grammar = compiler.grammar_from_lark(text)
        special = [*self._chat.tokenizer.all_special_ids, *self._stop_ids]
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = compiler(self._tokenizer, grammar, log_level=0)
            try:
                Matcher(compiled.deep_copy(), self._vocabulary, special, self._stop_ids).allowed()
            except ValueError as error:
                text = str(error).rpartition("failed to compile JSON schema: ")[2]
                raise SpecError([Problem(key, f"the schema cannot be enforced: {text}")]) from None
            if len(self._compiled) >= MOST_COMPILED:
                self._compiled.popitem(last=False)
            self._compiled[grammar] = compiled
        return Matcher(compiled.deep_copy(), self._vocabulary, special, self._stop_ids)

    def text(self, form: ResponseForm, tools: Sequence[dict[str, Any]]) -> str:
        """Return the Lark grammar of a form, whose first rule is `start`. Raises SpecError as `matcher`, for tools, and
        for literals with special tokens."""
        self._refuse_special_literals(form, tools)
        functions = [tool["function"] for tool in tools]
        tagged = self._chat.native_tools
        if form.calls:
            named = [function for function in functions if function["name"] in form.calls]
            return tagged_call(named) if tagged else pythonic_call(named)
        if form.json_schema is None:
            either = tagged_or_text if tagged else pythonic_or_text
            return either(functions, form.single)
        content = _json(with_finite_numbers(form.schema))
        if not form.strict:
            return f"start: {content}"
        either_json = tagged_or_json if tagged else pythonic_or_json
        return either_json(functions, form.single, content)

    def _refuse_special_literals(self, form: ResponseForm, tools: Sequence[dict[str, Any]]) -> None:
        tokenizer = self._chat.tokenizer
        special = [*tokenizer.all_special_tokens, *tokenizer.convert_ids_to_tokens(sorted(self._stop_ids))]
        schemas = [("tools", tool["function"].get("parameters")) for tool in tools]
        if form.json_schema is not None:
            schemas.append((parameter_of(form), form.schema))
        for key, schema in schemas:
            if (literal := special_literal(schema, special)) is not None:
                text = f"the schema has {shortened(literal)}, which contains a special token of the model"
                raise SpecError([Problem(key, f"{text}; expected none, as no response contains one")])


class Matcher:
    """Allowed tokens of one response as it grows."""

    def __init__(self, matcher: Any, vocabulary: int, special: Sequence[int], stop_ids: Collection[int]):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._special = sorted({token for token in special if token < vocabulary})
        self._stops = sorted(token for token in stop_ids if token < vocabulary)

    def allowed(self) -> Any:
        """Return a (V,) mask, True for tokens that may come next. Raises ValueError if the grammar is too complex."""
        import numpy as np

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(str(self._matcher.get_error()).partition("\n")[0][:300])
        allowed_V = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)
        allowed_V[self._special] = False  # never as text
        allowed_V[self._stops] = self._matcher.is_accepting()
        if not allowed_V.any():
            raise ValueError("no token of the model continues the response")
        return allowed_V

    def append(self, token: int) -> None:
        """Append a sampled token, which is an allowed one."""
        self._matcher.consume_token(token)

    def accepts(self, tokens: list[int], *, ended: bool) -> bool:
        """Append tokens, and return True if all of them are allowed. ended: the response must be complete after
        them."""
        if not set(tokens).isdisjoint([*self._special, *self._stops]):
            return False
        return self._matcher.try_consume_tokens(tokens) == len(tokens) and (not ended or self._matcher.is_accepting())


def parameter_of(form: ResponseForm) -> str:
    """Return the name of the request's parameter that demands a form."""
    return "response_format" if form.json_schema is not None else "tools" if form.strict else "tool_choice"


def compact(grammar: str) -> str:
    """Return a grammar whose JSON texts have one form of whitespace, `{"a": 1, "b": [2, 3]}`, for servers: llguidance
    1.7 does not limit the length of whitespace as later versions do."""
    return grammar.replace(json.dumps(_OPTIONS)[1:-1], json.dumps(_COMPACT)[1:-1])


def with_end(grammar: str, stop_ids: Collection[int]) -> str:
    """Return the Lark grammar of the same texts, each followed by one of the stop tokens.

    For servers whose llguidance knows only the tokenizer's own end-of-sequence token, which is not always one that ends
    a response. `::=` is escaped, because grammars with it are read as GBNF."""
    ids = ",".join(map(str, sorted(stop_ids)))
    return f"start: response end\nend: <[{ids}]>\nresponse{grammar.removeprefix('start')}".replace("::=", r"\u003a:=")


def tagged_call(functions: Sequence[dict[str, Any]]) -> str:
    """Return the Lark grammar of one call `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return "\n".join(['start: "<tool_call>" call', *_tagged_rules(functions)])


def tagged_or_text(functions: Sequence[dict[str, Any]], single: bool) -> str:
    """Return the Lark grammar of a text that contains calls, or none. single: one call at most."""
    start = [f"start: (head call){'?' if single else '*'} TEXT", 'head[lazy]: ANY "<tool_call>"', r"ANY: /(?s:.*)/"]
    return "\n".join([*start, r"TEXT: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/", *_tagged_rules(functions)])


def tagged_or_json(functions: Sequence[dict[str, Any]], single: bool, content: str) -> str:
    """Return the Lark grammar of a JSON text or of calls. single: one call at most. content: grammar of the JSON."""
    calls = '"<tool_call>" call' + ("" if single else ' ("\\n<tool_call>" call)*')
    return "\n".join([f"start: {content} | {calls}", *_tagged_rules(functions)])


def _tagged_rules(functions: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rules of `call`, a call after its opening tag."""
    rules = [f"call: {_either('call', functions)}"]
    for place, function in enumerate(functions):
        parameters = with_finite_numbers(function.get("parameters") or NO_PARAMETERS)
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        body = {
            **definitions,
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {**parameters, "type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        rules.append(f'call{place}: "\\n" {_json(body)} "\\n</tool_call>"')
    return rules


def pythonic_call(functions: Sequence[dict[str, Any]]) -> str:
    """Return the Lark grammar of one call `[name(key=value, ...)]`, with the arguments in the order of the schema.
    Raises SpecError for a schema that is no plain object."""
    return "\n".join(['start: "[" call "]"', *_pythonic_rules(functions)])


def pythonic_or_text(functions: Sequence[dict[str, Any]], single: bool) -> str:
    """Return the Lark grammar of a text, or of a list of calls that a text may precede. single: one call at most.
    Raises as `pythonic_call`."""
    heads = [
        f"head{place}[lazy]: BEFORE {_literal('[' + function['name'] + '(')}"
        for place, function in enumerate(functions)
    ]
    first = " | ".join(f'head{place} arguments{place} ")"' for place in range(len(functions)))
    return "\n".join(
        [
            f'start: TEXT | first {_MORE * (not single)} "]"',
            f"first: {first}",
            *heads,
            r"BEFORE: /(?s:(.*\n)?)/",
            r"TEXT: /(?s:.*)/ & ~/(?s:(.*\n)?\s*\[\s*[\w.\-]+\s*\(.*)/",
            *_pythonic_rules(functions),
        ]
    )


def pythonic_or_json(functions: Sequence[dict[str, Any]], single: bool, content: str) -> str:
    """Return the Lark grammar of a JSON text or a list of calls. single: one call at most. content: grammar of the
    JSON. Raises as `pythonic_call`."""
    return "\n".join([f'start: {content} | "[" call {_MORE * (not single)} "]"', *_pythonic_rules(functions)])


def _pythonic_rules(functions: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rules of `call`, a call of a list, and of `argumentsK`, the arguments of function K."""
    rules = [f"call: {_either('call', functions)}"]
    for place, function in enumerate(functions):
        parameters = with_finite_numbers(function.get("parameters") or NO_PARAMETERS)
        if more := sorted(parameters.keys() - _PLAIN):
            text = (
                f"the arguments of {function['name']!r} are constrained by {', '.join(more)}, which cannot be enforced "
                "in this model's call format [name(key=value)]; use properties and required"
            )
            raise SpecError([Problem("tools", text)])
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        arguments = [
            (f"argument{place}_{number}", key, schema)
            for number, (key, schema) in enumerate((parameters.get("properties") or {}).items())
        ]
        required = parameters.get("required") or []
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise SpecError([Problem("tools", f"{function['name']!r}: `required` must be a list of names")])
        if unknown := sorted(set(required) - {key for _, key, _ in arguments}):
            text = f"{function['name']!r} requires {', '.join(unknown)}, which its properties do not list"
            raise SpecError([Problem("tools", text)])
        for rule, key, schema in arguments:
            value = _json({**definitions, **schema} if isinstance(schema, dict) else schema)
            start, end = (f"{key}=", "") if WORD.fullmatch(key) else (f"**{{{json.dumps(key)}: ", "}")
            rules.append(f"{rule}: {_literal(start)} {value} {_literal(end) if end else ''}")
        rules += _sequence(f"arguments{place}", [(rule, key in required) for rule, key, _ in arguments])
        rules.append(f"call{place}: {_literal(function['name'] + '(')} arguments{place} {_literal(')')}")
    return rules


def _either(rule: str, functions: Sequence[dict[str, Any]]) -> str:
    return " | ".join(f"{rule}{place}" for place in range(len(functions)))


def _sequence(name: str, items: list[tuple[str, bool]]) -> list[str]:
    """Return rules for a comma-separated sequence: each item in order, the required ones always. `name` begins one,
    `name_rK` and `name_fK` continue it before item K: after an item, and as the first one."""
    rules = [f'{name}_r{len(items)}: ""', f'{name}_f{len(items)}: ""', f"{name}: {name}_f0"]
    for place, (item, required) in enumerate(items):
        for kind, comma in (("r", '", " '), ("f", "")):
            taken = f"{comma}{item} {name}_r{place + 1}"
            rules.append(f"{name}_{kind}{place}: {taken}" + ("" if required else f" | {name}_{kind}{place + 1}"))
    return rules


def _json(schema: Any) -> str:
    options = {"x-guidance": _OPTIONS}
    return f"%json {json.dumps({**options, **schema, **options} if isinstance(schema, dict) else schema)}"


def _literal(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
