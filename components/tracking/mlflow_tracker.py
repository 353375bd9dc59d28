"""Tracker: one MLflow run per flow run.

It uses `MlflowClient` with explicit run ids. MLflow's fluent functions keep the active run in a thread-local global,
which breaks as soon as stages run on several threads; a tracker may be used from any thread.

Logged are: the composed configuration as parameters and as `config.yaml`; numbers as metrics by step; the small files
of every artifact (below 1 MiB) and a reference to the rest, under `stages/<label>/`; trajectory sets as input datasets,
checkpoints as logged models, exports as versions in the model registry. Nothing large is copied. Secrets are masked
before they are logged.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from components.errors import Problem, ResourceError, SpecError
from components.redaction import mask, mask_text
from components.tracking import lineage, registry, store, traces
from components.tracking.outbox import Outbox
from components.tracking.params import MAX_NAME, clean_name, flatten
from components.tracking.spec import TrackingSpec
from components.tracking.stages import METRICS_ONLY, StageTracking
from components.tracking.store import ui_command
from components.trajectories.schema import Score, Trajectory

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from components.artifacts import Artifact

logger = logging.getLogger(__name__)

_BATCH = 100
"""Maximum number of parameters or tags per request (a limit of MLflow)."""
_MAX_TAG = 8000
"""Maximum length of a tag in characters (a limit of MLflow)."""


class Tracker:
    """Tracker of one run. Created by `Tracker.open`; use it in a `with` block, or call `finish`."""

    def __init__(self, client: MlflowClient, uri: str, experiment_id: str, run_id: str, artifact_uri: str, traces: int):
        self.client = client
        self.uri = uri
        """Absolute URI of the store."""
        self.experiment_id = experiment_id
        self.run_id = run_id
        self.artifact_uri = artifact_uri
        """Location of this run's files."""
        self.traces = traces
        self.outbox = Outbox(mask_text(uri))
        """Queue of writes that may be delayed while MLflow is unreachable."""

    @classmethod
    def open(
        cls,
        root: str | Path,
        spec: TrackingSpec,
        name: str,
        parent_run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        run_name: str | None = None,
        resumed: str = "",
    ) -> Self:
        """Open the store (created on first use), find or create the MLflow experiment and start a run in it.

        `name` is the experiment's own name; `parent_run_id` makes the run a child, for sweeps and for stages placed
        elsewhere; `resumed` is the id of an earlier run to continue. Raises ResourceError if the store cannot be
        used, SpecError if the experiment was deleted.
        """
        root = Path(root).absolute()
        uri = spec.resolved_uri() or store.local_uri(root)
        artifacts = root / "mlflow" / "artifacts"
        client = store.connect(uri, artifacts)
        from mlflow.exceptions import MlflowException

        try:
            experiment_id = _experiment(client, spec.experiment or name, artifacts)
            run = (
                client.get_run(resumed)
                if resumed
                else client.create_run(
                    experiment_id,
                    run_name=mask_text(run_name or "") or f"{name} {time.strftime('%Y-%m-%d %H:%M:%S')}",
                    tags={
                        "mlflow.source.name": "espalier",
                        **({"mlflow.parentRunId": parent_run_id} if parent_run_id else {}),
                        **{key: mask_text(value) for key, value in (tags or {}).items()},
                    },
                )
            )
        except MlflowException as error:
            raise ResourceError(mask_text(f"The MLflow store at {uri} cannot be used: {error}")) from error
        logger.debug("MLflow run %s in experiment %s", run.info.run_id, experiment_id)
        return cls(client, client.tracking_uri, experiment_id, run.info.run_id, run.info.artifact_uri, spec.traces)

    @property
    def url(self) -> str | None:
        """URL of this run in MLflow's UI; None if the store is a database without a server."""
        if not self.uri.startswith(("http://", "https://")):
            return None
        return f"{mask_text(self.uri)}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    @property
    def ui_command(self) -> str:
        """Shell command that shows this run in a browser."""
        if self.url is not None:
            return f"open {self.url}"
        return ui_command(self.uri)

    def running(self, tag: str, value: str) -> list[str]:
        """Return the ids of the runs with status RUNNING whose tag has this value, in all experiments."""
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        query = f"attributes.status = 'RUNNING' AND tags.`{tag}` = '{value}'"
        return [run.info.run_id for run in self.client.search_runs(experiments, query)]

    # Configuration

    def log_config(
        self,
        config: Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        versions: Mapping[str, str] | None = None,
        git_commit: str | None = None,
    ) -> None:
        """Log the composed configuration: flat parameters, `config.yaml`, `overrides.txt`, `versions.json`, tags."""
        from mlflow.entities import Param, RunTag

        masked = mask(dict(config))
        masked_overrides = [mask_text(override) for override in overrides]
        params = [Param(key, value) for key, value in flatten(masked).items()]
        tags = [RunTag("overrides", " ".join(masked_overrides)[:_MAX_TAG])]
        tags += [RunTag(f"version.{package}", version) for package, version in (versions or {}).items()]
        if git_commit:
            tags.append(RunTag("mlflow.source.git.commit", git_commit))
        for start in range(0, max(len(params), len(tags)), _BATCH):
            batch = slice(start, start + _BATCH)
            self.client.log_batch(self.run_id, params=params[batch], tags=tags[batch])
        self.client.log_text(self.run_id, _yaml(masked), "config.yaml")
        if masked_overrides:
            self.client.log_text(self.run_id, "\n".join(masked_overrides) + "\n", "overrides.txt")
        if versions:
            self.client.log_dict(self.run_id, dict(versions), "versions.json")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        from mlflow.entities import RunTag

        run_tags = [RunTag(clean_name(key), mask_text(value)[:_MAX_TAG]) for key, value in tags.items()]
        self.client.log_batch(self.run_id, tags=run_tags)

    # Numbers

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log metrics in one request. Names are paths such as `train/kl` or `eval/success`."""
        from mlflow.entities import Metric

        if not metrics:
            return
        now = int(time.time() * 1000)
        points = [Metric(clean_name(key), float(value), now, step) for key, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=points)

    # Artifacts

    def log_stage(
        self,
        artifact: Artifact,
        label: str,
        status: str,
        seconds: float,
        step: int = 0,
        origin: Mapping[str, str] | None = None,
        group: str = "",
        tracking: StageTracking = METRICS_ONLY,
    ) -> None:
        """Log the results of a stage: its small files and a reference to all of them under `stages/<label>/`, its
        metrics (`train/kl`) and its time (`time/train`) at `step`.

        `label` names the stage in this run, as `round 3/train`; `status` is `ran` or `cached`; `seconds` is its time in
        this run. `origin` describes the source of a checkpoint, as tags of its logged model. `group`, such as
        `refill_1/`, is a prefix of the metric names. `tracking` is the presentation that the stage declares.
        """
        prefix = tracking.prefix or artifact.stage
        metrics = {f"{prefix}/{key}": value for key, value in artifact.metrics.items()}
        metrics[f"time/{artifact.stage}"] = seconds
        self.log_metrics({f"{group}{name}": value for name, value in metrics.items()}, step)
        reference, small = lineage.describe(artifact, label, status, seconds)
        folder = f"stages/{_path(label)}"
        with tempfile.TemporaryDirectory(prefix="espalier-") as scratch:
            for source in small:
                target = Path(scratch) / source.relative_to(artifact.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source.absolute())  # MLflow copies the link's target
            self.client.log_artifacts(self.run_id, scratch, folder)
        self.client.log_dict(self.run_id, reference, f"{folder}/artifact.json")
        if tracking.dataset is not None:
            lineage.log_dataset(self.client, self.run_id, artifact, label, tracking.dataset)
        if tracking.model:
            lineage.log_checkpoint(self.client, self.experiment_id, self.run_id, artifact, label, step, origin)
            self.set_tags({f"checkpoint.{label}": artifact.digest})

    def log_trajectories(
        self, trajectories: Sequence[Trajectory], label: str, scores: Mapping[str, Score] | None = None
    ) -> list[str]:
        """Log a sample of the episodes (`tracking.traces` of them) as MLflow traces; return their ids. scores: the
        judge's scores, by trajectory id."""
        from mlflow.tracing.client import TracingClient

        chosen = traces.sample(trajectories, self.traces)
        if not chosen:
            return []
        tracing = TracingClient(self.client.tracking_uri)
        start_ms = int(time.time() * 1000)
        ids, spans = [], []
        for trajectory in chosen:
            info, trace_spans = traces.to_trace(
                trajectory,
                experiment_id=self.experiment_id,
                run_id=self.run_id,
                label=label,
                start_ms=start_ms,
                score=(scores or {}).get(trajectory.id),
            )
            tracing.start_trace(info)
            ids.append(info.trace_id)
            spans += trace_spans
        tracing.log_spans(self.experiment_id, spans)
        return ids

    def log_report(self, html: str, name: str = "report.html") -> str:
        """Log a rendered report; return its path, or its URI if the files are stored elsewhere."""
        self.client.log_text(self.run_id, html, name)
        parts = urlsplit(self.artifact_uri)
        folder = unquote(parts.path) if parts.scheme in ("", "file") else self.artifact_uri
        return f"{folder.rstrip('/')}/{name}"

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Log a copy of one small file, such as the run's log."""
        self.client.log_artifact(self.run_id, str(path), folder)

    @property
    def registry(self) -> registry.Registry:
        """Aliases and tags of registered models."""
        return registry.Registry(self.client)

    def register_model(
        self, name: str, export: Artifact, *, policy_digest: str, tags: Mapping[str, str] | None = None
    ) -> str:
        """Register an exported model; return the number of its version. Registered by reference: its source is the
        export's folder, nothing is copied. An export that is already registered keeps its version.

        A tracking server rejects sources on a client's disk. There the source is `stages/export` of this run, which
        contains the reference, and the tag `uri` is the location of the weights.
        """
        uri = export.path.absolute().as_uri()
        source = uri
        if self.uri.startswith(("http://", "https://")):
            reference = {"uri": uri, "key": export.key, "digest": export.digest}
            self.client.log_dict(self.run_id, reference, "stages/export/reference.json")
            source = f"runs:/{self.run_id}/stages/export"
        return lineage.register(
            self.client,
            registry.clean(name),
            source,
            run_id=self.run_id,
            stage_key=export.key,
            tags={
                "run_id": self.run_id,
                "policy_digest": policy_digest,
                "digest": export.digest,
                "uri": uri,
                **(tags or {}),
            },
            description=f"Exported by run {self.run_id}.",
        )

    # End of the run

    def finish(self, status: str = "FINISHED") -> None:
        """End the run: `FINISHED`, `FAILED`, or `KILLED` if a person stopped it."""
        self.outbox.put(lambda: self.client.set_terminated(self.run_id, status.upper()))
        self.outbox.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.finish("KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")


def _experiment(client: MlflowClient, name: str, artifacts: Path) -> str:
    """Return the id of the MLflow experiment called `name`; create it if needed."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        local = client.tracking_uri.startswith("sqlite:")
        location = (artifacts / _path(name)).as_uri() if local else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another process created it first
    if experiment.lifecycle_stage != "active":
        raise SpecError(
            [
                Problem(
                    "tracking.experiment",
                    f"the MLflow experiment '{name}' was deleted; restore it with `mlflow experiments restore "
                    f"--experiment-id {experiment.experiment_id}`, or set another name",
                )
            ]
        )
    return experiment.experiment_id


def _path(label: str) -> str:
    """Return the label as a relative path: letters, digits, dots and dashes; a slash separates folders."""
    parts = [re.sub(r"[^\w.-]+", "-", part).strip(".-") for part in label.split("/")]
    return "/".join(part for part in parts if part)[:MAX_NAME] or "unnamed"


def _yaml(data: Any) -> str:
    import yaml

    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
