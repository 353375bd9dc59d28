"""Summary of failed episodes: the first reasons of each kind, short enough for a console and a report.

A reason may be the text of any exception of an agent or an environment, so it is untrusted: secrets are masked,
whitespace is collapsed, and control characters are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from components.redaction import mask_text
from components.trajectories.schema import Failure

KINDS = 6
"""Maximum number of distinct kinds; episodes of further kinds are counted together."""
REASONS = 3
"""Maximum number of reasons per kind."""
LENGTH = 300
"""Maximum length of a reason in characters."""
_RAISED = re.compile(r"(\w{1,100}): ")


@dataclass(frozen=True)
class FailureKind:
    """A kind of failure and its episodes."""

    boundary: str
    """Boundary that failed: engine, environment or agent. Empty for all further kinds together."""
    kind: str
    """Name of the error; for an agent also the class of its exception: `AgentError, KeyError`."""
    count: int
    """Number of episodes."""
    reasons: tuple[tuple[str, str], ...] = ()
    """First distinct reasons, each with the id of the episode."""

    def __str__(self) -> str:
        if not self.boundary:
            return f"{self.count} of further kinds"
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons)
        return f"{self.count} {self.kind} ({self.boundary}): {reasons}"


def failure_kinds(failures: Iterable[tuple[str, Failure]]) -> list[FailureKind]:
    """Return the kinds of failures, in the order of first occurrence. failures: episode ids with failures."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, failure in failures:
        raised = _RAISED.match(failure.message) if failure.kind == "AgentError" else None
        kind = f"{failure.kind}, {raised[1]}" if raised else failure.kind
        groups.setdefault((shown(failure.boundary), shown(kind)), []).append((name, failure.message))
    distinct = list(groups.items())[:KINDS]
    kinds = [FailureKind(boundary, kind, len(group), _first(group)) for (boundary, kind), group in distinct]
    if remaining := sum(map(len, list(groups.values())[KINDS:])):
        kinds.append(FailureKind("", "", remaining))
    return kinds


def _first(group: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the first distinct reasons, each with the id of its episode."""
    reasons: dict[str, str] = {}
    for name, message in group:
        reasons.setdefault(shown(message), shown(name))
        if len(reasons) == REASONS:
            break
    return tuple((name, reason) for reason, name in reasons.items())


def shown(text: str) -> str:
    """Return untrusted text on one line. Secrets are masked before truncation, because a partial secret is not
    recognized."""
    line = " ".join(mask_text(text).split())
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
    return line if len(line) <= LENGTH else f"{line[: LENGTH - 1]}…"
