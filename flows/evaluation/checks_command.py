"""Command that checks a subject of an experiment and writes a page: `flows.certify` and `flows.qualify`.

A subject declares its counts and runs its checks. The command line, the table, the page's file and the exit codes are
the same for both: 0, 1 if a check fails, 2 for a user error, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.terminal.arguments import refuse_root_option
from flows.terminal.console import printable_lines
from flows.terminal.exit_codes import with_exit_codes
from flows.terminal.pages import write_new_page, write_page

if TYPE_CHECKING:
    from flows.experiment.spec import ExperimentSpec


class Count(NamedTuple):
    """Option of the command: a number with its default and minimum."""

    default: int
    minimum: int
    help: str


class CheckedSubject(NamedTuple):
    """Result of the checks."""

    data: dict[str, Any]
    """JSON data: `passed`, `checks`, and facts about the subject."""
    title: str
    """Name of the subject in the last line."""
    file: str
    """Name of the page's file, without its time."""
    page: str
    """Page as HTML text."""
    facts: Mapping[str, Any] = {}
    """Facts about the subject for the first line of the table."""


@dataclass(frozen=True)
class ChecksCommand:
    """Command that checks a subject."""

    name: str
    """Name of the command; pages are written to the folder of this name below the root."""
    description: str
    counts: Mapping[str, Count]
    """Options by name."""
    check: Callable[[ExperimentSpec, Mapping[str, int], Sequence[str]], CheckedSubject]
    """Run the checks of an experiment. Its arguments: spec, values of the counts, masked overrides."""

    @with_exit_codes
    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command and return its exit code."""
        options = self._parse(argv)
        from flows.experiment.compose import check
        from flows.terminal.console import hush
        from flows.terminal.overrides import mask_overrides

        spec = check(options.overrides, config_dir=options.config_dir)[0]
        counts = {name: getattr(options, name) for name in self.counts}
        hush()
        with redirect_stdout(sys.stderr):  # stdout carries the result only
            checked = self.check(spec, counts, mask_overrides(options.overrides))
        if options.html:
            page = write_page(options.html, checked.page)
        else:
            page = write_new_page(Path(spec.root) / self.name, checked.file, checked.page)
        data = {**checked.data, "html": str(page)}
        print(
            json.dumps(data) if options.json else printable_lines(_table(checked, page)),
            flush=True,
        )
        return 0 if data["passed"] else 1

    def _parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m flows.{self.name}", description=self.description)
        parser.add_argument(
            "overrides", nargs="*", help="as for flows.run: environment=NAME, +experiment=NAME, key=value"
        )
        parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
        for name, count in self.counts.items():
            text = f"{count.help} (default: {count.default})"
            parser.add_argument(f"--{name}", type=int, default=count.default, metavar="N", help=text)
        parser.add_argument("--html", type=Path, metavar="FILE", help="file of the page")
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        refuse_root_option(parser, argv)
        options = parser.parse_intermixed_args(argv)
        for name, count in self.counts.items():
            if (value := getattr(options, name)) < count.minimum:
                parser.error(f"--{name} {value}: expected at least {count.minimum}")
        return options


def _table(checked: CheckedSubject, page: Path) -> list[str]:
    """Return the lines of the result."""
    lines = [", ".join(f"{name} {value}" for name, value in checked.facts.items())] if checked.facts else []
    width = max(len(check["name"]) for check in checked.data["checks"]) + 1
    for check in checked.data["checks"]:
        figures = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in check["figures"].items()
        )
        lines.append(f"{check['status']:8}{check['name']:{width}}{figures}".rstrip())
        texts = [line for text in (check["reason"], check.get("remedy")) if text for line in text.splitlines()]
        lines += [f"{'':{8 + width}}{text}" for text in texts]
    return [*lines, f"page: {page}", f"{checked.title}: {'passed' if checked.data['passed'] else 'failed'}"]
