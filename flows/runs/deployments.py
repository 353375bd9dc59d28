"""`flows.runs deployments [--stop NAME | --start NAME]`: state of the models that runs below a root have deployed.

The command lists deployments. It stops a server on this machine, or starts it again, for example after a reboot.
Deployments on other hosts are listed only; stop them on their host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.deployment.targets.base import DeploymentTarget
from components.deployment.targets.spec import local_target, restart_target
from components.errors import EspalierError, ResourceError
from flows.release.deployment_ledger import ActiveRelease, Ledger, ledgers, where
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import print_message


def state(active: ActiveRelease) -> str:
    """Return `up`, `ended`, or `elsewhere` for a deployment on another host, whose state is unknown here."""
    target = local_target(active.deployment)
    if target is None:
        return "elsewhere"
    return "up" if target.alive(active.deployment) else "ended"


def stop(root: Path, name: str) -> str:
    """Stop the server of a model and return a message. Raises ResourceError if this machine has no such server."""
    with _local(root, name) as (ledger, active, target):
        title = f"{name} version {active.release.version}"
        if state(active) == "ended":
            return f"{title} is already stopped"
        target.take_back(active.deployment)
        ledger.write(active, "stopped", f"{title} was stopped")
        return f"{title} was stopped; --start {name} starts it again"


def start(root: Path, name: str) -> str:
    """Start the server of a model again, on its previous port, and return a message.

    Raises ResourceError if this machine has no such deployment, its target is no longer valid, its export was deleted
    or the port is in use; DeployError or WaitTimeout if the server does not start.
    """
    with _local(root, name) as (ledger, active, _):
        title = f"{name} version {active.release.version}"
        if state(active) == "up":
            return f"{title} is up at {where(active.deployment)}"
        if not active.release.folder.is_dir():
            raise ResourceError(
                f"the export of {title} is missing: {active.release.folder} does not exist. To export it again, repeat "
                "the run with deploy=local"
            )
        target = restart_target(active.deployment, ledger.path)
        target.check(name)
        restarted = target.deploy(active.release, ledger.folder)
        ledger.write(replace(active, deployment=restarted), "started", f"{title} was started at {where(restarted)}")
        return f"{title} is up at {where(restarted)}"


@contextmanager
def _local(root: Path, name: str) -> Iterator[tuple[Ledger, ActiveRelease, DeploymentTarget]]:
    """Yield the ledger, the active deployment and the target of a model on this machine, locked against changes by
    runs."""
    by_name = {ledger.name: ledger for ledger in ledgers(root)}
    if name not in by_name:
        names = ", ".join(by_name) or "none"
        raise ResourceError(f"no model {name!r} was deployed below {root}; deployed models: {names}")
    ledger = by_name[name]
    with ledger.lock():
        active = ledger.active()
        if active is None:
            raise ResourceError(f"{name} has no active deployment; see its history in {ledger.path}")
        target = local_target(active.deployment)
        if target is None:
            raise ResourceError(
                f"{name} is deployed at {where(active.deployment)}; only servers on this machine can be stopped or "
                "started"
            )
        yield ledger, active, target


def _table_text(deployments: Sequence[tuple[str, ActiveRelease]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "version", "where", "endpoint", "state", "log"):
        table.add_column(column, overflow="fold")
    for name, active in deployments:
        deployment = active.deployment
        log = deployment.details.get("log", "")
        table.add_row(name, active.release.version, deployment.target, deployment.url or "none", state(active), log)
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    with out.capture() as text:
        out.print(table)
    return text.get()


def _to_json(name: str, active: ActiveRelease) -> dict[str, Any]:
    deployment = active.deployment
    return {
        "name": name,
        "version": active.release.version,
        "target": deployment.target,
        "url": deployment.url,
        "model": deployment.model,
        "state": state(active),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 if the model has no deployment on this machine; 1 if a server does not
    start."""
    parser = RootParser(
        prog="python -m flows.runs deployments",
        description="Lists the models that runs have deployed; stops and starts their servers on this machine.",
    )
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--stop", metavar="NAME", help="stop the server of this model")
    act.add_argument("--start", metavar="NAME", help="start the server of this model again, on its previous port")
    act.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args(argv)
    root = options.root
    try:
        if options.stop or options.start:
            print(stop(root, options.stop) if options.stop else start(root, options.start))
            return 0
    except ResourceError as error:
        print_message(error)
        return 2
    except EspalierError as error:
        print_message(f"{type(error).__name__}: {error}")
        return 1
    deployments = [(ledger.name, active) for ledger in ledgers(root) if (active := ledger.active()) is not None]
    if options.json:
        print(json.dumps([_to_json(name, active) for name, active in deployments]))
    else:
        print(
            _table_text(deployments) if deployments else f"no active deployments below {root}",
            end="" if deployments else "\n",
        )
    return 0
