"""Writes the table of docs/architecture.md with the artifact of each stage.

    python -m docs.artifacts

The table is what the stages declare (`flows.stages`). `tests/docs` fails while it is not what this writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flows.stages import STAGES
from flows.stages.base import Stage

PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- artifacts -->", "<!-- /artifacts -->"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    head = ["| Stage | Inputs | Artifact | Files |", "|---|---|---|---|"]
    return "\n".join([*head, *map(_row, STAGES.values())]) + "\n"


def _row(stage: Stage) -> str:
    files = "; ".join(
        f"`{name}`{' (not always)' if name in stage.optional else ''}: {text}" for name, text in stage.files.items()
    )
    return f"| {stage.name} | {_inputs(stage.inputs)} | {stage.kind.replace('_', ' ')} | {files} |"


def _inputs(inputs: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, kinds in inputs.items():
        names.setdefault(kinds.replace("_", " "), []).append(f"`{name}`" if name != "*" else "any name")
    return "; ".join(f"{', '.join(same)}: {kinds}" for kinds, same in names.items()) or "none"


if __name__ == "__main__":
    main()
