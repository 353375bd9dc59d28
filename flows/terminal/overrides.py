"""Detection and masking of secrets in command-line overrides.

Hydra's own parser reads each override, so a secret is detected inside `{…}`, a list, quotes, a sweep or a key's name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException

from components.errors import SpecError
from components.redaction import MASK, Secret, is_secret, mask, mask_text, secrets_in
from components.redaction.data import problems
from components.redaction.names import words

_UNPARSED = (HydraException, RecursionError, ValueError)
"""Parser errors: invalid grammar, too deep nesting, integers with thousands of digits."""


def mask_override(line: str) -> str:
    """Return an override such as `judge={api_key: abc}` with its secrets masked; one without secrets is unchanged."""
    try:
        override = _parser().parse_override(line)
    except _UNPARSED:
        return masked_unparsed(line)
    if not secrets(override):
        return line
    key = _key(override)
    value = mask({key: _plain(override)})
    shown = MASK if override.package and is_secret(override.package) else next(iter(value.values()))
    return f"{mask_text(override.get_key_element())}={_written(shown, isinstance(override.value(), ChoiceSweep))}"


def mask_overrides(lines: Iterable[str]) -> list[str]:
    """Return overrides with their secrets masked."""
    return [mask_override(line) for line in lines]


def masked_unparsed(line: str) -> str:
    """Return an override that cannot be parsed, with possible secrets masked: everything after a key whose name denotes
    a secret, at any position."""
    return line if not unparsed_secrets(line) else f"{mask_text(line.partition('=')[0].split('{')[0])}={MASK}"


def unparsed_secrets(line: str) -> bool:
    """Return True if an override that cannot be parsed may hold a secret."""
    secret_key = any(is_secret(part.rstrip("\"'")) for part in _separated(line)[:-1])
    return secret_key or mask_text(line) != line


def _separated(line: str) -> list[str]:
    for separator in ":{},[]( )":
        line = line.replace(separator, "=")
    return [part for part in line.split("=") if words(part)] + [""]


def secrets(override: Override) -> list[Secret]:
    """Return the secrets in a parsed override, both in its key and in its value."""
    value = _plain(override)
    return secrets_in({_key(override): value} | ({override.package: value} if override.package else {}))


def parsed_secrets(lines: Sequence[str]) -> list[Secret]:
    """Return the secrets in overrides. Overrides that cannot be parsed are searched as text."""
    detected: list[Secret] = []
    for line in lines:
        try:
            detected += secrets(_parser().parse_override(line))
        except _UNPARSED:
            if unparsed_secrets(line):
                detected.append(Secret(masked_unparsed(line).partition("=")[0], "something that may be a secret"))
    return detected


def refuse_secrets(lines: Sequence[str]) -> None:
    """Raise SpecError if overrides hold secrets. The error names every key and never a value."""
    if detected := parsed_secrets(lines):
        raise SpecError(problems(detected))


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _key(override: Override) -> str:
    return str(override.key_or_group).replace("/", ".")


def _plain(override: Override) -> Any:
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [_converted(item) for item in value.list]
    if isinstance(value, RangeSweep | IntervalSweep):
        return [value.start, value.stop if isinstance(value, RangeSweep) else value.end]
    if isinstance(value, Glob):
        return [*value.include, *value.exclude]
    return _converted(value)


def _converted(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_converted(item) for item in value]
    if isinstance(value, dict):
        return {_converted(name): _converted(item) for name, item in value.items()}
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _written(value: Any, sweep: bool) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_written(item, False)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        inside = ",".join(_written(item, False) for item in value)
        return inside if sweep else f"[{inside}]"
    return "null" if value is None else str(value)
