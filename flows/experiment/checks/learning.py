"""Checks of the algorithm against the episodes that it learns from and the model that it trains."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping

from components.algorithms.continual.spec import EWCSpec, ReplaySpec
from components.algorithms.spec import AlgorithmSpec, RoundFacts
from components.compute.spec import ComputeSpec
from components.deployment.spec import DeploySpec
from components.errors import Problem
from components.evaluation.spec import EvaluateSpec
from components.filters.any_of import AnyOf
from components.filters.best import Best
from components.filters.between import REWARD, Between
from components.filters.chain import combines, links
from components.filters.distinct import Distinct
from components.filters.everything import Everything
from components.filters.signal import Signal
from components.filters.successful import Successful
from components.filters.top import Top
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rollout.collect_spec import CollectSpec
from components.rollout.spec import AgentSpec
from components.specs import Target
from flows.experiment.early_stopping import EarlyStoppingSpec
from flows.experiment.feedback import FeedbackSpec
from flows.experiment.guards import DRIFTS, GuardsSpec
from flows.experiment.guards.drift import ENDS
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec


def algorithm(algorithm: AlgorithmSpec, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    """Check the algorithm against the episodes of the rounds."""
    if rounds:
        yield from algorithm.round_problems(RoundFacts(collect.scenarios, collect.group_size, collect.temperature))


def weights(
    model: ModelSpec,
    inference: InferenceSpec,
    algorithm: AlgorithmSpec,
    rounds: int,
    collect: CollectSpec,
    compute: ComputeSpec,
) -> Iterator[Problem]:
    """Check options that need a LoRA adapter, and options that exclude a quantized base model."""
    if model.quantization != "none":
        if model.lora is None:
            yield Problem(
                "model.quantization",
                f"{model.quantization}: 4-bit weights cannot be trained (model.lora=null); expected none, or a rank in "
                "model.lora",
            )
        if not inference.in_process:
            yield Problem(
                "model.quantization",
                f"{model.quantization}: the server of inference={inference.name} does not sample from the quantized "
                "weights that are trained; expected none, or inference=embedded",
            )
    if model.lora is not None:
        return
    if inference.loads_weights:
        reason = f"with model.lora=null a server of inference={inference.name} has the weights of one policy at a time"
        if compute.parallel > 1:
            text = f"{compute.parallel}: {reason}; expected 1, or model.lora with a rank"
            yield Problem("compute.parallel", text)
        if collect.opponent == "base":
            text = f"base: {reason}; expected policy, environment, or model.lora with a rank"
            yield Problem("collect.opponent", text)
    if not inference.in_process and not inference.loads_weights:
        yield Problem(
            "model.lora",
            f"null: the server of inference={inference.name} loads adapters, not full weights; expected a rank, or "
            "inference=embedded",
        )
    if rounds:
        yield from algorithm.full_finetuning_problems()


def signal(filter: Target, algorithm: AlgorithmSpec, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    """Check that the filter keeps the episodes that the algorithm needs, and that refills can occur."""
    if not rounds:
        return
    parts = {f"filter{end}": link for end, link in links(filter).items() if isinstance(link, Target)}
    required = _required("filter", filter)
    for path, part in parts.items():
        kind = part.factory()
        if kind is Signal and collect.group_size == 1 and not algorithm.compares_within_group:
            yield Problem(
                path,
                "signal keeps groups whose rewards differ, and a group of one episode (collect.group_size=1) never "
                "does; expected filter=everything, or a collect.group_size of at least 2",
            )
        elif kind is Signal and (algorithm.ignores_rewards or algorithm.constraints):
            reason = (
                "does not use rewards"
                if algorithm.ignores_rewards
                else "also learns from groups that differ in their costs only"
            )
            yield Problem(
                path,
                f"signal keeps groups whose rewards differ, but {algorithm.name} {reason}; expected filter=everything",
            )
        elif algorithm.imitates and filter.factory() is AnyOf and part.arguments.get("maximum") is not None:
            yield Problem(
                path,
                f"keeps failures, and {algorithm.name} makes every kept episode more likely; expected "
                "filter=agent_evol, or algorithm=kto",
            )
        elif algorithm.good_from is not None and path in required and _drops_failures(part, algorithm.good_from):
            yield Problem(
                path,
                f"drops the failures (reward below {algorithm.good_from:g}) that {algorithm.name} learns from beside "
                "good episodes; expected filter=agent_evol_with_failures, filter=everything, or algorithm=sft",
            )
        elif kind is not Best or part.arguments.get("count", 1) != 1 or filter.factory() is AnyOf:
            continue
        elif algorithm.compares_within_group:
            yield Problem(
                f"{path}.count",
                f"1: keeps one episode per group, but {algorithm.name} compares episodes within a group; "
                f"expected {path}.count=2 or more, filter=signal, or algorithm=sft",
            )
        elif algorithm.compares:
            yield Problem(
                f"{path}.count",
                f"1: keeps the best episode per group, but {algorithm.name} compares it with failures of its type; "
                "expected filter=agent_evol_with_failures, or algorithm=sft",
            )
    if collect.refills and all(_keeps_every_scenario(part) for part in parts.values()):
        yield Problem(
            "collect.refills",
            f"{collect.refills}: refills replace scenarios that the filter drops, and {_filter_name(filter)} drops "
            "none; expected 0, or filter=signal",
        )


def thresholds(
    filter: Target, algorithm: AlgorithmSpec, reward: Target, reward_model: RewardModelPartSpec | None, rounds: int
) -> Iterator[Problem]:
    """Check that the reward can reach the thresholds of the filter and of the algorithm, if its largest value is known.
    A reward model has none."""
    highest = getattr(reward.factory(), "highest", None)
    if highest is None or reward_model is not None or not rounds:
        return
    values = {
        f"{path}.minimum": part.arguments["minimum"]
        for path, part in _required("filter", filter).items()
        if _limits_reward(part) and part.arguments.get("minimum") is not None
    }
    if algorithm.good_from is not None:
        values["algorithm.threshold"] = algorithm.good_from
    for path, value in values.items():
        if value > highest:
            text = f"{value:g}: {reward.target.rpartition('.')[2]} gives at most {highest:g}, so no episode reaches it"
            yield Problem(path, f"{text}; expected at most {highest:g}")


def _required(path: str, filter_: Target) -> dict[str, Target]:
    """Return the filters that every kept episode passes, by path: members of chains, and not those of a union."""
    if not combines(filter_):
        return {path: filter_}
    if filter_.factory() is AnyOf or not isinstance(filter_.arguments.get("filters"), Mapping):
        return {}
    members = filter_.arguments["filters"].items()
    parts = (_required(f"{path}.filters.{name}", member) for name, member in members if isinstance(member, Target))
    return dict(ChainMap(*parts))


def _drops_failures(filter_: Target, good_from: float) -> bool:
    minimum = filter_.arguments.get("minimum")
    return filter_.factory() is Successful or (_limits_reward(filter_) and minimum is not None and minimum >= good_from)


def _limits_reward(filter_: Target) -> bool:
    return filter_.factory() is Between and filter_.arguments.get("number") == REWARD


def _keeps_every_scenario(filter_: Target) -> bool:
    """Return True if the filter keeps at least one episode of each scenario that has a scored episode."""
    kind, arguments = filter_.factory(), filter_.arguments
    by_group = (kind is Top and arguments.get("of") == "group") or (
        kind is Distinct and arguments.get("of", "group") == "group"
    )
    return kind in (Everything, Best) or by_group


def _filter_name(filter_: Target) -> str:
    kind = filter_.factory()
    return "filter=everything" if kind is Everything else f"filter {kind.__name__}"


def overlap(
    collect: CollectSpec,
    agent: AgentSpec,
    algorithm: AlgorithmSpec,
    replay: ReplaySpec | None,
    reward_model: RewardModelPartSpec | None,
    rounds: int,
) -> Iterator[Problem]:
    """Check the options that off-policy episodes (`collect.overlap`, `collect.partial`) exclude."""
    reason, overlap, staleness = collect.off_policy_reason(rounds), collect.overlap, collect.staleness(agent.max_turns)
    if reason is None:
        return
    yield from algorithm.off_policy_problems(reason=reason, replay=False)
    if replay is not None and replay.max_staleness is not None and replay.max_staleness < staleness:
        yield Problem(
            "replay.max_staleness",
            f"{replay.max_staleness}: drops episodes of this round: {reason}, and they are up to {staleness} versions "
            f"old; expected at least {staleness}, or null",
        )
    if overlap and reward_model is not None and reward_model.every:
        yield Problem(
            "reward_model.every",
            f"{reward_model.every}: with collect.overlap={overlap} a round is scored during training, before the "
            "reward model is retrained; expected 0, or collect.overlap=0",
        )


def held_out(evaluate: EvaluateSpec, early_stopping: EarlyStoppingSpec | None, guards: GuardsSpec) -> Iterator[Problem]:
    """Check that early stopping and stopping guards have evaluations during the rounds."""
    if evaluate.every:
        return
    need = "evaluations during the rounds, but evaluate.every=0 disables them; expected evaluate.every=1 or more"
    if early_stopping is not None:
        yield Problem("early_stopping", f"needs {need}")
    for name in ("reward_hacking", "heldout_reward"):
        if getattr(guards, name) == "stop":
            yield Problem(f"guards.{name}", f"stop needs {need}")


def stopped_evaluations(
    evaluate: EvaluateSpec, early_stopping: EarlyStoppingSpec | None, deploy: DeploySpec
) -> Iterator[Problem]:
    """Check that nothing compares the success of evaluations that stop after different scenarios."""
    if evaluate.stop == "never":
        return
    rules = {"early_stopping": early_stopping is not None, "deploy.policy=best": deploy.policy == "best"}
    for rule in (name for name, active in rules.items() if active):
        yield Problem(
            "evaluate.stop",
            f"decided: {rule} compares the success of evaluations, which then play different numbers of scenarios; "
            f"expected never, or no {rule}",
        )


def stopping_guards(
    guards: GuardsSpec, rounds: int, evaluate: EvaluateSpec, reward_model: RewardModelPartSpec | None
) -> Iterator[Problem]:
    """Check that each guard with the action `stop` can trigger."""
    if guards.heldout_reward == "stop" and evaluate.reward is None and reward_model is None:
        yield Problem(
            "guards.heldout_reward",
            "stop needs evaluations by another reward than the rounds use; expected off or warn, evaluate.reward, or "
            "reward_model",
        )
    for name in DRIFTS:
        if getattr(guards, name) == "stop" and rounds < 2 * ENDS:
            yield Problem(
                f"guards.{name}",
                f"stop compares the last {ENDS} rounds with the first {ENDS}, and rounds={rounds} is too few; "
                f"expected off or warn, or rounds={2 * ENDS} or more",
            )
    if guards.ensemble_disagreement == "stop" and reward_model is not None and reward_model.models == 1:
        yield Problem(
            "guards.ensemble_disagreement",
            "stop needs an ensemble of reward models, but reward_model.models=1; expected off or warn, or "
            "reward_model.models=2 or more",
        )


def settings(algorithm: AlgorithmSpec) -> Iterator[Problem]:
    """Check the settings of the algorithm against each other."""
    yield from algorithm.problems()


def replay(algorithm: AlgorithmSpec, replay: ReplaySpec | None) -> Iterator[Problem]:
    """Check that the algorithm can train on episodes of earlier rounds."""
    if replay is not None:
        yield from algorithm.off_policy_problems(reason=None, replay=True)


def ewc(
    ewc: EWCSpec | None, warmup: WarmupSpec | None, fork: str | None, feedback: FeedbackSpec | None, rounds: int
) -> Iterator[Problem]:
    """Check that elastic weight consolidation has an earlier training to preserve."""
    if ewc is not None and rounds and warmup is None and fork is None and feedback is None:
        yield Problem(
            "ewc", "has no earlier training to preserve; expected a warmup, a fork or feedback in the run, or ewc=null"
        )


def feedback(feedback: FeedbackSpec | None) -> Iterator[Problem]:
    """Check that an algorithm trains on human feedback, and weights episodes by their score."""
    if feedback is None:
        return
    if not feedback.trainings:
        yield Problem(
            "feedback", "trains on nothing: scores and choices are null; expected an algorithm for one of them"
        )
    for algorithm in feedback.trainings.values():
        yield from algorithm.feedback_problems()
