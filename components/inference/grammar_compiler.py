"""Compilation of a grammar by llguidance, and the trial of it in a child process with limits of time and memory.

llguidance bounds the work of a mask, but not that of every compilation: `{"multipleOf": 123456789}` alone takes minutes
and 17 GB. A matcher cannot leave its process, so each new grammar is first compiled in a child of its own; what
stays within the limits there costs the same here. The child is killed at a limit, or when nobody waits for it any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.errors import EngineBusy
from components.json_process import (
    JsonProcess,
    JsonProgram,
    ProcessExited,
    RequestFailed,
    safe_environment,
    wait_for,
)
from components.json_worker import set_limit

CPU_SECONDS = 4
"""CPU time limit of a trial in seconds. Usual schemas take less than 0.1 s, and reading a large vocabulary 0.4 s."""
SECONDS = 20.0
"""Wall-clock limit of a trial in seconds. On a machine with six processes a CPU, a large vocabulary takes 11 s."""
MEMORY = 64 << 20
"""Maximum memory of a compiled grammar in bytes. An object of 2,000 properties takes 22 MB."""
MOST_LEXER_STATES = 50_000
"""Maximum number of states that the patterns of a grammar reach in one response."""
TRIAL_TOKENS = 4
"""Number of tokens that a trial appends, because an object's properties are read after its first token."""


class TooCostly(ValueError):
    """Grammar that exceeds a limit of its trial."""


class TrialAbandoned(Exception):
    """End of a trial for which nobody waits."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, as llguidance reads them."""

    tokens: Sequence[bytes]
    special: Sequence[int]
    """Tokens that are no text."""
    stops: Sequence[int]
    """Tokens that end a response."""
    size: int
    """Number of logits."""

    def tokenizer(self, encode: Callable[[str], list[int]]) -> Any:
        """Return llguidance's tokenizer. encode: returns the tokens of a text. Raises ValueError if llguidance does not
        support it."""
        import llguidance

        wrapped = llguidance.TokenizerWrapper(_Tokens(self, encode))
        return llguidance.LLTokenizer(wrapped, n_vocab=self.size, eos_token=list(self.stops))

    def as_json(self) -> dict[str, Any]:
        """Return the arguments of `_vocabulary`."""
        return {
            "tokens": b",".join(token.hex().encode() for token in self.tokens).decode(),
            "special": list(self.special),
            "stops": list(self.stops),
            "size": self.size,
        }


class _Tokens:
    """Attributes that llguidance reads from a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]):
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.stops[0]
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("expected a text")
        return self._encode(text)


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """Return llguidance's matcher of a Lark grammar, which may be in its state of error."""
    import llguidance
    from llguidance._lib import LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES)
    return llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)


def error_of(matcher: Any) -> str:
    """Return the reason why a matcher cannot continue, in a line; empty if it can."""
    if not matcher.is_error():
        return ""
    text = str(matcher.get_error())
    if "Current row has" in text:
        return "it has too many alternatives at one place: expected at most some 400 optional properties or variants"
    return text.rpartition("failed to compile JSON schema: ")[2].partition("\n")[0][:300]


def compile_in_child(vocabulary: Vocabulary, grammar: str, abandoned: threading.Event) -> int:
    """Compile a grammar in a child process. Return its memory in bytes.

    Raises TooCostly at a limit of processor time or memory, EngineBusy at that of the clock, ValueError for a grammar
    that cannot be enforced, TrialAbandoned once the event is set, and OSError if the process does not start.
    """
    arguments = {"vocabulary": vocabulary.as_json(), "grammar": grammar, "most_memory": MEMORY}
    limits = {"RLIMIT_CPU": CPU_SECONDS, "RLIMIT_CORE": 0}
    process = JsonProcess(JsonProgram(f"{__name__}:_trial", variables=safe_environment(), limits=limits))
    deadline = time.monotonic() + SECONDS

    def expired() -> str:
        return "abandoned" if abandoned.is_set() else "late" if time.monotonic() >= deadline else ""

    try:
        outcome = wait_for(process.request(arguments), expired)
    except (TimeoutError, ProcessExited, RequestFailed) as error:
        if abandoned.is_set():
            raise TrialAbandoned from None
        if isinstance(error, TimeoutError):  # the limit of processor time comes first, unless others use the processors
            text = f"the machine is too busy: a schema was not compiled within {SECONDS:g} s; try again later"
            raise EngineBusy(text) from None
        if isinstance(error, RequestFailed) and error.kind != "MemoryError":
            raise ValueError(str(error)) from None
        if isinstance(error, ProcessExited) and error.code >= 0:
            raise OSError(f"the process that compiles grammars ended: {error}") from None
        text = f"its grammar takes more than {CPU_SECONDS} s or {MEMORY >> 20} MB to compile; send a simpler one"
        raise TooCostly(text) from None
    finally:
        process.kill()
    if outcome["error"]:
        raise ValueError(outcome["error"])
    return int(outcome["memory"])


def _trial(vocabulary: Mapping[str, Any], grammar: str, most_memory: int) -> dict[str, Any]:
    """Compile a grammar and append its first tokens, in a child. Return the error, and the memory in bytes."""
    import psutil

    tokens = [bytes.fromhex(token) for token in vocabulary["tokens"].split(",")]
    read = Vocabulary(tokens, vocabulary["special"], vocabulary["stops"], vocabulary["size"])
    tokenizer = read.tokenizer(lambda text: tokenizer.greedy_tokenize(text))  # for texts that a grammar forces
    process = psutil.Process(os.getpid())
    before = process.memory_info()
    set_limit("RLIMIT_AS", before.vms + most_memory)
    matcher = new_matcher(tokenizer, grammar)
    for _ in range(TRIAL_TOKENS):
        if error_of(matcher) or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for token in (*vocabulary["special"], *vocabulary["stops"]):
            mask &= ~(1 << token)
        if not mask:
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return {"error": error_of(matcher), "memory": max(process.memory_info().rss - before.rss, 0)}


class Matcher:
    """Allowed tokens of one response as it grows. grammar: its Lark grammar."""

    def __init__(self, matcher: Any, grammar: str, vocabulary: int, special: Sequence[int], stop_ids: Collection[int]):
        self._matcher = matcher
        self.grammar = grammar
        self._vocabulary = vocabulary
        self._special = sorted({token for token in special if token < vocabulary})
        self._stops = sorted(token for token in stop_ids if token < vocabulary)

    def allowed(self) -> Any:
        """Return a (V,) mask, True for tokens that may come next. Raises ValueError if the grammar is too complex."""
        import numpy as np

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if reason := error_of(self._matcher):
            raise ValueError(reason)
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
