"""Retention of artifacts that registered versions and deployments point to.

A version in MLflow's registry points to its export, and to the checkpoint and the evaluation that later runs are
compared with while the version is champion. A deployment points to its export. These artifacts are retained even if no
recorded run needs them.

Each run's configuration names its MLflow store. When a run is forgotten, `<root>/mlflow/stores.json` records every
store outside the root whose versions point below it, so that later commands still query the store.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from components.artifacts.names import is_key
from components.deployment.targets.spec import local_target
from components.errors import ResourceError
from components.json_text import parse_json, write_json
from components.redaction import mask_text
from flows.history.records import RunRecord
from flows.release.deployment_ledger import ActiveRelease, ledgers
from flows.terminal.exit_codes import print_message

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from components.tracking.registry import Version

STORES = Path("mlflow", "stores.json")
SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Holder:
    """Registered version or deployment that points to artifacts below a root."""

    title: str
    """Title such as `shop version 3 (champion)`."""
    why: str
    """Reason for the retention: the title and its relation to the artifacts."""
    export: str
    """Key of its export."""
    keys: frozenset[str]
    """Keys of all artifacts that it points to."""
    version: Version | None = None
    """None for a deployment."""
    store: MLflowStore | None = None
    """MLflow store of the version; None for a deployment."""
    in_use: ActiveRelease | None = None
    """Active release of a deployment; None for a version."""

    @property
    def served(self) -> bool:
        """True if a server on this machine has the export loaded."""
        target = None if self.in_use is None else local_target(self.in_use.deployment)
        return self.in_use is not None and target is not None and target.alive(self.in_use.deployment)


class MLflowStore:
    """MLflow store with runs of a root."""

    def __init__(self, root: Path, uri: str | None, runs: Sequence[RunRecord]):
        self.root = root
        self.uri = uri
        """URI in the configuration; None is the root's own database."""
        self.runs = runs
        """Recorded runs that were tracked there."""

    @cached_property
    def client(self) -> MlflowClient:
        """Client of the store. Raises ResourceError if the store cannot be used."""
        from components.tracking.spec import TrackingSpec
        from components.tracking.store import connect, local_uri

        uri = TrackingSpec(uri=self.uri).resolved_uri() or local_uri(self.root)
        database = Path(uri.removeprefix(SQLITE))
        if uri.startswith(SQLITE) and not database.is_file():
            raise ResourceError(f"the MLflow database {database} does not exist")
        return connect(uri, self.root / "mlflow" / "artifacts")

    @cached_property
    def holders(self) -> list[Holder]:
        """Versions that point below the root. Raises ResourceError if the store cannot be used."""
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
        """Mark a version as deleted. Raises ResourceError if the store refuses."""
        from mlflow.exceptions import MlflowException

        from components.tracking.registry import Registry

        try:
            Registry(self.client).delete(version)
        except MlflowException as error:
            raise ResourceError(
                mask_text(f"MLflow failed to delete {version.name} version {version.number}: {error}")
            ) from error

    def delete_run(self, run: RunRecord) -> None:
        """Mark a run as deleted if the store has it. Raises ResourceError if the store refuses."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.delete_run(run.id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise ResourceError(mask_text(f"MLflow failed to delete run {run.short}: {error}")) from error


class Retention:
    """Artifacts of a root that versions and deployments retain while some of its runs are forgotten.

    recorded: all runs. forgotten: subset of the runs to be forgotten. give_up: also release the artifacts of versions
    and deployments of these runs.
    """

    def __init__(self, root: Path, recorded: Sequence[RunRecord], forgotten: Sequence[RunRecord], give_up: bool):
        self.root = root
        self.forgotten = forgotten
        self.give_up = give_up
        self._stores = _stores(root, recorded)
        self._forgotten_keys = {stage.key for run in forgotten for stage in run.stages}

    @cached_property
    def holders(self) -> list[Holder]:
        """Versions and deployments that point below the root.

        Raises ResourceError if an MLflow store cannot be queried. If all runs of that store are given up, the store is
        skipped with a message on standard error instead.
        """
        holders = [*_deployments(self.root)]
        for store in list(self._stores):
            try:
                holders += store.holders
            except ResourceError as error:
                self._skip_store(store, error)
        return holders

    @property
    def retained(self) -> dict[str, Holder]:
        """Holder of each retained artifact, by the artifact's key; without holders that are given up."""
        return {
            key: holder
            for holder in self.holders
            if not (self.give_up and holder.export in self._forgotten_keys)
            for key in holder.keys
        }

    def holders_of(self, exports: Collection[str]) -> list[Holder]:
        """Return the versions and deployments of exports that are to be deleted. Raises ResourceError if a server on
        this machine has one loaded."""
        holders = [holder for holder in self.holders if holder.export in exports]
        for holder in holders:
            if holder.in_use is not None and holder.served:
                raise ResourceError(
                    f"{holder.why}, and its server is up. Stop it first: python -m flows.runs deployments "
                    f"{shlex.quote(f'root={self.root}')} --stop {shlex.quote(holder.in_use.release.name)}"
                )
        return holders

    def unregistered_runs(self, dropped: Collection[Holder]) -> list[tuple[RunRecord, MLflowStore]]:
        """Return the forgotten runs that keep no version once `dropped` is deleted, each with its store."""
        remaining = [holder for holder in self.holders if holder not in dropped]
        registered = {holder.version.tags.get("run_id") for holder in remaining if holder.version is not None}
        return [
            (run, store)
            for store in self._stores
            for run in store.runs
            if run in self.forgotten and run.id not in registered
        ]

    def forget(self, dropped: Collection[Holder]) -> None:
        """Mark the dropped versions, and the forgotten runs without a remaining version, as deleted in MLflow.

        Record the stores that later commands have to query. Raises ResourceError if a store refuses.
        """
        runs = self.unregistered_runs(dropped)
        for holder in dropped:
            if holder.store is not None and holder.version is not None:
                holder.store.delete_version(holder.version)
        for run, store in runs:
            store.delete_run(run)
        _remember(self.root, [store.uri for store in self._stores if store.uri and store.holders])

    def _skip_store(self, store: MLflowStore, error: ResourceError) -> None:
        """Skip an unusable store if all its runs are given up. Raises ResourceError for any other store."""
        runs = [run for run in store.runs if not (self.give_up and run in self.forgotten)]
        if store.runs and not runs and store.uri not in _remembered(self.root):
            self._stores.remove(store)
            print_message(f"deletions are not recorded in MLflow: {error}")
            return
        forget = " ".join(f"--forget {run.short}" for run in runs)
        remedy = f"forget its runs: {forget} --forget-champion" if runs else f"remove it from {self.root / STORES}"
        raise ResourceError(
            f"cannot query MLflow at {mask_text(store.uri or str(self.root))} for the artifacts of its registered "
            f"versions: {error}. Start it; if it no longer exists, {remedy}"
        ) from error


def _stores(root: Path, recorded: Iterable[RunRecord]) -> list[MLflowStore]:
    """Return the MLflow stores that may have versions below the root; the root's own store only if it exists."""
    by_uri: dict[str | None, list[RunRecord]] = {uri: [] for uri in (None, *_remembered(root))}
    for run in recorded:
        by_uri.setdefault((run.spec.get("tracking") or {}).get("uri"), []).append(run)
    has_local_store = (root / "mlflow" / "mlflow.db").is_file()
    return [MLflowStore(root, uri, runs) for uri, runs in by_uri.items() if uri is not None or has_local_store]


def _deployments(root: Path) -> Iterator[Holder]:
    """Yield the active deployments whose export is below the root."""
    for ledger in ledgers(root):
        active = ledger.active()
        if active is None or (export := _key(root, active.release.folder)) is None:
            continue
        title = f"{active.release.name} version {active.release.version}"
        why = f"{title} is deployed ({active.deployment.target} {active.deployment.url or active.deployment.model})"
        yield Holder(title, why, export, frozenset({export}), in_use=active)


def _of_version(root: Path, version: Version, store: MLflowStore) -> Holder | None:
    for uri in (version.source, version.tags.get("uri", "")):
        parts = urlsplit(uri)
        if parts.scheme in ("", "file") and (export := _key(root, Path(unquote(parts.path)))) is not None:
            break
    else:
        return None
    references = {version.tags.get(name, "") for name in ("policy_key", "evaluation_key")}
    aliases = f" ({', '.join(version.aliases)})" if version.aliases else ""
    title = f"{version.name} version {version.number}{aliases}"
    return Holder(title, f"{title} points to it", export, frozenset({export, *references} - {""}), version, store)


def _key(root: Path, path: Path) -> str | None:
    """Return the key of the artifact that contains a path, or None if it is in no artifact below the root."""
    store = (root / "artifacts").resolve()
    path = path.resolve()
    if not path.is_relative_to(store) or path == store:
        return None
    key = path.relative_to(store).parts[0]
    return key if is_key(key) else None


def _remember(root: Path, uris: Iterable[str]) -> None:
    """Add the URIs of stores outside the root to `STORES`."""
    recorded = _remembered(root)
    new = [uri for uri in uris if uri not in recorded]
    if new:
        write_json(root / STORES, [*recorded, *new])


def _remembered(root: Path) -> list[str]:
    """Return the URIs that `_remember` wrote. Raises ResourceError if the file is invalid."""
    path = root / STORES
    if not path.is_file():
        return []
    try:
        uris = parse_json(path.read_bytes())
    except ValueError:
        uris = None
    if not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
        raise ResourceError(f"{path}: expected a JSON list of the URIs of MLflow stores")
    return uris
