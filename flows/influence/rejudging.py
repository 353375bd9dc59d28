"""The episodes of a round under several rewards: scores, policy gradients, and the held-out effect of a gradient step.

All rewards judge the same collections. Each is then filtered and trained on as in the run, from the policy that
collected the episodes and with its optimizer state; by default with one gradient step on the whole round. The trained
policies play the same held-out scenarios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import JudgeError, Problem, SpecError
from components.evaluation.metrics import paired_difference
from components.evaluation.rank_agreement import RankAgreement, Rewards, rank_agreement
from components.specs import Target, validate
from components.trajectories.groups import separate
from components.trajectories.schema import Trajectory
from flows.experiment import run_models
from flows.experiment.requests import Requests
from flows.experiment.spec import ExperimentSpec
from flows.influence.rounds import TrainedRound
from flows.recipes.episodes import FED
from flows.stages.base import Context, Request
from flows.terminal.arguments import CODE

if TYPE_CHECKING:
    from components.artifacts import Artifact
    from flows.influence.workplace import Workplace

OWN = "own"
"""Name of the run's own reward."""
EXAMPLE = "reward=length reward.target=20 reward=outcome"


@dataclass(frozen=True)
class NamedReward:
    """A reward to compare."""

    name: str
    """Its overrides without `reward=`, or `own`."""
    target: Target


def _by_reward(overrides: Sequence[str]) -> tuple[list[list[str]], list[Problem]]:
    """Return the overrides of each reward, and the problems of overrides that belong to none. `reward=NAME` begins one;
    overrides of its keys follow."""
    rewards: list[list[str]] = []
    problems = []
    for override in overrides:
        key, equals, _ = override.lstrip("+~").partition("=")
        if override.startswith("reward=") and equals:
            rewards.append([override])
        elif not key.rpartition("@")[2].startswith("reward."):  # or a group of one: judge_model@reward.model
            problems.append(Problem(key, f"is not a key of a reward; expected RUN {EXAMPLE}"))
        elif not rewards:
            problems.append(Problem(key, f"belongs to no reward; expected reward=NAME before it: RUN {EXAMPLE}"))
        else:
            rewards[-1].append(override)
    if not rewards and not problems:
        problems.append(Problem("reward", f"no reward to compare with the run's own; expected RUN {EXAMPLE}"))
    return rewards, problems


def _name(overrides: Sequence[str]) -> str:
    """Return overrides such as `reward=length reward.target=9` as `length target=9`."""
    first, *others = overrides
    name = " ".join([first.removeprefix("reward="), *(text.replace("reward.", "", 1) for text in others)])
    return first if name == OWN else name


def compose_rewards(
    overrides: Sequence[str], run: ExperimentSpec, data: dict[str, Any], config_dir: str | Path | None
) -> list[NamedReward]:
    """Return the rewards, composed as in an experiment and checked with the other settings of the run.

    data: the run's configuration. Raises SpecError with the problems of all rewards, and for a repeated one."""
    from flows.experiment.compose import compose
    from flows.terminal.overrides import mask_overrides, refuse_secrets

    refuse_secrets(overrides)
    rewards: list[NamedReward] = []
    parts, problems = _by_reward(overrides)
    allow = [f"allow=[{','.join(run.allow)}]"] if run.allow else []
    for own in parts:
        shown = mask_overrides(own)
        name = _name(shown)
        try:
            target = compose([*own, *allow], config_dir=config_dir).reward
            settings = {**data, "reward": target.model_dump(mode="json", by_alias=True), "reward_model": None}
            checked = validate(ExperimentSpec, settings).model_copy(update={"root": run.root})
            target = run_models.resolve(checked, Context.at(run.root, run.store).store).reward
        except SpecError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        if name in [reward.name for reward in rewards]:
            problems.append(Problem("reward", f"{name} is given twice"))
        rewards.append(NamedReward(name, target))
    if problems:
        raise SpecError(problems)
    return rewards


@dataclass(frozen=True)
class JudgedReward:
    """One reward on the episodes of the round, and what it teaches."""

    name: str
    target: str
    """Import path of its class or function."""
    rewards: Rewards
    """Rewards by group and episode."""
    scored: int
    unscored: int
    """Number of failed episodes, and of those without a reward."""
    signal: int
    """Number of groups that the filter keeps and that carry signal."""
    gradient_norm: float
    step: Mapping[str, Any]
    """Difference in held-out success to the policy before the training (`metrics.paired_difference`)."""


@dataclass(frozen=True)
class RewardPair:
    """Two rewards compared."""

    first: str
    second: str
    agreement: RankAgreement
    cosine: float | None
    """Cosine of the policy gradients; None if one of them is zero."""
    effect: Mapping[str, Any]
    """Difference in held-out success after the training, second minus first (`metrics.paired_difference`)."""


@dataclass(frozen=True)
class Rejudging:
    """Result of `rejudge`."""

    trained: TrainedRound
    rewards: Sequence[JudgedReward]
    pairs: Sequence[RewardPair]
    episodes: Mapping[str, Trajectory]
    """Episodes of the round by id, with the run's own rewards."""
    control: Mapping[str, Any] | None
    """Difference in held-out success between two trainings on the run's own reward, whose groups have another order;
    None for one step, which has no order."""


def rejudge(
    place: Workplace, trained: TrainedRound, rewards: Sequence[NamedReward], *, one_step: bool = True
) -> Rejudging:
    """Judge the collections of a round under the run's own reward and others, and compare what they teach.

    one_step: measure the effect of one gradient step; False: of the gradient steps of a round of the run.
    Raises SpecError for a reward that scores no episode, and the errors of the stages."""
    from components.algorithms.policy_gradient.group_gradients import cosine, norm

    sampler = place.artifact(trained.sampler, "the policy that collected the episodes")
    collections = {
        suffix: place.require(key, f"the collection of round {trained.number}")
        for suffix, key in trained.inputs("trajectories").items()
    }
    inputs = [_own(place, trained), *(_judged(place, collections, sampler, reward) for reward in rewards)]
    named = [NamedReward(OWN, place.spec.reward), *rewards]
    scores = [_scored(place, collections, keys, reward.name) for reward, keys in zip(named, inputs, strict=True)]
    before = place.evaluated("before", sampler)
    judged, gradients, after = [], [], []
    for reward, keys, episodes in zip(named, inputs, scores, strict=True):
        request = training(trained, keys, one_step=one_step)
        with place.gradients(request) as groups:
            gradients.append(groups.batch())
            signal = len(groups.groups)
        checkpoint = place.stage(f"train[{reward.name}]", request, trained.number)
        after.append(place.evaluated(reward.name, checkpoint))
        step = paired_difference(before, after[-1])
        judged.append(_judged_reward(reward, episodes, signal, norm(gradients[-1]), step))
    pairs = [
        RewardPair(
            judged[first].name,
            judged[second].name,
            rank_agreement(judged[first].rewards, judged[second].rewards),
            cosine(gradients[first], gradients[second]),
            paired_difference(after[first], after[second]),
        )
        for first, second in combinations(range(len(judged)), 2)
    ]
    control = None
    if not one_step:
        again = replace(training(trained, inputs[0], one_step=False), seed=trained.reordered.seed)
        checkpoint = place.stage(f"train[{OWN} reordered]", again, trained.number)
        control = paired_difference(after[0], place.evaluated(f"{OWN} reordered", checkpoint))
    return Rejudging(trained, judged, pairs, {episode.id: episode for episode in scores[0]}, control)


def training(trained: TrainedRound, scored: Mapping[str, str], *, one_step: bool) -> Request:
    """Return the training of a round on other scores, from the policy that collected it, without episodes of earlier
    rounds. scored: keys of the scores and selections by input name. one_step: take one gradient step on the whole round
    in place of those of the run."""
    request = trained.request
    names = {f"{FED[0]}{suffix}" for suffix in trained.collections}
    inputs = {
        name: key
        for name, key in request.inputs.items()
        if name in names or name in ("reference", "anchor") or name.startswith("anchored-")
    }
    start = {} if trained.sampler is None else {"start": trained.sampler}
    steps = {"epochs": 1, "minibatches": 1} if one_step else {}
    algorithm = {**request.spec["algorithm"], **steps}
    return replace(
        request,
        spec={**request.spec, "algorithm": algorithm, "replay": None},
        inputs={**inputs, **scored, **start},
    )


def _own(place: Workplace, trained: TrainedRound) -> dict[str, str]:
    """Return the keys of the run's own scores and selections by input name."""
    inputs = {f"{name}{suffix}": key for name in FED[1:] for suffix, key in trained.inputs(name).items()}
    for name, key in inputs.items():
        place.require(key, f"{name} of round {trained.number}")
    return inputs


def _judged(
    place: Workplace, collections: Mapping[str, Artifact], sampler: Artifact | None, reward: NamedReward
) -> dict[str, str]:
    """Judge and filter the collections under another reward. Return the keys by input name."""
    requests = Requests(place.spec.model_copy(update={"reward": reward.target, "reward_model": None}))
    inputs: dict[str, str] = {}
    for suffix, trajectories in collections.items():
        try:
            scores = place.stage(f"judge[{reward.name}]{suffix}", requests.judge(trajectories, sampler))
        except JudgeError as error:
            raise _scores_nothing(f"{reward.name}: {error}") from None
        selection = place.stage(f"filter[{reward.name}]{suffix}", requests.filter(trajectories, scores))
        inputs |= {f"scores{suffix}": scores.key, f"selection{suffix}": selection.key}
    return inputs


def _scored(
    place: Workplace, collections: Mapping[str, Artifact], inputs: Mapping[str, str], name: str
) -> list[Trajectory]:
    """Return the episodes of the round with their rewards. Raises SpecError if the reward scored none of them."""
    from components.trajectories.store import load_scored

    episodes: list[Trajectory] = []
    for suffix, trajectories in collections.items():
        scores = place.require(inputs[f"scores{suffix}"], f"scores of {name}").path / "scores.parquet"
        groups = {episode.group for episode in episodes}
        collection = load_scored(trajectories.path / "trajectories.parquet", scores, None)
        episodes += [separate(episode, f"@{suffix}") if episode.group in groups else episode for episode in collection]
    if all(episode.reward is None for episode in episodes):
        raise _scores_nothing(f"{name}: scores none of the {len(episodes)} episodes of the round")
    return episodes


def _scores_nothing(text: str) -> SpecError:
    """Return the error of a reward that scores no episode, with the rewards that exist."""
    options = ", ".join(sorted(path.stem for path in (CODE / "conf" / "reward").glob("*.yaml")))
    return SpecError([Problem("reward", f"{text}. Expected a reward that scores these episodes, such as {options}")])


def _judged_reward(
    reward: NamedReward, episodes: Sequence[Trajectory], signal: int, gradient_norm: float, step: dict[str, Any]
) -> JudgedReward:
    rewards: dict[str, dict[str, float]] = {}
    for episode in episodes:
        if episode.reward is not None and episode.failure is None:
            rewards.setdefault(episode.group, {})[episode.id] = episode.reward
    scored = sum(map(len, rewards.values()))
    return JudgedReward(
        reward.name, reward.target.target, rewards, scored, len(episodes) - scored, signal, gradient_norm, step
    )
