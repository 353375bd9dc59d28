"""Why episodes failed: the first reasons of each kind, short enough for a console and a report, and without secrets.

A reason may come from anything that an agent or an environment raises, so its text is untrusted: secrets are masked,
white space is folded, and characters that would steer a terminal are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from components.redaction import mask_text
from components.trajectories.schema import Failure

KINDS = 6
"""Most kinds that are told apart; episodes of further ones are counted together."""
REASONS = 3
"""Most reasons of one kind."""
LENGTH = 300
"""Most characters of a reason."""
_RAISED = re.compile(r"(\w{1,100}): ")


@dataclass(frozen=True)
class FailureKind:
    """Episodes that failed in the same way."""

    boundary: str
    """Where: engine, environment or agent. Empty for all further kinds together."""
    kind: str
    """Name of the error; of an agent's also the class that it raised: `AgentError, KeyError`."""
    count: int
    """Episodes."""
    reasons: tuple[tuple[str, str], ...] = ()
    """The first different ones, each with the id of the episode."""

    def __str__(self) -> str:
        if not self.boundary:
            return f"{self.count} of further kinds"
        told = "; ".join(f"{name}: {reason}" for name, reason in self.reasons)
        return f"{self.count} {self.kind} ({self.boundary}): {told}"


def failure_kinds(failures: Iterable[tuple[str, Failure]]) -> list[FailureKind]:
    """Return the kinds of failures, in the order in which they first occur. failures: each with its episode's id."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, failure in failures:
        raised = _RAISED.match(failure.message) if failure.kind == "AgentError" else None
        kind = f"{failure.kind}, {raised[1]}" if raised else failure.kind
        groups.setdefault((shown(failure.boundary), shown(kind)), []).append((name, failure.message))
    named = list(groups.items())[:KINDS]
    found = [FailureKind(boundary, kind, len(group), _first(group)) for (boundary, kind), group in named]
    if rest := sum(map(len, list(groups.values())[KINDS:])):
        found.append(FailureKind("", "", rest))
    return found


def _first(group: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the first different reasons."""
    found: dict[str, str] = {}
    for name, message in group:
        found.setdefault(shown(message), shown(name))
        if len(found) == REASONS:
            break
    return tuple((name, reason) for reason, name in found.items())


def shown(text: str) -> str:
    """Return untrusted text on one line, masked before it is cut: half a secret is not recognised."""
    line = " ".join(mask_text(text).split())
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
    return line if len(line) <= LENGTH else f"{line[: LENGTH - 1]}…"
