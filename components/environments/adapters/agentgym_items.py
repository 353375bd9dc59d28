"""Item listings and demonstrations of AgentGym environments.

AgentGym numbers the tasks of each environment; files identify them by ids such as `webshop_12`. A file is a list of
records with an `item_id`. Records of AgentTraj also have `conversations`: messages with `from` (human or gpt), `loss`
(true for messages to train on) and `value`. A file may mix environments; each environment reads only its own records.
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
from components.errors import ResourceError, SpecError

Listing = int | str | list[int | str]
"""Number of items, an inclusive range such as 0-199, a file, or a list of numbers and ranges."""
MAX_FILE = 2**30
"""Maximum file size, in bytes."""
MAX_ITEMS = 1_000_000
"""Maximum number of items of a listing."""


@dataclass(frozen=True, slots=True)
class Record:
    """The record of an item in a file."""

    type: str = ""
    difficulty: int = 0
    messages: tuple[str, ...] = field(default=(), repr=False)
    """Agent messages to train on, from the first conversation of this item; empty if there is none."""


def numbers(kind: str, key: str, listing: Listing, after: int = 0) -> list[int]:
    """Return the items of a listing, in its order. Raises SpecError.

    key: config key, for messages. after: first item of a listing that is only a count.
    """
    if isinstance(listing, int):
        selected = list(range(after, after + _check_count(key, listing)))
    elif is_file(listing):
        selected = list(records(kind, key, listing))
    else:
        selected = []
        for entry in [listing] if isinstance(listing, str) else listing:
            if isinstance(entry, int):
                selected.append(entry)
            elif ends := _range(entry):
                first, last = ends
                _check_count(key, last - first + 1)
                selected += range(first, last + 1)
            else:
                raise _invalid(key, f"contains {entry!r}; expected numbers and ranges such as 0-199")
    _check_count(key, len(selected))
    if duplicates := [item for item, count in Counter(selected).items() if count > 1]:
        raise _invalid(key, f"contains item {duplicates[0]} twice")
    items = KINDS[kind].items
    if invalid := [item for item in selected if item < 0 or (items is not None and item >= items)]:
        bounds = "from 0 on" if items is None else f"0 to {items - 1}"
        raise _invalid(key, f"contains item {invalid[0]}; {kind} has items {bounds}")
    return selected


def records(kind: str, key: str, path: str) -> dict[int, Record]:
    """Return the records of an environment by item. Raises SpecError, or ResourceError if the file cannot be read."""
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


@functools.lru_cache(maxsize=8)  # a collector creates many environments with the same files
def _records(kind: str, key: str, path: str, modified: int, size: int) -> dict[int, Record]:
    try:
        data = json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _invalid(key, f"{path} is not valid JSON: {error!s:.200}") from None
    except OSError as error:
        raise ResourceError(f"environment.{key}: {path}: {error.strerror}") from None
    if not isinstance(data, list):
        raise _invalid(key, f"{path} contains {type(data).__name__}; expected a list of records with an item_id")
    names = {kind, *KINDS[kind].names}
    by_item: dict[int, Record] = {}
    others: set[str] = set()
    for index, entry in enumerate(data):
        name = entry.get("item_id") if isinstance(entry, dict) else None
        match = re.fullmatch(r"(\w+?)_(\d{1,9})", name) if isinstance(name, str) else None
        if match is None:
            if isinstance(name, str) and not names & set(re.split(r"[_\W]", name.lower())):
                others.add(name)
                continue
            raise _invalid(
                key, f"{path}: record {index} has the item_id {name!r:.80}; expected an id such as {kind}_12"
            )
        if not names & set(match[1].lower().split("_")):
            others.add(match[1])
            continue
        if (item := int(match[2])) not in by_item:
            by_item[item] = _record(key, f"{path}: record {index}", entry)
    if not by_item:
        available = f"; it has items of {', '.join(sorted(others)[:8])}" if others else ""
        raise _invalid(key, f"{path} has no items of {kind}{available}")
    return by_item


def _record(key: str, where: str, data: dict[str, Any]) -> Record:
    kind, difficulty = data.get("type", ""), data.get("difficulty", 0)
    if not isinstance(kind, str) or isinstance(difficulty, bool) or difficulty not in range(6):
        raise _invalid(
            key, f"{where} has type {kind!r:.40} and difficulty {difficulty!r:.40}; expected text, and 0 to 5"
        )
    return Record(kind, difficulty, _messages(key, where, data.get("conversations") or []))


def _messages(key: str, where: str, conversations: Any) -> tuple[str, ...]:
    """Return the agent messages to train on: those marked with `loss`; if none is marked, all but the first, which
    only acknowledges the rules."""
    messages: list[tuple[str, bool]] = []
    for message in conversations if isinstance(conversations, list) else [None]:
        if not isinstance(message, dict) or not isinstance(text := message.get("value"), str):
            raise _invalid(key, f"{where} has the message {message!r:.80}; expected from, loss and value")
        if message.get("from") == "gpt":
            messages.append((text, message.get("loss") in (True, 1)))
    marked = tuple(text for text, loss in messages if loss)
    return marked or tuple(text for text, _ in messages[1:])


def listing_key(kind: str, key: str, listing: Listing | None) -> Any:
    """Return a listing for stage keys: a file is represented by its records of this environment, not by its path."""
    if listing is None or not is_file(listing):
        return listing
    by_item = sorted(records(kind, key, listing).items())
    return [[item, record.type, record.difficulty, *record.messages] for item, record in by_item]


def is_file(listing: Listing) -> TypeGuard[str]:
    """Return True if a listing is the path of a file."""
    return isinstance(listing, str) and _range(listing) is None


def next_item(listing: Sequence[int]) -> int:
    """Return the first item after all items of a listing."""
    return max(listing, default=-1) + 1


def _range(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text.strip())
    return (int(match[1]), int(match[2])) if match else None


def _check_count(key: str, count: int) -> int:
    if not 1 <= count <= MAX_ITEMS:
        raise _invalid(key, f"contains {count} items; expected 1 to {MAX_ITEMS}")
    return count


def _invalid(key: str, message: str) -> SpecError:
    return SpecError.at(f"environment.{key}", message)
