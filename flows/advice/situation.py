"""What a user has to train on and with, and the questions about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from components.errors import Problem, ResourceError, SpecError

Form = Literal["pairs", "thumbs", "ranked"]
"""Form of preferences: a better and a worse answer, one answer marked good or bad, or several answers in order."""
FIRST_ROWS = 20
"""Number of rows from which the content of a file is recognized."""
JUDGE = "openai/gpt-5-mini"
"""Judge model of an advice that names none."""


@dataclass(frozen=True)
class Situation:
    """What a user has."""

    labels: int = 0
    """Number of demonstrations: conversations or answers to imitate."""
    preferences: int = 0
    """Number of preferences."""
    form: Form | None = None
    """Form of the preferences; None without preferences."""
    environment: str | None = None
    """Option of `conf/environment`, or `mcp` for the tools of an MCP server; None without an environment."""
    success: bool = True
    """True if the environment reports whether an episode succeeded."""
    judge: str | None = None
    """`PROVIDER/MODEL` that can judge episodes; None without a judge."""
    teacher: str | None = None
    """Larger model of the hub, or its folder, to learn from; None without one."""
    sparse: bool = False
    """True if episodes are long and success is rare."""
    slow: bool = False
    """True if collecting episodes takes about as long as training on them."""
    tight: bool = False
    """True if the model hardly fits the GPU memory."""
    compute: Literal["cpu", "gpu", "cluster"] = "cpu"
    data: str | None = None
    """File with the demonstrations or preferences."""
    solves: bool = True
    """True if the environment has solutions of its scenarios; `advise` looks it up."""
    restores: bool = True
    """True if the environment can continue from any point of an episode; `advise` looks it up."""

    @property
    def preferred(self) -> bool:
        """True if there are preferences."""
        return self.preferences > 0

    def problems(self) -> list[Problem]:
        """Return the contradictions."""
        problems = []
        for name in ("labels", "preferences"):
            if getattr(self, name) < 0:
                problems.append(Problem(f"--{name}", f"is {getattr(self, name)}; expected 0 or more"))
        if self.preferred and self.form is None:
            problems.append(Problem("--preferences", "have no form; expected --pairs, --thumbs or --ranked"))
        if self.form is not None and not self.preferred:
            problems.append(Problem(f"--{self.form}", "needs the number of preferences; expected --preferences N"))
        if self.sparse and self.environment is None:
            problems.append(Problem("--sparse", "is about an environment; expected --environment NAME"))
        return problems


def with_data(situation: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Return the answers, completed by the content of a file of JSON lines or of a JSON list. Answers stay as they are.

    Raises ResourceError for a file that cannot be read, SpecError for one whose rows have no known form.
    """
    if path is None:
        return situation
    rows, count = _first_rows(Path(path))
    form = next((name for name, fits in _FORMS.items() if all(fits(row) for row in rows)), None)
    if form is None:
        columns = ", ".join(sorted(rows[0])) if rows and isinstance(rows[0], dict) else "no object"
        known = "messages, conversations, prompt and completion, chosen and rejected, label, or ranking"
        raise SpecError([Problem("--data", f"{path}: its first rows have {columns}; expected {known}")])
    if form == "demonstrations":
        return {"labels": count, **situation, "data": path}
    return {"preferences": count, "form": form, **situation, "data": path}


def _first_rows(path: Path) -> tuple[list[Any], int]:
    """Return the first rows of a file and the number of all rows."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"--data: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else []
    except ValueError as error:
        raise ResourceError(f"--data: {path} is no valid JSON: {error}") from None
    if rows:
        return rows[:FIRST_ROWS], len(rows)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip(" []")]
    for number, line in lines[:FIRST_ROWS]:
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ResourceError(f"--data: {path}, line {number} is no valid JSON: {error}") from None
    if not rows:
        raise ResourceError(f"--data: {path} has no row")
    return rows, len(lines)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda row: isinstance(row, dict) and set(names) <= row.keys()


_FORMS: dict[str, Callable[[Any], bool]] = {
    "pairs": _has("chosen", "rejected"),
    "ranked": _has("ranking"),
    "thumbs": _has("label"),
    "demonstrations": lambda row: any(
        fits(row) for fits in (_has("messages"), _has("conversations"), _has("prompt", "completion"))
    ),
}
"""Forms by name, each with its test of a row; the first one that fits all rows counts."""
