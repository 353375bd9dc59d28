"""Trust in the record of a run, which may be another person's: a root can be shared or copied.

A record names packages, programs, servers, files and a store. This module is the door to them: without `--trust`, a
command that would run them refuses, and one that only reads does without the record's store. Nothing is imported,
started, contacted or read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from components.artifacts.files import store_uri
from components.errors import Problem, SpecError
from components.specs.access import accesses
from flows.history.records import RunRecord
from flows.history.store_reader import StoreReader, open_reader
from flows.stages.base import Request, StageSpec
from flows.stages.execute import stage_and_spec
from flows.terminal.exit_codes import print_message


def admit(reaches: Iterable[str], where: str, trust: bool, say: Callable[[str], None] = print_message) -> None:
    """Print what of a record reaches out of its run. Raise SpecError if something does and is not trusted."""
    lines = list(reaches)
    if lines and not trust:
        text = f"{where}: {'; '.join(lines)}. These settings of the record run only with --trust"
        raise SpecError([Problem("--trust", text)])
    for line in lines:
        say(f"trusted: {line}")


def code_of(allow: Iterable[str] | None) -> list[str]:
    """Return what the packages of a record reach: validation of its other settings already imports them."""
    return [f"allow = {', '.join(allow)} runs code"] if allow else []


def admit_request(request: Request, where: str, trust: bool) -> StageSpec:
    """Return the spec of a recorded request. Raises SpecError if it reaches out of the run and is not trusted."""
    code = code_of(request.allow)
    if code and not trust:
        admit(code, where, trust)
    spec = stage_and_spec(request)[1]
    admit([*code, *map(str, accesses(spec))], where, trust)
    return spec


def readable_store(run: RunRecord, root: Path, trust: bool, own: str | None = None) -> str | None:
    """Return the URI of a run's store; None if it has none, or if the store is outside of the root and not trusted.
    own: store of the caller's configuration, which is trusted."""
    uri = run.spec.get("store")
    if not isinstance(uri, str) or not uri or trust or uri == own or _is_inside(uri, root):
        return uri or None
    print_message(
        f"run {run.short}: store = {uri:.200} is read only with --trust; artifacts that only it has count as missing"
    )
    return None


def recorded_reader(root: Path, run: RunRecord, trust: bool, own: str | None = None) -> StoreReader:
    """Return a view of the artifacts below a root, and of those that only the run's store has if that may be read."""
    return open_reader(root, readable_store(run, root, trust, own))


def _is_inside(uri: str, root: Path) -> bool:
    """Return True for a folder below the root."""
    try:
        protocol, _, path = store_uri(uri).partition("://")
    except ValueError:
        return False
    return protocol == "file" and Path(path).resolve().is_relative_to(root.resolve())
