"""Run the conformance suites and print one table.

    python -m tests.conformance [--install] [--only NAME …] [--json]

`--install` first installs what a suite needs: npm packages into `.conformance/`, Python packages into environments of
`.venv-conformance/`. A suite that cannot run here is skipped with the reason. TAU_BENCH and OPEN_RESPONSES name folders
with data that no package has, RL_LIBRARIES the Python of an environment with verl and torchrl. The exit code is 1 if a
case failed, 0 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tests.conformance.report import Report, Unavailable, suites_text
from tests.conformance.suites import SUITES, Suite, install, run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--install", action="store_true", help="install what the suites need, in folders of their own")
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    reports = []
    for suite in SUITES:
        if suite.name in options.only:
            print(f"{suite.name} …", file=sys.stderr, flush=True)
            reports.append(result(suite, options.install))
    print(json.dumps({"suites": [report.json() for report in reports]}) if options.json else suites_text(reports))
    return max(report.exit_code for report in reports)


def result(suite: Suite, installing: bool) -> Report:
    """Return the report of a suite."""
    try:
        if installing:
            install(suite.installs)
    except Unavailable as error:
        return Report(suite.name, "", f"python -m tests.conformance.{suite.module}", reason=str(error))
    return run(suite)


if __name__ == "__main__":
    sys.exit(main())
