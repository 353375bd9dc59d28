"""Which items of an AgentGym environment are played, and how people or models played them before.

AgentGym numbers the tasks of each environment; a file calls them `webshop_12`. Such files hold a list of records with
an `item_id`; those of AgentTraj also `conversations`: messages with `from` (human or gpt), `loss` (whether the message
is to be learned) and `value`. A file may hold several environments; only its own records count for one.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from components.environments.adapters.agentgym_kinds import KINDS
from components.errors import Problem, ResourceError, SpecError

Listing = int | str | list[int | str]
"""How many items, a range such as 0-199 (both ends belong to it), a file, or a list of numbers and ranges."""
MAX_FILE = 2**30
"""Bytes of a file."""
MAX_ITEMS = 1_000_000


@dataclass(frozen=True, slots=True)
class Record:
    """What a file says of an item."""

    type: str = ""
    difficulty: int = 0
    said: tuple[str, ...] = field(default=(), repr=False)
    """What the agent said in the first conversation of this item, where there is one: only what is to be learned."""


def numbers(kind: str, key: str, listing: Listing, after: int = 0) -> list[int]:
    """The items of a listing, in its order. key: of the configuration. after: where counting begins, for a listing
    that is only how many. Raises SpecError."""
    if isinstance(listing, int):
        found = list(range(after, after + _checked(key, listing)))
    elif is_file(listing):
        found = list(records(kind, key, listing))
    else:
        found = []
        for one in [listing] if isinstance(listing, str) else listing:
            if isinstance(one, int):
                found.append(one)
            elif ends := _range(one):
                first, last = ends
                _checked(key, last - first + 1)
                found += range(first, last + 1)
            else:
                raise _wrong(key, f"has {one!r}; expected numbers and ranges such as 0-199")
    _checked(key, len(found))
    if twice := [item for item, times in Counter(found).items() if times > 1]:
        raise _wrong(key, f"names item {twice[0]} twice")
    items = KINDS[kind].items
    if beyond := [one for one in found if one < 0 or (items is not None and one >= items)]:
        what = "from 0 on" if items is None else f"0 to {items - 1}"
        raise _wrong(key, f"names item {beyond[0]}; {kind} has items {what}")
    return found


def records(kind: str, key: str, path: str) -> dict[int, Record]:
    """What a file has of an environment, by item. Raises SpecError, and ResourceError where it cannot be read."""
    file = Path(path).expanduser()
    try:
        status = file.stat()
    except OSError as error:
        raise ResourceError(
            f"environment.{key}: {path}: {error.strerror}; expected a number, a range such as 0-199, or a JSON file of "
            "records with an item_id"
        ) from None
    if status.st_size > MAX_FILE:
        raise ResourceError(f"environment.{key}: {path} has {status.st_size} bytes, more than {MAX_FILE}; split it")
    return _records(kind, key, str(file), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)  # a collector makes many environments of the same files
def _records(kind: str, key: str, path: str, modified: int, size: int) -> dict[int, Record]:
    try:
        data = json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _wrong(key, f"{path} is no JSON: {error!s:.200}") from None
    except OSError as error:
        raise ResourceError(f"environment.{key}: {path}: {error.strerror}") from None
    if not isinstance(data, list):
        raise _wrong(key, f"{path} holds {type(data).__name__}; expected a list of records with an item_id")
    names = {kind, *KINDS[kind].names}
    found: dict[int, Record] = {}
    others: set[str] = set()
    for place, one in enumerate(data):
        name = one.get("item_id") if isinstance(one, dict) else None
        match = re.fullmatch(r"(\w+?)_(\d{1,9})", name) if isinstance(name, str) else None
        if match is None:
            if isinstance(name, str) and not names & set(re.split(r"[_\W]", name.lower())):
                others.add(name)
                continue
            raise _wrong(key, f"{path}: record {place} has the item_id {name!r:.80}; expected one such as {kind}_12")
        if not names & set(match[1].lower().split("_")):
            others.add(match[1])
            continue
        if (item := int(match[2])) not in found:
            found[item] = _record(key, f"{path}: record {place}", one)
    if not found:
        seen = f"; it has {', '.join(sorted(others)[:8])}" if others else ""
        raise _wrong(key, f"{path} has no items of {kind}{seen}")
    return found


def _record(key: str, where: str, data: dict[str, Any]) -> Record:
    kind, difficulty = data.get("type", ""), data.get("difficulty", 0)
    if not isinstance(kind, str) or isinstance(difficulty, bool) or difficulty not in range(6):
        raise _wrong(key, f"{where} has type {kind!r:.40} and difficulty {difficulty!r:.40}; expected text, and 0 to 5")
    return Record(kind, difficulty, _said(key, where, data.get("conversations") or []))


def _said(key: str, where: str, conversations: Any) -> tuple[str, ...]:
    """What the agent said that is to be learned. Where nothing is marked, all but its first words, which agree to the
    rules."""
    said: list[tuple[str, bool]] = []
    for message in conversations if isinstance(conversations, list) else [None]:
        if not isinstance(message, dict) or not isinstance(text := message.get("value"), str):
            raise _wrong(key, f"{where} has the message {message!r:.80}; expected from, loss and value")
        if message.get("from") == "gpt":
            said.append((text, message.get("loss") in (True, 1)))
    learned = tuple(text for text, loss in said if loss)
    return learned or tuple(text for text, _ in said[1:])


def content_of(kind: str, key: str, listing: Listing | None) -> Any:
    """What stands for a listing in a stage's key: what a file has of this environment, not where it is."""
    if listing is None or not is_file(listing):
        return listing
    return [[item, one.type, one.difficulty, *one.said] for item, one in sorted(records(kind, key, listing).items())]


def is_file(listing: Listing) -> TypeGuard[str]:
    return isinstance(listing, str) and _range(listing) is None


def in_order(listing: Sequence[int]) -> int:
    """Where counting goes on after a listing."""
    return max(listing, default=-1) + 1


def _range(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text.strip())
    return (int(match[1]), int(match[2])) if match else None


def _checked(key: str, count: int) -> int:
    if not 1 <= count <= MAX_ITEMS:
        raise _wrong(key, f"names {count} items; expected 1 to {MAX_ITEMS}")
    return count


def _wrong(key: str, message: str) -> SpecError:
    return SpecError([Problem(f"environment.{key}", message)])
