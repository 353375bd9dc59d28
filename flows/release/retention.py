"""Artifacts that outlive their runs: what versions in MLflow's registry and deployments point to.

A registered version points to its export, and to the checkpoint and the evaluation that a later run is compared with
when the version is champion; a deployment points to its export. They are kept when no recorded run needs them.

Each run has the MLflow store that its configuration names. A store outside the root whose versions point below it is
written down in `<root>/mlflow/stores.json` when a run is forgotten, so that it is still asked when no record names it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from components.artifacts.names import is_key
from components.deployment.targets.spec import LocalTarget
from components.errors import ResourceError
from components.json_text import parse_json
from components.redaction import mask_text
from flows.history.records import RunRecord
from flows.release.deployment_ledger import InUse, ledgers

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from components.tracking.registry import Version

STORES = Path("mlflow", "stores.json")
SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Holder:
    """A registered version or a deployment that points to artifacts below a root."""

    title: str
    """`shop version 3 (champion)`."""
    why: str
    """The title with what it has to do with the artifacts."""
    export: str
    """Key of its export."""
    keys: frozenset[str]
    """Keys of all artifacts that it points to."""
    version: Version | None = None
    """None for a deployment."""
    store: MLflowStore | None = None
    """The store that has the version."""
    in_use: InUse | None = None
    """None for a version."""

    @property
    def served(self) -> bool:
        """Whether a server on this machine has the export loaded."""
        used = self.in_use
        return used is not None and used.deployment.target == "local" and LocalTarget().build().alive(used.deployment)


class MLflowStore:
    """A store of MLflow in which runs below a root were tracked."""

    def __init__(self, root: Path, uri: str | None, runs: Sequence[RunRecord]):
        self.root = root
        self.uri = uri
        """As the configuration names it; None is the root's own database."""
        self.runs = runs
        """The recorded runs that were tracked there."""

    @cached_property
    def client(self) -> MlflowClient:
        """Raises ResourceError where the store cannot be used."""
        from components.tracking.spec import TrackingSpec
        from components.tracking.store import connect, local_uri

        uri = TrackingSpec(uri=self.uri).resolved_uri() or local_uri(self.root)
        database = Path(uri.removeprefix(SQLITE))
        if uri.startswith(SQLITE) and not database.is_file():
            raise ResourceError(f"there is no MLflow database {database}")
        return connect(uri, self.root / "mlflow" / "artifacts")

    @cached_property
    def holders(self) -> list[Holder]:
        """The versions that point below the root. Raises ResourceError where the store cannot be used."""
        from mlflow.exceptions import MlflowException

        from components.tracking.registry import Registry

        try:
            return [
                holder
                for version in Registry(self.client).versions()
                if (holder := _of_version(self.root, version, self)) is not None
            ]
        except MlflowException as error:
            raise ResourceError(mask_text(str(error))) from error

    def delete_version(self, version: Version) -> None:
        """Mark a version as deleted. Raises ResourceError where the store refuses."""
        from mlflow.exceptions import MlflowException

        from components.tracking.registry import Registry

        try:
            Registry(self.client).delete(version)
        except MlflowException as error:
            raise ResourceError(
                mask_text(f"MLflow does not delete {version.name} version {version.number}: {error}")
            ) from error

    def delete_run(self, run: RunRecord) -> None:
        """Mark a run as deleted, where the store knows it. Raises ResourceError where the store refuses."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.delete_run(run.id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise ResourceError(mask_text(f"MLflow does not delete run {run.short}: {error}")) from error


class Retention:
    """What versions and deployments point to below a root, when some of its runs are forgotten.

    recorded: all runs. forgotten: those of them that go. give_up: whether what the versions and deployments of these
    runs point to may go, too.
    """

    def __init__(self, root: Path, recorded: Sequence[RunRecord], forgotten: Sequence[RunRecord], give_up: bool):
        self.root = root
        self.forgotten = forgotten
        self.give_up = give_up
        self._stores = _stores(root, recorded)
        self._made = {stage.key for run in forgotten for stage in run.stages}

    @cached_property
    def holders(self) -> list[Holder]:
        """Every version and deployment that points below the root. Raises ResourceError for a store of MLflow that
        cannot be asked; where all its runs are given up, standard error says so and nothing is known of it."""
        found = [*_deployed(self.root)]
        for store in list(self._stores):
            try:
                found += store.holders
            except ResourceError as error:
                self._without(store, error)
        return found

    @property
    def held(self) -> dict[str, Holder]:
        """By key of an artifact: what points to it and is not given up."""
        return {
            key: holder
            for holder in self.holders
            if not (self.give_up and holder.export in self._made)
            for key in holder.keys
        }

    def dropped(self, keys: Collection[str]) -> list[Holder]:
        """The versions and deployments whose export is among artifacts that go. Raises ResourceError where a server on
        this machine has one loaded."""
        found = [holder for holder in self.holders if holder.export in keys]
        for holder in found:
            if holder.in_use is not None and holder.served:
                raise ResourceError(
                    f"{holder.why}, and its server is up. End it first: python -m flows.deployments "
                    f"{shlex.quote(f'root={self.root}')} --stop {shlex.quote(holder.in_use.release.name)}"
                )
        return found

    def unregistered(self, dropped: Collection[Holder]) -> list[tuple[RunRecord, MLflowStore]]:
        """Forgotten runs without a version that stays, each with its store."""
        stay = [holder for holder in self.holders if holder not in dropped]
        makers = {holder.version.tags.get("run_id") for holder in stay if holder.version is not None}
        return [
            (run, store)
            for store in self._stores
            for run in store.runs
            if run in self.forgotten and run.id not in makers
        ]

    def forget(self, dropped: Collection[Holder]) -> None:
        """Mark the dropped versions and the forgotten runs that have none as deleted in MLflow, and write down the
        stores that are still to be asked. Raises ResourceError where a store refuses."""
        runs = self.unregistered(dropped)
        for holder in dropped:
            if holder.store is not None and holder.version is not None:
                holder.store.delete_version(holder.version)
        for run, store in runs:
            store.delete_run(run)
        _remember(self.root, [store.uri for store in self._stores if store.uri and store.holders])

    def _without(self, store: MLflowStore, error: ResourceError) -> None:
        """Go on without a store that has no runs but those that are given up. Raises ResourceError for any other."""
        runs = [run for run in store.runs if not (self.give_up and run in self.forgotten)]
        if store.runs and not runs and store.uri not in _remembered(self.root):
            self._stores.remove(store)
            print(f"MLflow is not told of what is deleted: {error}", file=sys.stderr)
            return
        forget = " ".join(f"--forget {run.short}" for run in runs)
        instead = f"forget its runs: {forget} --forget-champion" if runs else f"take it out of {self.root / STORES}"
        raise ResourceError(
            f"MLflow at {mask_text(store.uri or str(self.root))} cannot be asked which artifacts its registered "
            f"versions point to: {error}. Start it; if it is gone for good, {instead}"
        ) from error


def _stores(root: Path, recorded: Iterable[RunRecord]) -> list[MLflowStore]:
    """The MLflow stores that may have versions below the root; the root's own only where it exists."""
    by_uri: dict[str | None, list[RunRecord]] = {uri: [] for uri in (None, *_remembered(root))}
    for run in recorded:
        by_uri.setdefault((run.spec.get("tracking") or {}).get("uri"), []).append(run)
    own = (root / "mlflow" / "mlflow.db").is_file()
    return [MLflowStore(root, uri, runs) for uri, runs in by_uri.items() if uri is not None or own]


def _deployed(root: Path) -> Iterator[Holder]:
    """Yield the deployments whose export is below the root."""
    for ledger in ledgers(root):
        used = ledger.present()
        if used is None or (export := _key(root, used.release.folder)) is None:
            continue
        title = f"{used.release.name} version {used.release.version}"
        why = f"{title} is deployed ({used.deployment.target} {used.deployment.url or used.deployment.model})"
        yield Holder(title, why, export, frozenset({export}), in_use=used)


def _of_version(root: Path, version: Version, store: MLflowStore) -> Holder | None:
    for uri in (version.source, version.tags.get("uri", "")):
        parts = urlsplit(uri)
        if parts.scheme in ("", "file") and (export := _key(root, Path(unquote(parts.path)))) is not None:
            break
    else:
        return None
    others = {version.tags.get(name, "") for name in ("policy_key", "evaluation_key")}
    aliases = f" ({', '.join(version.aliases)})" if version.aliases else ""
    title = f"{version.name} version {version.number}{aliases}"
    return Holder(title, f"{title} points to it", export, frozenset({export, *others} - {""}), version, store)


def _key(root: Path, path: Path) -> str | None:
    """Return the key of the artifact below a root that a path is in."""
    store = (root / "artifacts").resolve()
    path = path.resolve()
    if not path.is_relative_to(store) or path == store:
        return None
    key = path.relative_to(store).parts[0]
    return key if is_key(key) else None


def _remember(root: Path, uris: Iterable[str]) -> None:
    """Write down the addresses of stores outside the root."""
    known = _remembered(root)
    more = [uri for uri in uris if uri not in known]
    if more:
        path = root / STORES
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps([*known, *more], indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def _remembered(root: Path) -> list[str]:
    """Return the addresses that `_remember` wrote. Raises ResourceError where the file was changed to something
    else."""
    path = root / STORES
    if not path.is_file():
        return []
    try:
        found = parse_json(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(uri, str) for uri in found):
        raise ResourceError(f"{path}: expected a JSON list of the addresses of MLflow stores")
    return found
