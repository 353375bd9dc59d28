"""Training groups whose gradients pushed against held-out scenarios that a round lost.

The influence of a group on a scenario is TracIn (Pruthi et al. 2020, arXiv:2002.08484, eq. 1) at one checkpoint, the
policy before the round, without the learning rate:

    influence(group, scenario) = ∇ loss(group) · ∇ -log p(successful episode)

with the loss of the run's algorithm on the group, as part of the round (`group_gradients`), and the likelihood of an
episode that solved the scenario before the round. To first order, a gradient step on the group changes the
log-likelihood of that episode by the learning rate times the influence: below 0 the group pushed against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from components.errors import Problem, ResourceError, SpecError
from components.evaluation.metrics import paired_difference
from components.specs import nearest
from components.trajectories.schema import History, Trajectory
from flows.influence.rounds import TrainedRound, listed, trained_rounds
from flows.stages.base import Progress, Request

if TYPE_CHECKING:
    import torch

    from components.algorithms.trainer import GroupGradients
    from components.artifacts import Artifact
    from flows.influence.workplace import Workplace

MEMORY = 2 * 2**30
"""Bytes of held-out gradients in memory at a time. If they need more, the groups are computed several times."""
FILTER, CHAIN = "components.filters.without.Without", "components.filters.chain.Chain"


@dataclass(frozen=True)
class GroupInfluence:
    """Influence of one training group on one held-out scenario."""

    group: str
    influence: float
    cosine: float | None
    """Cosine of both gradients."""


@dataclass(frozen=True)
class LostScenario:
    """Held-out scenario that was solved before the round and not after it."""

    scenario: str
    before: Trajectory
    """Episode that solved it."""
    after: Trajectory
    """Episode after the round that did not."""
    likelihoods: tuple[float, float]
    """Log-likelihood in nats of the successful episode before and after the round."""
    influences: Sequence[GroupInfluence]
    """All groups of the round that carried signal, most negative first."""

    def influence(self, groups: Sequence[str]) -> float:
        """Return the sum of the influences of some groups."""
        return math.fsum(item.influence for item in self.influences if item.group in groups)


@dataclass(frozen=True)
class Attribution:
    """Result of `attribute`."""

    trained: TrainedRound
    difference: Mapping[str, Any]
    """Difference in held-out success, after minus before the round (`metrics.paired_difference`)."""
    lost: Sequence[LostScenario]
    """Lost scenarios, that with the most negative group first."""
    groups: Mapping[str, Sequence[Trajectory]]
    """Training groups that carried signal, with rewards and advantages."""
    after: Sequence[Trajectory]
    """Held-out episodes after the round."""


@dataclass(frozen=True)
class Retrained:
    """The round trained again: without some groups, or as a control with all groups in another order."""

    groups: Sequence[str]
    """Groups that were left out."""
    recovered: Mapping[str, bool]
    """For each lost scenario, True if the retrained policy solves it more often than the policy after the round."""
    likelihoods: Mapping[str, float]
    """Log-likelihood in nats of the successful episode of each lost scenario."""
    change: Mapping[str, Any]
    """Difference in held-out success, after this training minus after the round (`metrics.paired_difference`)."""


def attribute(place: Workplace, trained: TrainedRound, without: Sequence[str] = ()) -> Attribution:
    """Evaluate the policies before and after a round, and attribute the scenarios that it lost to its groups.

    without: groups that will be left out. Raises ResourceError if the round lost no scenario or trained on no group
    with signal, SpecError for an unknown group, and the errors of the stages."""
    if without:  # before the evaluations, which can take long
        with place.gradients(trained.request) as gradients:
            check_groups(trained, gradients.groups, without)
    before, after = _evaluations(place, trained)
    difference = paired_difference(before, after)
    if not difference["regressed"]:
        raise ResourceError(
            f"round {trained.number} of run {trained.run.short} lost no held-out scenario: success "
            f"{difference['before']:.3f} before and {difference['after']:.3f} after it on {difference['n']} scenarios. "
            f"Rounds: {_rounds(place)}"
        )
    pairs = {name: _episodes(name, before, after) for name in difference["regressed"]}
    solved = {name: pair[0] for name, pair in pairs.items()}
    if silent := [name for name, episode in solved.items() if not any(map(_sampled_tokens, episode.histories))]:
        raise ResourceError(
            f"round {trained.number} of run {trained.run.short}: the held-out episode of {silent[0]} has no token ids; "
            "expected an engine that returns them (inference.tokens=true)"
        )
    with place.gradients(trained.request) as gradients:
        if not gradients.groups:
            raise ResourceError(f"round {trained.number} of run {trained.run.short} trained on no group with signal")
        with place.execution.console.stage("gradients", "groups") as progress:
            influences = _influences(gradients, solved, trained.temperature, progress)
        likelihoods = gradients.log_likelihoods(list(solved.values()), trained.temperature)
        groups = dict(gradients.groups)
    later = _likelihoods(place, trained, list(solved.values()), trained.training.key)
    lost = [
        LostScenario(name, *pairs[name], likelihood, influences[name])
        for name, likelihood in zip(pairs, zip(likelihoods, later, strict=True), strict=True)
    ]
    lost.sort(key=lambda item: (item.influences[0].influence, item.scenario))
    return Attribution(trained, difference, lost, groups, after)


def _likelihoods(place: Workplace, trained: TrainedRound, episodes: Sequence[Trajectory], policy: str) -> list[float]:
    """Return the log-likelihood of each episode under another policy. policy: key of its checkpoint."""
    inputs = {**trained.request.inputs, "start": policy}
    with place.gradients(replace(trained.request, inputs=inputs)) as gradients:
        return gradients.log_likelihoods(episodes, trained.temperature)


def retrain(place: Workplace, attribution: Attribution, groups: Sequence[str]) -> Retrained:
    """Train the round without some groups and evaluate the policy. Raises the errors of the stages."""
    trained = attribution.trained
    inputs = dict(trained.request.inputs)
    for suffix in trained.collections:
        selection = _selection(place, trained, suffix, groups)
        inputs[f"selection{suffix}"] = selection.key
    name = f"{trained.number} without {len(groups)}"
    return _retrained(place, attribution, name, replace(trained.request, inputs=inputs), groups)


def control(place: Workplace, attribution: Attribution) -> Retrained:
    """Train the round again with all groups in another order, and evaluate the policy: what comes back here does not
    depend on the groups."""
    trained = attribution.trained
    return _retrained(place, attribution, f"{trained.number} reordered", trained.reordered, [])


def _retrained(
    place: Workplace, attribution: Attribution, name: str, request: Request, groups: Sequence[str]
) -> Retrained:
    checkpoint = place.stage(f"train[{name}]", request, attribution.trained.number)
    episodes = place.evaluated(name, checkpoint)
    recovered = {
        lost.scenario: _rate(lost.scenario, episodes) > _rate(lost.scenario, attribution.after)
        for lost in attribution.lost
    }
    solved = [lost.before for lost in attribution.lost]
    likelihoods = _likelihoods(place, attribution.trained, solved, checkpoint.key)
    return Retrained(
        groups,
        recovered,
        dict(zip(recovered, likelihoods, strict=True)),
        paired_difference(attribution.after, episodes),
    )


def check_groups(trained: TrainedRound, groups: Mapping[str, Sequence[Trajectory]], without: Sequence[str]) -> None:
    """Raise SpecError for groups that carried no signal in the round, or come from an earlier one by replay."""
    from components.algorithms.continual.replay import ROUNDS_AGO

    present = [name for name, group in groups.items() if not group[0].metrics.get(ROUNDS_AGO, 0)]
    problems = [
        Problem(
            "--without",
            f"{group!r:.200} is no group with signal of round {trained.number}; it has {listed(present)}",
            nearest(group, present),
        )
        for group in without
        if group not in present
    ]
    if problems:
        raise SpecError(problems)


def _evaluations(place: Workplace, trained: TrainedRound) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the held-out episodes before and after the training of a round."""
    start = place.artifact(trained.start, f"the policy before round {trained.number}")
    end = place.require(trained.training.key, f"the policy after round {trained.number}")
    return place.evaluated(f"before {trained.number}", start), place.evaluated(f"after {trained.number}", end)


def _rounds(place: Workplace) -> str:
    """Return the rounds of the run as text, with the number of scenarios that each lost if both of its policies were
    evaluated."""
    texts = []
    for trained in trained_rounds(place.run):
        sides = [place.evaluated_before(key) for key in (trained.start, trained.training.key)]
        if sides[0] is None or sides[1] is None:
            texts.append(f"{trained.number} (not evaluated)")
        else:
            texts.append(f"{trained.number} ({len(paired_difference(sides[0], sides[1])['regressed'])} lost)")
    return listed(texts)


def _episodes(
    scenario: str, before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> tuple[Trajectory, Trajectory]:
    """Return an episode that solved a scenario before, and one that did not after."""
    solved = next(episode for episode in before if episode.group == scenario and episode.success)
    failed = next(
        episode for episode in after if episode.group == scenario and episode.failure is None and not episode.success
    )
    return solved, failed


def _influences(
    gradients: GroupGradients, episodes: Mapping[str, Trajectory], temperature: float, progress: Progress
) -> dict[str, list[GroupInfluence]]:
    """Return the influence of each group on each scenario. episodes: those that solved them."""
    from components.algorithms.policy_gradient.group_gradients import cosine, dot

    size = max(1, MEMORY // (4 * max(gradients.parameters, 1)))
    names = list(episodes)
    result: dict[str, list[GroupInfluence]] = {}
    for first in range(0, len(names), size):
        heldout: dict[str, torch.Tensor] = {
            name: gradients.likelihood(episodes[name], temperature) for name in names[first : first + size]
        }
        for number, group in enumerate(gradients.groups, 1):
            gradient = gradients.group(group)
            for name, likelihood in heldout.items():
                influence = GroupInfluence(group, dot(gradient, likelihood), cosine(gradient, likelihood))
                result.setdefault(name, []).append(influence)
            progress(number, len(gradients.groups))
    return {name: sorted(items, key=lambda item: (item.influence, item.group)) for name, items in result.items()}


def _selection(place: Workplace, trained: TrainedRound, suffix: str, groups: Sequence[str]) -> Artifact:
    """Return the selection of a collection without the groups of some scenarios."""
    key = trained.request.inputs[f"selection{suffix}"]
    filtering = next((stage for stage in trained.run.stages if stage.key == key), None)
    if filtering is None or filtering.request["stage"] != "filter":
        raise ResourceError(f"run {trained.run.short} has no filter stage for round {trained.number}{suffix}")
    request = Request.from_json(filtering.request)
    scenarios = [group.removesuffix(f"@{suffix}") if suffix else group for group in groups]
    chained = {
        "selected": request.spec["filter"],
        "without": {"_target_": FILTER, "scenarios": sorted(scenarios)},
    }
    spec = {**request.spec, "filter": {"_target_": CHAIN, "filters": chained}}
    return place.stage(f"filter[{trained.number} without {len(groups)}]{suffix}", replace(request, spec=spec))


def _sampled_tokens(history: History) -> int:
    """Return the number of sampled tokens of a history."""
    return sum(history.sampled_mask())


def _rate(scenario: str, episodes: Sequence[Trajectory]) -> float:
    """Return the share of a scenario's finished episodes that succeed; 0 without one."""
    finished = [episode.success for episode in episodes if episode.group == scenario and episode.failure is None]
    return sum(finished) / len(finished) if finished else 0.0
