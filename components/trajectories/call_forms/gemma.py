"""Gemma 4's form of tool calls: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`."""

from __future__ import annotations

import json
import re
from typing import Any

from components.trajectories.call_forms.marked import CONSTANTS, Calls, MarkedForm, Tools, as_json, expect

QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:(?P<name>[^\s{}]+)\s*(?=\{)")
_KEY = re.compile(r"\s*(?:<\|\"\|>(?P<quoted>(?:(?!<\|\"\|>).)*+)<\|\"\|>|(?P<bare>[^\s:,{}\[\]<]+))\s*:", re.DOTALL)
_TEXT = re.compile(r"\s*<\|\"\|>(.*?)<\|\"\|>", re.DOTALL)
_BARE = re.compile(r"\s*([^\s,{}\[\]<]+)")
_MARK = re.compile(r"\s*([,{}\[\]])")
MAX_DEPTH = 100


class GemmaForm(MarkedForm):
    """Calls with a mapping whose keys are bare words and whose texts stand between `<|"|>`."""

    marks = ("<|tool_call>",)
    close = "<tool_call|>"

    def read_calls(self, text: str, at: int, tools: Tools) -> tuple[Calls, int]:
        head = _HEAD.match(text, at)
        if head is None:
            raise ValueError("a call needs a name and arguments")
        arguments, end = _value(text, head.end(), 0)
        return [(head["name"], as_json(arguments))], expect(text, end, self.close)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise ValueError("arguments are nested too deeply")
    if match := _TEXT.match(text, at):
        return match[1], match.end()
    mark = _MARK.match(text, at)
    if mark and mark[1] == "{":
        return _mapping(text, mark.end(), depth)
    if mark and mark[1] == "[":
        return _items(text, mark.end(), depth)
    if match := _BARE.match(text, at):
        return CONSTANTS[match[1]] if match[1] in CONSTANTS else json.loads(match[1]), match.end()
    raise ValueError(f"no value at character {at}")


def _mapping(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    mapping: dict[str, Any] = {}
    while (end := _end(text, at, "}")) is None:
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError(f"no key at character {at}")
        name = key["quoted"] if key["quoted"] is not None else key["bare"]
        if name in mapping:
            raise ValueError(f"key {name!r} occurs twice")
        mapping[name], at = _value(text, key.end(), depth + 1)
        at = _after_comma(text, at)
    return mapping, end


def _items(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while (end := _end(text, at, "]")) is None:
        item, at = _value(text, at, depth + 1)
        items.append(item)
        at = _after_comma(text, at)
    return items, end


def _end(text: str, at: int, mark: str) -> int | None:
    """Return the end of a closing bracket at `at`, else None."""
    match = _MARK.match(text, at)
    return match.end() if match and match[1] == mark else None


def _after_comma(text: str, at: int) -> int:
    """Return the position after a comma; the same position before a closing bracket."""
    match = _MARK.match(text, at)
    if match is None or match[1] in "{[":
        raise ValueError(f"expected a comma or a closing bracket at character {at}")
    return match.end() if match[1] == "," else at
