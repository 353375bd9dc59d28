"""Champion decision: whether a new version of a registered model gets MLflow's alias `champion`.

A new version becomes champion if it exceeds the current champion's held-out success by `deploy.margin`, as a paired
difference over the same scenarios. The first version of a name becomes champion without a comparison. The champion's
own evaluation is used if it had the same setup (environment, scenarios, limits, sampling); otherwise its checkpoint is
evaluated now with the setup of the new version. If that is impossible, the comparison is refused and the champion
stays. A run without an environment has no evaluation, so its version never becomes champion.

The decision and its numbers are a notice of the run and tags of the new version.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.artifacts import Artifact, lock_file
from components.artifacts.keys import json_digest
from components.errors import EspalierError
from components.models.spec import OF_MACHINE
from flows.experiment.requests import Requests
from flows.history.records import Notice
from flows.stages.base import Request
from flows.stages.execute import key_part

if TYPE_CHECKING:
    from components.tracking.registry import Registry, Version
    from flows.execution.executor import Execution
    from flows.recipes.outcome import RunOutcome

ALIAS = "champion"
LOCK_LIMIT = 12 * 3600.0
"""Seconds to wait for another run that decides on the champion of the same name."""


@dataclass(frozen=True)
class Decision:
    """Decision on a new version."""

    name: str
    version: str
    verdict: Literal["first", "already", "won", "lost", "refused"]
    text: str
    against: str | None = None
    """Previous champion's version."""
    margin: float = 0.0
    difference: float | None = None
    """Held-out success of the new version minus that of the champion, on the same scenarios."""
    low: float | None = None
    high: float | None = None
    """Bounds of its 95 % interval."""
    success: float | None = None
    champion_success: float | None = None
    scenarios: int = 0

    @property
    def is_champion(self) -> bool:
        """True if the new version is champion now."""
        return self.verdict in ("first", "already", "won")

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "text"}


def tags(execution: Execution, outcome: RunOutcome) -> dict[str, str]:
    """Return the tags of a version that later comparisons need."""
    assert outcome.checkpoint is not None
    spec = execution.spec
    model = spec.resolve_dtypes(spec.model, "evaluate").model_dump(mode="json", exclude=OF_MACHINE)
    evaluated = {}
    if outcome.evaluations:
        setup = evaluation_digest(_evaluation(execution, outcome))
        evaluated = {"evaluation_key": outcome.last.key, "evaluation_setup": setup}
    return {"policy_key": outcome.checkpoint.key, **evaluated, "model": json.dumps(model, sort_keys=True)}


def evaluation_digest(evaluation: Request) -> str:
    """Return the digest of an evaluation's setup, without the evaluated model."""
    return json_digest({name: value for name, value in key_part(evaluation).items() if name != "model"})


def decide(execution: Execution, outcome: RunOutcome, registry: Registry, name: str, version: str) -> Decision:
    """Compare a new version with the champion, set the alias if it wins, and publish the decision.

    A lock serializes runs below one root. Runs on several machines that share an MLflow server are not serialized.
    """
    spec = execution.spec
    lock = Path(spec.root) / "mlflow" / f".champion-{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a+") as file:
        lock_file(file, f"the champion of {name}", LOCK_LIMIT)
        champion = registry.aliased(name, ALIAS)
        if not outcome.evaluations:
            reason = "its run evaluates it in no environment (environment=none)"
            stays = "" if champion is None else f"; version {champion.number} stays"
            text = f"{name} version {version} is not champion: {reason}{stays}"
            against = None if champion is None else champion.number
            decision = Decision(name, version, "refused", text, against=against, margin=spec.deploy.margin)
        elif champion is None:
            text = f"{name} version {version} is champion: the first of its name"
            decision = Decision(name, version, "first", text, margin=spec.deploy.margin)
        elif champion.number == version:
            text = f"{name} version {version} is champion already"
            decision = Decision(name, version, "already", text, against=version, margin=spec.deploy.margin)
        else:
            decision = _compare(execution, outcome, champion, name, version)
        if decision.verdict in ("first", "won"):
            registry.alias(name, ALIAS, version)
    if decision.verdict != "already":
        values = {f"champion.{key}": str(value) for key, value in decision.to_json().items() if value is not None}
        registry.tag(name, version, {**values, "champion.decision": decision.text})
    execution.notice(Notice("champion", outcome.last_step, decision.text))
    return decision


def _compare(execution: Execution, outcome: RunOutcome, champion: Version, name: str, version: str) -> Decision:
    from components.evaluation.metrics import paired_difference
    from components.evaluation.sequential import alpha_of
    from components.trajectories.sources import ScoredFiles
    from flows.reporting.report import summary_of

    margin = execution.spec.deploy.margin
    evaluation = _champions_evaluation(execution, outcome, champion)
    if isinstance(evaluation, str):
        text = f"{name} version {version} is not champion: {evaluation}; version {champion.number} stays"
        return Decision(name, version, "refused", text, against=champion.number, margin=margin)
    episodes = [ScoredFiles.of(artifact.path).load() for artifact in (evaluation, outcome.last)]
    summaries = [summary_of(artifact) for artifact in (evaluation, outcome.last)]
    try:
        paired = paired_difference(episodes[0], episodes[1], alpha_of(*summaries))
        if any(summary["success"]["mean"] is None for summary in summaries):
            raise ValueError("no episode of an evaluation states its success, so that nothing compares the versions")
    except ValueError as error:
        text = f"{name} version {version} is not champion: {error}; version {champion.number} stays"
        return Decision(name, version, "refused", text, against=champion.number, margin=margin)
    won = beats(paired["difference"], margin)
    wanted = f"by {margin:g}" if margin else "at all"
    text = (
        f"{name} version {version} is {'' if won else 'not '}champion: held-out success {paired['after']:.3f} against "
        f"{paired['before']:.3f} of version {champion.number}, {paired['difference']:+.3f} "
        f"[{paired['low']:.3f}, {paired['high']:.3f}] on the same {paired['n']} scenarios; it had to be better {wanted}"
    )
    return Decision(
        name,
        version,
        "won" if won else "lost",
        text,
        against=champion.number,
        margin=margin,
        difference=paired["difference"],
        low=paired["low"],
        high=paired["high"],
        success=paired["after"],
        champion_success=paired["before"],
        scenarios=paired["n"],
    )


def beats(difference: float, margin: float) -> bool:
    """Return True if the difference is positive and reaches the margin, within rounding errors of 1e-9."""
    return difference > 0 and difference >= margin - 1e-9


def _champions_evaluation(execution: Execution, outcome: RunOutcome, champion: Version) -> Artifact | str:
    """Return the champion's evaluation with the setup of the new policy's, or the reason why there is none."""
    store, tags = execution.context.store, champion.tags
    request = _evaluation(execution, outcome)
    if tags.get("evaluation_setup") == evaluation_digest(request) and "evaluation_key" in tags:
        evaluation = store.find(tags["evaluation_key"])
        if evaluation is not None:
            return evaluation
    policy = tags.get("policy_key")
    if policy is None or "model" not in tags:
        return f"version {champion.number} was not registered by a run, so that it cannot be evaluated on the same"
    if store.find(policy) is None:
        return (
            f"version {champion.number} was evaluated on other scenarios, and its checkpoint {policy[:12]} is not in "
            f"{store}, so that it cannot be evaluated on the same"
        )
    model = {**json.loads(tags["model"]), "device": execution.spec.model.device}
    model.pop("lora")
    request = replace(request, spec={**request.spec, "model": model}, inputs={"policy": policy})
    try:
        return execution.stage("evaluate[champion]", outcome.last_step, request).artifact
    except EspalierError as error:
        return f"version {champion.number} could not be evaluated on the same scenarios ({error})"


def _evaluation(execution: Execution, outcome: RunOutcome) -> Request:
    """Return the request of the final policy's evaluation."""
    return Requests(execution.spec, outcome.tasks).evaluate(outcome.checkpoint)
