r"""`python -m flows.qualify environment=NAME [overrides]`: checks whether an environment is fit for training.

    python -m flows.qualify environment=shop                            nine checks, as a table
    python -m flows.qualify +experiment=NAME --scenarios 32             the environment of an experiment, more episodes
    python -m flows.qualify environment=maze agent.max_turns=72 --json --html maze.html

The checks: the solver succeeds, chance fails, a replay is identical, instances are isolated, a saved state continues,
the splits are disjoint in substance, cheap exploits earn nothing, a new instance agrees on success, and solutions fit
`model.max_length` and `agent.max_turns`. No model is sampled from. docs/guides/qualify.md describes each check.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError
from flows.terminal.arguments import refuse_root_option
from flows.terminal.console import printable_lines
from flows.terminal.exit_codes import print_error
from flows.terminal.interrupt import leave
from flows.terminal.pages import write_page

if TYPE_CHECKING:
    from components.evaluation.qualification_page import QualificationCheck
    from flows.experiment.spec import ExperimentSpec

FOLDER = "qualify"


def qualify(
    spec: ExperimentSpec, count: int = 16, *, overrides: Sequence[str] = (), html: Path | None = None
) -> tuple[dict[str, Any], list[QualificationCheck]]:
    """Check the environment of an experiment and write the page. Return the result as JSON data, and the checks."""
    from components.evaluation.qualification_page import passed, render
    from flows.qualification.qualification import qualify as run_checks
    from flows.stages.base import Context
    from flows.terminal.console import hush

    environment = spec.required_environment.target
    hush()
    with redirect_stdout(sys.stderr):  # stdout carries the result only
        checks = run_checks(spec, count, Context.created(spec.root, spec.store).cache)
    name = environment.rpartition(".")[2]
    page = html or Path(spec.root) / FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.html"
    page = write_page(page, render(environment, checks, time.strftime("%Y-%m-%d %H:%M:%S"), overrides))
    data = {
        "environment": environment,
        "passed": passed(checks),
        "checks": [check.to_json() for check in checks],
        "html": str(page),
    }
    return data, checks


def show(data: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = []
    for check in data["checks"]:
        figures = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in check["figures"].items()
        )
        lines.append(f"{check['status']:8}{check['name']:11}{figures}".rstrip())
        if check["reason"]:
            lines.append(f"{'':19}{check['reason']}")
    lines += [f"page: {data['html']}", f"{data['environment']}: {'passed' if data['passed'] else 'failed'}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 1 if a check fails; 2 for a user error; 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.qualify", description="Checks whether an environment is fit for training."
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: environment=NAME, +experiment=NAME, key=value")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--scenarios", type=int, default=16, metavar="N", help="scenarios to play (default: 16)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file of the page")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    if options.scenarios < 2:
        parser.error(f"--scenarios {options.scenarios}: expected at least 2")
    out = sys.stdout
    from flows.experiment.compose import check
    from flows.terminal.overrides import mask_overrides

    try:
        spec = check(options.overrides, config_dir=options.config_dir)[0]
        shown = mask_overrides(options.overrides)
        data, _ = qualify(spec, options.scenarios, overrides=shown, html=options.html)
    except EspalierError as error:
        return print_error(error)
    except KeyboardInterrupt:
        return 130
    print(json.dumps(data) if options.json else printable_lines(show(data).splitlines()), file=out, flush=True)
    return 0 if data["passed"] else 1


if __name__ == "__main__":
    leave(main)
