"""`python -m flows.deployments [--stop NAME | --start NAME]`: what runs have put into use below a root, and whether it
is up; ends a server on this machine, or starts it again, for instance after the machine was.

What is in use elsewhere is listed; the host that has it ends it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.deployment.targets.spec import LocalTarget
from components.errors import EspalierError, ResourceError
from flows.release.deployment_ledger import InUse, Ledger, ledgers, where
from flows.terminal.arguments import RootParser


def state(found: InUse) -> str:
    """`up`, `ended`, or `elsewhere`, of which only the host knows."""
    if found.deployment.target != "local":
        return "elsewhere"
    return "up" if LocalTarget().build().alive(found.deployment) else "ended"


def stop(root: Path, name: str) -> str:
    """Ends the server of a model; returns what to say. Raises ResourceError where there is none on this machine."""
    with _local(root, name) as (ledger, found):
        title = f"{name} version {found.release.version}"
        if state(found) == "ended":
            return f"{title} has ended already"
        LocalTarget().build().take_back(found.deployment)
        ledger.write(found, "stopped", f"{title} was stopped")
        return f"{title} was stopped; --start {name} starts it again"


def start(root: Path, name: str) -> str:
    """Starts the server of a model again, on the port it had; returns what to say. Raises ResourceError where there is
    none on this machine, its export is gone or the port is taken; DeployError, WaitTimeout as the server does."""
    with _local(root, name) as (ledger, found):
        title = f"{name} version {found.release.version}"
        if state(found) == "up":
            return f"{title} is up at {where(found.deployment)}"
        if not found.release.folder.is_dir():
            raise ResourceError(
                f"the export of {title} is gone from {found.release.folder}: the same run with deploy=local makes it"
            )
        target = LocalTarget.model_validate_json(found.deployment.details["spec"]).build()
        target.check(name)
        again = target.deploy(found.release, ledger.folder)
        ledger.write(replace(found, deployment=again), "started", f"{title} was started at {where(again)}")
        return f"{title} is up at {where(again)}"


@contextmanager
def _local(root: Path, name: str) -> Iterator[tuple[Ledger, InUse]]:
    """What is in use of a model on this machine, while no run changes it."""
    known = {one.name: one for one in ledgers(root)}
    if name not in known:
        there = ", ".join(known) or "none"
        raise ResourceError(f"no model called {name} was deployed below {root}; deployed were: {there}")
    with known[name].held():
        found = known[name].present()
        if found is None:
            raise ResourceError(f"nothing of {name} is in use; {known[name].path} says why")
        if found.deployment.target != "local":
            raise ResourceError(
                f"{name} is in use at {where(found.deployment)}: only servers on this machine are stopped or started"
            )
        yield known[name], found


def _shown(found: Sequence[tuple[str, InUse]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "version", "where", "endpoint", "state", "log"):
        table.add_column(column, overflow="fold")
    for name, one in found:
        deployment = one.deployment
        log = deployment.details.get("log", "")
        table.add_row(name, one.release.version, deployment.target, deployment.url or "none", state(one), log)
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    with out.capture() as text:
        out.print(table)
    return text.get()


def _data(name: str, one: InUse) -> dict[str, Any]:
    deployment = one.deployment
    return {
        "name": name,
        "version": one.release.version,
        "target": deployment.target,
        "url": deployment.url,
        "model": deployment.model,
        "state": state(one),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a model that is not there, or not here; 1 where a server does not start."""
    parser = RootParser(
        prog="python -m flows.deployments",
        description="Lists what runs have put into use; stops and starts servers on this machine.",
    )
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--stop", metavar="NAME", help="end the server of this model")
    act.add_argument("--start", metavar="NAME", help="start it again, on its port")
    act.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args(argv)
    root = options.root
    try:
        if options.stop or options.start:
            print(stop(root, options.stop) if options.stop else start(root, options.start))
            return 0
    except ResourceError as error:
        print(error, file=sys.stderr)
        return 2
    except EspalierError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    present = [(one.name, found) for one in ledgers(root) if (found := one.present()) is not None]
    if options.json:
        print(json.dumps([_data(name, one) for name, one in present]))
    else:
        print(_shown(present) if present else f"nothing is in use below {root}", end="" if present else "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
