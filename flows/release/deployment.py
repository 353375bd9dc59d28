"""A champion is put into use: deployed, tried with held-out prompts, and only then relied on.

What is in use, by name of the model, stands in `<root>/deployments/NAME.json`. The deployment before it stays up until
the new one has passed its canary (but for a local server with a port of its own); where that fails, or the deployment,
the new one is taken down, the old one stays or is started again, and the alias `champion` goes back to its version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.deployment.canary import check_endpoint
from components.deployment.targets.protocol import Deployment, Release, Target
from components.deployment.targets.spec import LocalTarget, TargetSpec
from components.errors import DeployError, EspalierError
from flows.history.records import Notice
from flows.release.champion import ALIAS, Decision
from flows.release.deployment_ledger import InUse, Ledger, where

if TYPE_CHECKING:
    from components.tracking.registry import Registry
    from flows.execution.executor import Execution
    from flows.experiment.spec import ExperimentSpec


@dataclass(frozen=True)
class Released:
    """What became of a deployment."""

    state: str
    """`deployed`, `already`, `skipped` (the champion stays), `rolled back`."""
    text: str
    url: str | None = None
    model: str | None = None
    agreement: float | None = None
    """Share of the canary's prompts that the endpoint answered as the policy does."""
    error: EspalierError | None = None
    """Why it was rolled back."""

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "url": self.url, "model": self.model, "agreement": self.agreement}


def release(execution: Execution, export: Artifact, decision: Decision, step: int, registry: Registry) -> Released:
    """Puts a champion into use at `deploy.target`. Never raises what a target does: it is in what is returned."""
    spec = execution.spec
    assert spec.deploy.target is not None
    new = Release(decision.name, decision.version, export.digest, export.path / "merged", spec.model.max_length)
    ledger = Ledger(Path(spec.root), decision.name)
    with ledger.held():
        found = _release(execution, ledger, spec.deploy.target.build(), new, export, decision)
        if found.state == "rolled back":
            _uncrown(registry, decision)
    execution.notice(Notice("deployment", step, found.text))
    return found


def _release(
    execution: Execution, ledger: Ledger, target: Target, new: Release, export: Artifact, decision: Decision
) -> Released:
    spec = execution.spec.deploy
    assert spec.target is not None
    kind, before = spec.target.name, ledger.present()
    if not decision.crowned:
        return Released("skipped", f"{new.name} version {new.version} is not deployed: it is not champion")
    alive = before is not None and before.deployment.target == kind and target.alive(before.deployment)
    if before is not None and alive and before.release.digest == new.digest and not _moves(spec.target, before):
        text = f"{new.name} version {new.version} is in use already at {where(before.deployment)}"
        return Released("already", text, before.deployment.url, before.deployment.model)
    stopped = before is not None and alive and _same_port(spec.target, before.deployment)
    made: Deployment | None = None
    try:
        if stopped and before is not None:
            target.take_back(before.deployment)
        execution.console.line(f"deploying {new.name} version {new.version} to {kind} …")
        made = target.deploy(new, ledger.folder)
        agreement = _canary(execution, made, export)
    except (EspalierError, KeyboardInterrupt) as error:
        kept = _back(target, ledger, before if alive else None, made, stopped)
        text = f"{new.name} version {new.version} is not in use at {kind}: {str(error) or 'stopped'}. {kept}"
        if isinstance(error, KeyboardInterrupt):
            raise
        return Released("rolled back", text, error=DeployError(text))
    text = f"{new.name} version {new.version} is in use at {where(made)}"
    text += f"; canary: {agreement:.0%} of its prompts answered as the policy does" if agreement is not None else ""
    ledger.write(InUse(new, made), "deployed", text)
    if before is not None and alive and not stopped and made.target != "hub":
        target.take_back(before.deployment)
    return Released("deployed", text, made.url, made.model, agreement)


def _canary(execution: Execution, made: Deployment, export: Artifact) -> float | None:
    if made.url is None:
        return None
    spec = execution.spec.deploy.canary
    return check_endpoint(made, export.path, prompts=spec.prompts, agreement=spec.agreement, timeout=spec.timeout)


def _back(target: Target, ledger: Ledger, before: InUse | None, made: Deployment | None, stopped: bool) -> str:
    """Takes the new one down, and starts the old one again where it was stopped; says what is in use now."""
    if made is not None:
        target.take_back(made)
    if before is None:
        text = "Nothing was in use before"
    elif not stopped:
        text = f"Version {before.release.version} stays in use at {where(before.deployment)}"
    else:
        try:
            again = target.deploy(before.release, ledger.folder)
            before = replace(before, deployment=again)
            text = f"Version {before.release.version} is in use again at {where(again)}"
        except EspalierError as error:
            text = f"Version {before.release.version} was in use before and cannot be started again ({error})"
            before = None
    ledger.write(before, "rolled back", text)
    return text


def _uncrown(registry: Registry, decision: Decision) -> None:
    """The alias goes back to the version that had it."""
    if decision.verdict in ("first", "won"):
        registry.alias(decision.name, ALIAS, decision.against)
        registry.tag(decision.name, decision.version, {"champion.verdict": "rolled back"})


def check(spec: ExperimentSpec) -> None:
    """Raises ResourceError where a champion could not be put into use, as far as that is known before the run."""
    from components.deployment.targets.local import Local

    target = spec.deploy.target
    assert target is not None
    name, built = spec.deploy.name or spec.name, target.build()
    built.check(name)
    if isinstance(target, LocalTarget):
        before = Ledger(Path(spec.root), name).present()
        ours = before is not None and _same_port(target, before.deployment) and built.alive(before.deployment)
        if not ours:  # a server of this model ends before the new one begins
            Local(target).free()


def _moves(target: TargetSpec, before: InUse) -> bool:
    """Whether what is in use is to be at another port."""
    return bool(getattr(target, "port", 0)) and not _same_port(target, before.deployment)


def _same_port(spec: Any, deployment: Deployment) -> bool:
    port = getattr(spec, "port", 0)
    return bool(port) and deployment.details.get("port") == str(port)
