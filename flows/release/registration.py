"""Registration of a trained policy: a version in MLflow's model registry, the champion decision, and deployment."""

from __future__ import annotations

from components.errors import EspalierError
from flows.execution.executor import Execution
from flows.recipes.outcome import RunOutcome
from flows.release import champion, deployment
from flows.reporting.results import ReleaseResult

NOT_REGISTERED = "test run: the export is not registered in MLflow (deploy.register_model=true registers it)"


def register(execution: Execution, outcome: RunOutcome) -> tuple[ReleaseResult, EspalierError | None]:
    """Register the export unless the run is a test (`deploy.register_model`), decide on the champion, and deploy it
    if `deploy.target` is set.

    The second value is the error of a deployment that was rolled back; the policy then stays registered.
    """
    from components.algorithms.train import policy_digest

    spec, tracker = execution.spec, execution.tracker
    assert tracker is not None
    digest = policy_digest(outcome.checkpoint.path) if outcome.checkpoint else None
    tracker.outbox.drain(spec.tracking.patience)
    if outcome.export is None or digest is None:
        return ReleaseResult(digest), None
    if not spec.deploy.registers(spec.model):
        return ReleaseResult(digest, notices=(NOT_REGISTERED,)), None
    name = spec.deploy.name or spec.name
    tags = champion.tags(execution, outcome)
    version = tracker.register_model(name, outcome.export, policy_digest=digest, tags=tags)
    decision = champion.decide(execution, outcome, tracker.registry, name, version)
    released = None
    if spec.deploy.target is not None:
        released = deployment.release(execution, outcome.export, decision, outcome.last_step, tracker.registry)
    result = ReleaseResult(
        digest,
        model=f"{name} version {version}",
        champion=decision.to_json(),
        deployment=released.to_json() if released else None,
        notices=(decision.text, released.text) if released else (decision.text,),
    )
    return result, released.error if released else None
