"""Grammars of response forms in the model's own format, and masks of the tokens that they allow.

The masks are llguidance's (https://github.com/guidance-ai/llguidance): after each token, those that can continue a text
of the grammar, and the end of the turn where the text is complete. A call has the format that `ChatFormat` parses,
with arguments of the tool's schema. Schemas with keywords that llguidance cannot enforce are rejected, so responses
that end validate, except for numbers at an exclusive bound, which llguidance 1.9 may write.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, TypeVar

from components.errors import EngineBusy, EngineError, Problem, SpecError
from components.inference.grammar_compiler import Matcher, TrialAbandoned, Vocabulary, compile_in_child, new_matcher
from components.inference.grammar_text import (
    compact,
    json_text,
    pythonic_call,
    pythonic_or_json,
    pythonic_or_text,
    tagged_call,
    tagged_or_json,
    tagged_or_text,
)
from components.inference.json_schemas import (
    MAX_CHARACTERS,
    MAX_NESTING,
    exceeded_limit,
    special_literal,
    with_finite_numbers,
)
from components.inference.protocol import ResponseForm, parameter_of
from components.inference.token_texts import token_bytes
from components.specs.wording import shortened
from components.trajectories.call_forms import FORMS
from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

NEEDED = "needs the package llguidance on the server: pip install -e '.[structured]'"
MOST_COMPILED = 64
"""Maximum number of grammars that stay compiled."""
MOST_MEMORY = 64 << 20
"""Maximum memory of grammars that stay compiled, in bytes; the latest stays in any case."""
COMPILATIONS = 2
"""Maximum number of concurrent compilations."""
PATIENCE = 25.0
"""Time limit of a compilation in seconds, with the wait for those of other requests, without the first preparation of
the vocabulary."""


@dataclass(frozen=True)
class _Compiled:
    """A compiled grammar: its text, llguidance's matcher before the first token, and its memory in bytes."""

    text: str
    matcher: Any
    memory: int


@dataclass
class _Compilation:
    """A compilation in progress, and the number of requests that wait for it."""

    task: asyncio.Task[_Compiled]
    waiting: int = 0


def require_answer(chat: ChatFormat, form: ResponseForm) -> None:
    """Raise SpecError for a form of the response to a prompt that begins its reasoning. chat: for the prompt
    (`ResponseReader.after`)."""
    if chat.reasoning and chat.reasoning.opened:
        text = "the prompt begins the reasoning of this model, and a form cannot be enforced there; leave it out"
        raise SpecError([Problem(parameter_of(form), text)])


class Grammars:
    """Compiler of forms for one model. chat: its format. vocabulary: number of its logits. stop_ids: tokens that end a
    response.

    A new grammar is compiled in threads of its own, after a trial in a child process (`grammar_compiler`), so that
    neither the event loop nor the engine waits for it. Requests with the same new form share its compilation, which
    ends when all of them are cancelled.
    """

    def __init__(self, chat: ChatFormat, vocabulary: int, stop_ids: frozenset[int]):
        self._chat = chat
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._lock = threading.Lock()
        self._preparation = threading.Lock()
        """Lock of `_tokenizer`, whose preparation takes seconds for a large vocabulary."""
        self._tokenizer: tuple[Vocabulary, Any] | None = None
        """The vocabulary and llguidance's tokenizer, built on first use."""
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._compilations: dict[str, _Compilation] = {}
        self._workers = ThreadPoolExecutor(COMPILATIONS, thread_name_prefix="grammar")

    async def matcher(self, form: ResponseForm, tools: Sequence[dict[str, Any]], *, compacted: bool = False) -> Matcher:
        """Return the matcher of a response. compacted: its JSON has one form of whitespace (`compact`).

        Raises SpecError for a form that cannot be enforced, or without llguidance; EngineBusy if other forms are
        compiled for too long.
        """
        parameter = parameter_of(form)
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise SpecError([Problem(parameter, NEEDED)]) from None
        if tools and self._chat.call_form not in (None, FORMS["tagged_json"]):
            text = "the grammar of this model's form of tool calls is not known; leave it out"
            raise SpecError([Problem(parameter, text)])
        if self._chat.channel or self._chat.harmony:
            text = "this model writes its answer in a channel, and a form cannot be enforced there; leave it out"
            raise SpecError([Problem(parameter, text)])
        try:
            key = json.dumps([*astuple(form), self._chat.native_tools, tools, compacted])
        except RecursionError:
            raise SpecError([Problem("tools", f"a schema is nested deeper than {MAX_NESTING} levels")]) from None

        def text_of_form() -> str:
            text = self.text(form, tools)
            return compact(text) if compacted else text

        return await self.compiled(text_of_form, key, parameter)

    async def compiled(self, text: Callable[[], str], key: str, parameter: str) -> Matcher:
        """Return the matcher of a Lark grammar. text: returns the grammar. key: identifies it. parameter: name of the
        request's parameter, for errors. Raises as `matcher`."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        with self._lock:
            compiled = self._compiled.get(digest)
            if compiled is not None:
                self._compiled.move_to_end(digest)
        if compiled is None:
            compiled = await self._compilation(digest, text, parameter)
        return Matcher(compiled.matcher.deep_copy(), compiled.text, self._vocabulary, self._special(), self._stop_ids)

    async def _compilation(self, key: str, text: Callable[[], str], parameter: str) -> _Compiled:
        """Return the result of the compilation in progress, or of a new one."""
        compilation = self._compilations.get(key)
        if compilation is None or compilation.task.get_loop() is not asyncio.get_running_loop():
            compilation = _Compilation(asyncio.create_task(self._compile(key, text, parameter)))
            self._compilations[key] = compilation
        compilation.waiting += 1
        try:
            return await asyncio.shield(compilation.task)
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                compilation.task.cancel()
                if self._compilations.get(key) is compilation:
                    del self._compilations[key]

    async def _compile(self, key: str, text: Callable[[], str], parameter: str) -> _Compiled:
        """Compile a grammar in a thread, and cache it."""
        abandoned = threading.Event()
        prepare = partial(self._llguidance_tokenizer, parameter)
        work = partial(self._compiled_after_trial, text, parameter, abandoned)
        loop = asyncio.get_running_loop()
        try:
            if self._tokenizer is None:
                await loop.run_in_executor(self._workers, _with_engine_errors, prepare)
            async with asyncio.timeout(PATIENCE):
                compiled = await loop.run_in_executor(self._workers, _with_engine_errors, work)
        except TimeoutError:
            raise EngineBusy(
                f"{parameter}: the machine is too busy to compile this schema, after those of other requests, within "
                f"{PATIENCE:g} s; try again later"
            ) from None
        finally:
            abandoned.set()
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > MOST_COMPILED or (
                len(self._compiled) > 1 and sum(entry.memory for entry in self._compiled.values()) > MOST_MEMORY
            ):
                self._compiled.popitem(last=False)
        return compiled

    def _compiled_after_trial(self, text: Callable[[], str], parameter: str, abandoned: threading.Event) -> _Compiled:
        grammar = text()
        vocabulary, tokenizer = self._llguidance_tokenizer(parameter)
        try:
            memory = compile_in_child(vocabulary, grammar, abandoned)
            matcher = new_matcher(tokenizer, grammar)
            Matcher(matcher.deep_copy(), grammar, self._vocabulary, self._special(), self._stop_ids).allowed()
        except ValueError as error:
            raise SpecError([Problem(parameter, f"the schema cannot be enforced: {error}")]) from None
        return _Compiled(grammar, matcher, memory)

    def _special(self) -> list[int]:
        return [*self._chat.tokenizer.all_special_ids, *self._stop_ids]

    def _llguidance_tokenizer(self, parameter: str) -> tuple[Vocabulary, Any]:
        with self._preparation:
            if self._tokenizer is None:
                try:
                    known, special = token_bytes(self._chat.tokenizer, self._vocabulary)
                    stops = sorted(token for token in self._stop_ids if token < self._vocabulary)
                    vocabulary = Vocabulary(known, special, stops, self._vocabulary)
                    self._tokenizer = vocabulary, vocabulary.tokenizer(self._encode)
                except ValueError as error:
                    text = f"llguidance does not support this model's tokenizer: {error}"
                    raise SpecError([Problem(parameter, text)]) from None
            return self._tokenizer

    def _encode(self, text: str) -> list[int]:
        return list(self._chat.tokenizer(text, add_special_tokens=False).input_ids)

    def text(self, form: ResponseForm, tools: Sequence[dict[str, Any]]) -> str:
        """Return the Lark grammar of a form, whose first rule is `start`. Raises SpecError as `matcher`, for tools, and
        for literals with special tokens."""
        self._refuse_schemas(form, tools)
        functions = [tool["function"] for tool in tools]
        tagged = self._chat.native_tools
        if form.calls:
            named = [function for function in functions if function["name"] in form.calls]
            return tagged_call(named) if tagged else pythonic_call(named)
        if form.json_schema is None:
            either = tagged_or_text if tagged else pythonic_or_text
            return either(functions, form.single)
        content = json_text(with_finite_numbers(form.schema))
        if not form.strict:
            return f"start: {content}"
        either_json = tagged_or_json if tagged else pythonic_or_json
        return either_json(functions, form.single, content)

    def _refuse_schemas(self, form: ResponseForm, tools: Sequence[dict[str, Any]]) -> None:
        """Raise SpecError for schemas that are too large or costly, or that have special tokens."""
        tokenizer = self._chat.tokenizer
        special = [*tokenizer.all_special_tokens, *tokenizer.convert_ids_to_tokens(sorted(self._stop_ids))]
        schemas = [("tools", tool["function"].get("parameters")) for tool in tools]
        if form.json_schema is not None:
            schemas.append((parameter_of(form), form.schema))
        if (size := len(json.dumps([schema for _, schema in schemas]))) > MAX_CHARACTERS:
            text = f"the schemas of the request have {size} characters; expected {MAX_CHARACTERS} at most"
            raise SpecError([Problem(schemas[-1][0], text)])
        for key, schema in schemas:
            if (reason := exceeded_limit(schema)) is not None:
                raise SpecError([Problem(key, f"the schema {reason}")])
            if (literal := special_literal(schema, special)) is not None:
                text = f"the schema has {shortened(literal)}, which contains a special token of the model"
                raise SpecError([Problem(key, f"{text}; expected none, as no response contains one")])


def _with_engine_errors(work: Callable[[], _T]) -> _T:
    """Return the result of work in a thread. Raises its SpecError, EngineBusy or TrialAbandoned, and EngineError for an
    unexpected error."""
    try:
        return work()
    except (SpecError, EngineBusy, TrialAbandoned):
        raise
    except Exception as error:
        logger.exception("a grammar cannot be compiled")
        raise EngineError(f"{type(error).__name__}: {error}") from None
