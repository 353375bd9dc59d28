"""Who is champion: the version of a registered model that is in use, under MLflow's alias `champion`.

A new version becomes champion if it beats the present one by `deploy.margin` in held-out success, scenario by scenario
on the same ones; the first version of a name does so without a comparison. The champion's own evaluation counts where
it was asked the very same (environment, scenarios, limits, sampling); else its checkpoint is evaluated now on what the
new one was asked. Where that cannot be, the comparison is refused and the champion stays.

The decision, with its numbers, is a notice of the run, and stands as tags on the new version.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.artifacts import Artifact, lock_file
from components.artifacts.keys import json_digest
from components.errors import EspalierError
from flows.experiment.requests import Requests
from flows.history.records import Notice
from flows.stages.base import Request
from flows.stages.execute import key_part

if TYPE_CHECKING:
    from components.tracking.registry import Registry, Version
    from flows.execution.executor import Execution
    from flows.recipes.outcome import Outcome

ALIAS = "champion"
LOCK_LIMIT = 12 * 3600.0
"""Seconds to wait for another run that compares itself with the champion of the same name."""


@dataclass(frozen=True)
class Decision:
    """What became of a new version."""

    name: str
    version: str
    verdict: Literal["first", "already", "won", "lost", "refused"]
    text: str
    against: str | None = None
    """The version that was champion before."""
    margin: float = 0.0
    difference: float | None = None
    """Held-out success of the new version less that of the champion, on the same scenarios."""
    low: float | None = None
    high: float | None = None
    """Its 95 % interval."""
    success: float | None = None
    champion_success: float | None = None
    scenarios: int = 0

    @property
    def crowned(self) -> bool:
        """Whether the new version is champion now."""
        return self.verdict in ("first", "already", "won")

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "text"}


def tags(execution: Execution, outcome: Outcome) -> dict[str, str]:
    """What a later comparison needs to know of a version."""
    assert outcome.checkpoint is not None
    model = execution.spec.model.model_dump(mode="json", exclude={"device"})
    return {
        "policy_key": outcome.checkpoint.key,
        "evaluation_key": outcome.last.key,
        "asked": asked(_evaluation(execution, outcome)),
        "model": json.dumps(model, sort_keys=True),
    }


def asked(evaluation: Request) -> str:
    """Digest of what an evaluation asks, whoever is asked."""
    return json_digest({name: value for name, value in key_part(evaluation).items() if name != "model"})


def decide(execution: Execution, outcome: Outcome, registry: Registry, name: str, version: str) -> Decision:
    """Compares a new version with the champion, sets the alias where it won, and tells of it. One run at a time below
    one root; runs of several machines with one MLflow server do not wait for each other."""
    spec = execution.spec
    lock = Path(spec.root) / "mlflow" / f".champion-{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a+") as file:
        lock_file(file, f"the champion of {name}", LOCK_LIMIT)
        champion = registry.aliased(name, ALIAS)
        if champion is None:
            text = f"{name} version {version} is champion: the first of its name"
            found = Decision(name, version, "first", text, margin=spec.deploy.margin)
        elif champion.number == version:
            text = f"{name} version {version} is champion already"
            found = Decision(name, version, "already", text, against=version, margin=spec.deploy.margin)
        else:
            found = _compare(execution, outcome, champion, name, version)
        if found.verdict in ("first", "won"):
            registry.alias(name, ALIAS, version)
    if found.verdict != "already":
        shown = {f"champion.{key}": str(value) for key, value in found.to_json().items() if value is not None}
        registry.tag(name, version, {**shown, "champion.decision": found.text})
    execution.notice(Notice("champion", outcome.last_step, found.text))
    return found


def _compare(execution: Execution, outcome: Outcome, champion: Version, name: str, version: str) -> Decision:
    from components.evaluation.metrics import paired_difference
    from components.trajectories.store import read_trajectories

    margin = execution.spec.deploy.margin
    theirs = _champions_evaluation(execution, outcome, champion)
    if isinstance(theirs, str):
        text = f"{name} version {version} is not champion: {theirs}; version {champion.number} stays"
        return Decision(name, version, "refused", text, against=champion.number, margin=margin)
    episodes = [list(read_trajectories(one.path / "trajectories.parquet")) for one in (theirs, outcome.last)]
    try:
        found = paired_difference(*episodes)
    except ValueError as error:
        text = f"{name} version {version} is not champion: {error}; version {champion.number} stays"
        return Decision(name, version, "refused", text, against=champion.number, margin=margin)
    won = beats(found["difference"], margin)
    wanted = f"by {margin:g}" if margin else "at all"
    text = (
        f"{name} version {version} is {'' if won else 'not '}champion: held-out success {found['after']:.3f} against "
        f"{found['before']:.3f} of version {champion.number}, {found['difference']:+.3f} "
        f"[{found['low']:.3f}, {found['high']:.3f}] on the same {found['n']} scenarios; it had to be better {wanted}"
    )
    return Decision(
        name,
        version,
        "won" if won else "lost",
        text,
        against=champion.number,
        margin=margin,
        difference=found["difference"],
        low=found["low"],
        high=found["high"],
        success=found["after"],
        champion_success=found["before"],
        scenarios=found["n"],
    )


def beats(difference: float, margin: float) -> bool:
    """Better at all, and by the margin; sums of fractions are a little off."""
    return difference > 0 and difference >= margin - 1e-9


def _champions_evaluation(execution: Execution, outcome: Outcome, champion: Version) -> Artifact | str:
    """The champion's episodes on what the new policy was asked, or why there are none."""
    store, known = execution.context.store, champion.tags
    request = _evaluation(execution, outcome)
    if known.get("asked") == asked(request) and "evaluation_key" in known:
        found = store.find(known["evaluation_key"])
        if found is not None:
            return found
    policy = known.get("policy_key")
    if policy is None or "model" not in known:
        return f"version {champion.number} was not registered by a run, so that it cannot be evaluated on the same"
    if store.find(policy) is None:
        return (
            f"version {champion.number} was evaluated on other scenarios, and its checkpoint {policy[:12]} is not in "
            f"{store}, so that it cannot be evaluated on the same"
        )
    model = {**json.loads(known["model"]), "device": execution.spec.model.device}
    model.pop("lora")
    same = replace(request, spec={**request.spec, "model": model}, inputs={"policy": policy})
    try:
        return execution.stage("evaluate[champion]", outcome.last_step, same).artifact
    except EspalierError as error:
        return f"version {champion.number} could not be evaluated on the same scenarios ({error})"


def _evaluation(execution: Execution, outcome: Outcome) -> Request:
    """What measured the final policy."""
    return Requests(execution.spec).evaluate(outcome.checkpoint)
