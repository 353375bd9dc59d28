"""Deployment of a champion with a canary check and rollback.

`<root>/deployments/NAME.json` records the active deployment of each model. The previous deployment stays up until the
new one has passed its canary, except for a local server on a fixed port, which has to stop first. If the deployment or
its canary fails, the new deployment is removed, the previous one stays up or is started again, and the alias `champion`
returns to the previous version.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from components.artifacts import Artifact
from components.deployment.canary import check_endpoint
from components.deployment.targets.base import Deployment, DeploymentTarget, Release
from components.errors import DeployError, EspalierError
from components.inference.engines.remote import RemoteEngine, RemoteSpec
from flows.history.records import Notice
from flows.release.champion import ALIAS, Decision
from flows.release.deployment_ledger import ActiveRelease, Ledger, where

if TYPE_CHECKING:
    from components.tracking.registry import Registry
    from flows.execution.executor import Execution
    from flows.experiment.spec import ExperimentSpec


@dataclass(frozen=True)
class ReleaseOutcome:
    """Outcome of a deployment."""

    state: str
    """`deployed`, `already` (deployed before), `skipped` (not champion) or `rolled back`."""
    text: str
    url: str | None = None
    model: str | None = None
    agreement: float | None = None
    """Share of the canary's prompts for which endpoint and policy gave the same answer."""
    error: EspalierError | None = None
    """Reason of a rollback."""

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "url": self.url, "model": self.model, "agreement": self.agreement}


class CanaryEndpoint(RemoteSpec):
    """Endpoint that is asked before it replaces the previous deployment."""

    key_path: ClassVar[str] = "deploy.canary"


def release(
    execution: Execution, export: Artifact, decision: Decision, step: int, registry: Registry
) -> ReleaseOutcome:
    """Deploy a champion to `deploy.target`. Errors of the target are returned in the outcome, not raised."""
    spec = execution.spec
    assert spec.deploy.target is not None
    new = Release(decision.name, decision.version, export.digest, export.path / "merged", spec.model.max_length)
    ledger = Ledger(Path(spec.root), decision.name)
    with ledger.lock():
        outcome = _release(execution, ledger, spec.deploy.target, new, export, decision)
        if outcome.state == "rolled back":
            _restore_champion(registry, decision)
    execution.notice(Notice("deployment", step, outcome.text))
    return outcome


def _release(
    execution: Execution, ledger: Ledger, target: DeploymentTarget, new: Release, export: Artifact, decision: Decision
) -> ReleaseOutcome:
    kind, previous = target.name, ledger.active()
    if not decision.is_champion:
        return ReleaseOutcome("skipped", f"{new.name} version {new.version} is not deployed: it is not champion")
    alive = previous is not None and previous.deployment.target == kind and target.alive(previous.deployment)
    if previous is not None and alive and previous.release.digest == new.digest and not _moves(target, previous):
        text = f"{new.name} version {new.version} is in use already at {where(previous.deployment)}"
        return ReleaseOutcome("already", text, previous.deployment.url, previous.deployment.model)
    stopped = previous is not None and alive and _same_port(target, previous.deployment)
    deployed: Deployment | None = None
    try:
        if stopped and previous is not None:
            target.take_back(previous.deployment)
        execution.console.line(f"deploying {new.name} version {new.version} to {kind} …")
        deployed = target.deploy(new, ledger.folder)
        agreement = _canary(execution, deployed, export)
    except (EspalierError, KeyboardInterrupt) as error:
        rollback = _roll_back(target, ledger, previous if alive else None, deployed, stopped)
        text = f"{new.name} version {new.version} is not in use at {kind}: {str(error) or 'stopped'}. {rollback}"
        if isinstance(error, KeyboardInterrupt):
            raise
        return ReleaseOutcome("rolled back", text, error=DeployError(text))
    text = f"{new.name} version {new.version} is in use at {where(deployed)}"
    text += f"; canary: {agreement:.0%} of its prompts answered as the policy does" if agreement is not None else ""
    ledger.write(ActiveRelease(new, deployed), "deployed", text)
    if previous is not None and alive and not stopped and not target.keeps_previous:
        target.take_back(previous.deployment)
    return ReleaseOutcome("deployed", text, deployed.url, deployed.model, agreement)


def _canary(execution: Execution, deployed: Deployment, export: Artifact) -> float | None:
    if deployed.url is None:
        return None
    spec = execution.spec.deploy.canary
    fixed = {"store": False} if deployed.target == "local" else {}  # its prompts are no users' conversations
    with closing(RemoteEngine(canary_endpoint(deployed, spec.timeout), fixed=fixed)) as engine:
        return check_endpoint(engine, deployed, export.path, prompts=spec.prompts, agreement=spec.agreement)


def canary_endpoint(deployment: Deployment, timeout: float) -> CanaryEndpoint:
    """Return the spec of the engine that asks a deployment. timeout: seconds for one answer, and for which a failing
    endpoint is retried."""
    assert deployment.url is not None, f"{deployment.target} has no endpoint"
    return CanaryEndpoint(
        url=deployment.url,
        model=deployment.model,
        key_variable=deployment.key_variable,
        tokens=False,
        timeout=timeout,
        retry_for=timeout,
        wait_for=timeout,
    )


def _roll_back(
    target: DeploymentTarget, ledger: Ledger, previous: ActiveRelease | None, deployed: Deployment | None, stopped: bool
) -> str:
    """Remove the new deployment, restart the previous one if it was stopped, and describe the result."""
    if deployed is not None:
        target.take_back(deployed)
    if previous is None:
        text = "Nothing was in use before"
    elif not stopped:
        text = f"Version {previous.release.version} stays in use at {where(previous.deployment)}"
    else:
        try:
            restarted = target.deploy(previous.release, ledger.folder)
            previous = replace(previous, deployment=restarted)
            text = f"Version {previous.release.version} is in use again at {where(restarted)}"
        except EspalierError as error:
            text = f"Version {previous.release.version} was in use before and cannot be started again ({error})"
            previous = None
    ledger.write(previous, "rolled back", text)
    return text


def _restore_champion(registry: Registry, decision: Decision) -> None:
    """Set the champion alias back to the previous version."""
    if decision.verdict in ("first", "won"):
        registry.alias(decision.name, ALIAS, decision.against)
        registry.tag(decision.name, decision.version, {"champion.verdict": "rolled back"})


def check(spec: ExperimentSpec) -> None:
    """Raise ResourceError if a champion could not be deployed, as far as this can be checked before the run."""
    assert spec.deploy.target is not None
    name = spec.deploy.name or spec.name
    active = Ledger(Path(spec.root), name).active()
    spec.deploy.target.check(name, None if active is None else active.deployment)


def _moves(target: DeploymentTarget, active: ActiveRelease) -> bool:
    """Return True if the target has a fixed port and the active server uses another one."""
    return bool(target.fixed_port) and not _same_port(target, active.deployment)


def _same_port(target: DeploymentTarget, deployment: Deployment) -> bool:
    return bool(target.fixed_port) and deployment.details.get("port") == str(target.fixed_port)
