"""Adversarial texts for regular expressions, derived from their syntax trees.

A backtracking engine is slow where a repetition can be entered or left in many ways. For each repetition of a pattern
this gives texts of the form `prefix + pump * k + suffix`: what stands before the repetition, what it repeats, and an
end with which the match fails.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

SUFFIXES = ("", "\x01", "\n\x01")
_CATEGORIES = {
    sre.CATEGORY_DIGIT: "0",
    sre.CATEGORY_NOT_DIGIT: "x",
    sre.CATEGORY_SPACE: " ",
    sre.CATEGORY_NOT_SPACE: "x",
    sre.CATEGORY_WORD: "x",
    sre.CATEGORY_NOT_WORD: "!",
}
_ANY = "".join(map(chr, range(32, 127))) + "\n\t\x01\x1b\u0660é\ud83d"


@functools.cache
def pumps(pattern: str, flags: int = 0) -> list[tuple[str, str]]:
    """Return (prefix, pump) of each repetition, and of parts of the pattern in which a search can begin again."""
    tree = _parser.parse(pattern, flags)
    found: dict[tuple[str, str], None] = {}
    _walk(list(tree), "", found)
    for char in sorted(set(_characters(list(tree)))):
        found["", char] = None
    whole = _sample(list(tree))
    for cut in range(1, min(len(whole), 24) + 1):
        found["", whole[:cut]] = None
        found["\n", whole[:cut] + "\n"] = None
    return [(prefix, pump) for prefix, pump in found if pump]


def texts(pattern: str, size: int, flags: int = 0) -> Iterator[str]:
    """Yield adversarial texts of about `size` characters."""
    for prefix, pump in pumps(pattern, flags):
        for suffix in SUFFIXES:
            yield prefix + pump * (size // len(pump)) + suffix


def _walk(items: list[Any], before: str, found: dict[tuple[str, str], None]) -> str:
    """Collect the repetitions in a sequence; return `before` and a text that the sequence matches."""
    for op, value in items:
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            _, most, body = value
            for sample in _samples(list(body)):
                if most > 20:
                    found[before, sample] = None
                    found["", before + sample] = None
                    found["", sample] = None
            _walk(list(body), before, found)
        elif op is sre.SUBPATTERN:
            _walk(list(value[-1]), before, found)
        elif op is sre.BRANCH:
            for branch in value[1]:
                _walk(list(branch), before, found)
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            _walk(list(value[1]), before, found)
        elif op is sre.ATOMIC_GROUP:
            _walk(list(value), before, found)
        before += _sample([(op, value)])
    return before


def _samples(items: list[Any]) -> list[str]:
    """Some texts that a sequence matches: one for each character of a class that stands alone."""
    if len(items) == 1 and items[0][0] in (sre.IN, sre.ANY, sre.NOT_LITERAL):
        chars = [one for one in _ANY if _fits(items[0], one)]
        picked = [one for one in " \n\t0x-.,!<{[(`\\\x1b" if one in chars]
        return list(dict.fromkeys([*chars[:2], *picked]))
    return [_sample(items)]


def _sample(items: list[Any]) -> str:
    """A text that a sequence matches, as far as this is easy to say."""
    said = ""
    for op, value in items:
        if op is sre.LITERAL:
            said += chr(value)
        elif op in (sre.IN, sre.ANY, sre.NOT_LITERAL):
            said += next((one for one in "x0 !-\n" + _ANY if _fits((op, value), one)), "")
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            least, most, body = value
            said += _sample(list(body)) * (least or min(most, 1))
        elif op is sre.SUBPATTERN:
            said += _sample(list(value[-1]))
        elif op is sre.ATOMIC_GROUP:
            said += _sample(list(value))
        elif op is sre.BRANCH:
            said += _sample(list(value[1][0]))
    return said


def _fits(item: Any, char: str) -> bool:
    op, value = item
    if op is sre.ANY:
        return True
    if op is sre.NOT_LITERAL:
        return ord(char) != value
    negated, fits = False, False
    for kind, what in value:
        if kind is sre.NEGATE:
            negated = True
        elif kind is sre.LITERAL:
            fits |= ord(char) == what
        elif kind is sre.RANGE:
            fits |= what[0] <= ord(char) <= what[1]
        elif kind is sre.CATEGORY:
            classes = {sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_SPACE: r"\s", sre.CATEGORY_WORD: r"\w"}
            classes |= {sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_NOT_WORD: r"\W"}
            fits |= re.match(classes[what], char) is not None
    return fits != negated


def _characters(items: list[Any]) -> Iterator[str]:
    """Characters and classes of a pattern, one character for each."""
    for op, value in items:
        if op is sre.LITERAL:
            yield chr(value)
        elif op in (sre.IN, sre.ANY, sre.NOT_LITERAL):
            yield from _samples([(op, value)])
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            yield from _characters(list(value[2]))
        elif op is sre.SUBPATTERN:
            yield from _characters(list(value[-1]))
        elif op is sre.BRANCH:
            for branch in value[1]:
                yield from _characters(list(branch))
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            yield from _characters(list(value[1]))
        elif op is sre.ATOMIC_GROUP:
            yield from _characters(list(value))
