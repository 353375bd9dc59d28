"""Command about a round of a recorded run: the command line and the output that `attribute` and `rejudge` share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.terminal.arguments import RootParser, add_trust
from flows.terminal.console import printable_lines
from flows.terminal.exit_codes import with_exit_codes
from flows.terminal.pages import write_new_page, write_page

if TYPE_CHECKING:
    from flows.experiment.spec import ExperimentSpec
    from flows.influence.rounds import TrainedRound


@dataclass(frozen=True)
class RoundCommand:
    """Subcommand that examines a round."""

    name: str
    """Name of the subcommand; pages are written to the folder of this name below the root."""
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Add the command's own arguments."""
    examine: Callable[[argparse.Namespace, TrainedRound, ExperimentSpec], tuple[dict[str, Any], str]]
    """Return the result as JSON data, and the page as HTML text. Its arguments: options, round, experiment of the
    run."""
    show: Callable[[Mapping[str, Any]], str]
    """Return the result as text."""

    @with_exit_codes
    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command. Return exit code 0; 1 if a stage fails; 2 for a user error; 130 if interrupted."""
        parser = RootParser(prog=f"python -m flows.explain {self.name}", description=self.description)
        parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name, or latest")
        parser.add_argument("--round", type=int, metavar="N", help="round (default: the last one)")
        self.add_arguments(parser)
        add_trust(parser)
        parser.add_argument("--html", type=Path, metavar="FILE", help="file of the page")
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        options = parser.parse_intermixed_args(argv)
        out = sys.stdout
        from flows.influence import rounds, workplace

        run, spec = workplace.recorded_run(options.root, options.run, options.trust)
        trained = rounds.round_of(run, options.round)
        workplace.demand_gradients(run, spec)
        data, page = self.examine(options, trained, spec)
        folder = options.root / self.name
        file = write_page(options.html, page) if options.html else write_new_page(folder, run.name, page)
        data["html"] = str(file)
        print(json.dumps(data) if options.json else printable_lines(self.show(data).split("\n")), file=out, flush=True)
        return 0


def signed(change: float, interval: Sequence[float] | None) -> str:
    """Return a change with its interval, `+0.100 [+0.020, +0.180]`."""
    return f"{change:+.3f}" + ("" if interval is None else " [{:+.3f}, {:+.3f}]".format(*interval))
