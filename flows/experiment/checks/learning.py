"""What an algorithm needs of the episodes that it learns from, and of the model that learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from components.algorithms.spec import (
    DistillSpec,
    EWCSpec,
    GRPOSpec,
    PairSpec,
    PolicyGradientSpec,
    PPOSpec,
    ReplaySpec,
    SFTSpec,
)
from components.errors import Problem
from components.evaluation.spec import EvaluateSpec
from components.filters.best import Best
from components.filters.chain import links
from components.filters.distinct import Distinct
from components.filters.everything import Everything
from components.filters.signal import Signal
from components.filters.top import Top
from components.inference.spec import InferenceSpec, RemoteSpec, VllmSpec
from components.models.spec import ModelSpec
from components.rollout.spec import CollectSpec
from components.specs import Target
from flows.experiment.early_stopping import EarlyStoppingSpec
from flows.experiment.feedback import FeedbackSpec
from flows.experiment.guards import DRIFTS, GuardsSpec
from flows.experiment.guards.drift import ENDS
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec


def algorithm(algorithm: Any, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    if rounds == 0:
        return
    if isinstance(algorithm, PairSpec) and collect.group_size == 1:
        yield Problem(
            "collect.group_size",
            f"1: {algorithm.name} compares two episodes of a scenario; expected at least 2, or kto",
        )
    if not isinstance(algorithm, PolicyGradientSpec):
        return
    if collect.group_size == 1 and _compares(algorithm):
        yield Problem(
            "collect.group_size",
            f"1: {algorithm.name} compares the episodes of a group with each other; expected at least 2, another "
            "algorithm, or algorithm.baseline=batch with algorithm.scale=batch",
        )
    if collect.scenarios % algorithm.minibatches:
        divisors = [n for n in range(1, collect.scenarios + 1) if collect.scenarios % n == 0]
        yield Problem(
            "algorithm.minibatches",
            f"{algorithm.minibatches} does not divide collect.scenarios={collect.scenarios}; "
            f"expected one of {', '.join(map(str, divisors))}",
        )
    if collect.temperature == 0:
        yield Problem(
            "collect.temperature",
            "0 samples nothing: greedy choices have no probability to learn from; expected more than 0",
        )
    if algorithm.overlong_buffer > algorithm.overlong:
        yield Problem(
            "algorithm.overlong_buffer",
            f"{algorithm.overlong_buffer} is more than algorithm.overlong={algorithm.overlong}, where it ends",
        )
    if isinstance(algorithm, PPOSpec) and algorithm.kl_target is not None and not algorithm.kl_coefficient:
        yield Problem(
            "algorithm.kl_target",
            f"{algorithm.kl_target:g} steers algorithm.kl_coefficient by a factor, and 0 stays 0; expected null, or an "
            "algorithm.kl_coefficient above 0",
        )


def _compares(algorithm: Any) -> bool:
    """Whether the episodes of a group are compared with each other."""
    grouped = isinstance(algorithm, GRPOSpec) and algorithm.baseline in ("group", "leave_one_out")
    return grouped or isinstance(algorithm, PairSpec)


def weights(model: ModelSpec, inference: InferenceSpec, algorithm: Any, rounds: int) -> Iterator[Problem]:
    """What needs an adapter, where all weights are trained; and what a rounded base does not go with."""
    if model.quantization != "none":
        if model.lora is None:
            yield Problem(
                "model.quantization",
                f"{model.quantization}: weights in four bits cannot be trained; expected none, or a rank in model.lora",
            )
        if isinstance(inference, RemoteSpec | VllmSpec):
            yield Problem(
                "model.quantization",
                f"{model.quantization}: the server of inference={inference.name} does not sample from the rounded "
                "weights that are trained on; expected none, or inference=embedded",
            )
    if model.lora is not None:
        return
    if isinstance(inference, RemoteSpec | VllmSpec):
        yield Problem(
            "model.lora",
            f"null: the server of inference={inference.name} is given adapters, not weights; expected a rank, or "
            "inference=embedded",
        )
    if rounds and isinstance(algorithm, PPOSpec) and algorithm.value == "model":
        yield Problem(
            "algorithm.value",
            "model: is an adapter beside the policy's, and with model.lora=null there is none; expected head",
        )


def signal(filter: Target, algorithm: Any, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    if not rounds:
        return
    parts = {f"filter{end}": one for end, one in links(filter).items() if isinstance(one, Target)}
    for path, one in parts.items():
        kind = one.factory()
        if kind is Signal and collect.group_size == 1 and not _compares(algorithm):
            yield Problem(
                path,
                "signal keeps groups whose rewards differ, and with collect.group_size=1 none do; expected "
                "filter=everything, or a collect.group_size of at least 2",
            )
        elif kind is Signal and (isinstance(algorithm, DistillSpec) or _limits(algorithm)):
            learns = (
                "learns from no reward"
                if isinstance(algorithm, DistillSpec)
                else "has costs, in which groups differ too"
            )
            yield Problem(
                path,
                f"signal keeps groups whose rewards differ, and {algorithm.name} {learns}; expected filter=everything",
            )
        elif kind is Best and one.arguments.get("count", 1) == 1 and _compares(algorithm):
            yield Problem(
                f"{path}.count",
                f"1 of each group is kept, and {algorithm.name} compares the episodes of a group with each other; "
                f"expected {path}.count=2 or more, filter=signal, or algorithm=sft",
            )
    if collect.refills and all(_leaves_out_none(one) for one in parts.values()):
        yield Problem(
            "collect.refills",
            f"{collect.refills} replace scenarios that the filter leaves out, and {_named(filter)} leaves out none; "
            "expected 0, or filter=signal",
        )


def _leaves_out_none(filter_: Target) -> bool:
    """Whether of every scenario with a scored episode at least one is kept."""
    kind, given = filter_.factory(), filter_.arguments
    of_group = (kind is Top and given.get("of") == "group") or (
        kind is Distinct and given.get("of", "group") == "group"
    )
    return kind in (Everything, Best) or of_group


def _named(filter_: Target) -> str:
    kind = filter_.factory()
    return "filter=everything" if kind is Everything else f"filter {kind.__name__}"


def overlap(
    collect: CollectSpec, algorithm: Any, replay: ReplaySpec | None, reward_model: RewardModelPartSpec | None
) -> Iterator[Problem]:
    """What must not learn from a policy one version behind, or has not been told how."""
    if not collect.overlap:
        return
    if isinstance(algorithm, PolicyGradientSpec) and algorithm.correction == "none":
        yield Problem(
            "algorithm.correction",
            "none: with collect.overlap=1 a round is played by a policy one version behind the one in training, and "
            "where they differ the clip cuts what is learned; expected truncate or mask, or collect.overlap=0",
        )
    if replay is not None and replay.max_staleness == 0:
        yield Problem(
            "replay.max_staleness",
            "0: drops every round that collect.overlap=1 has played, which is one version old; expected at least 1",
        )
    if reward_model is not None and reward_model.every:
        yield Problem(
            "reward_model.every",
            f"{reward_model.every}: a round that collect.overlap=1 has judged during a training cannot be judged by "
            "the reward models that are trained after it; expected 0, or collect.overlap=0",
        )


def _limits(algorithm: Any) -> bool:
    return bool(getattr(algorithm, "costs", None))


def held_out(evaluate: EvaluateSpec, early_stopping: EarlyStoppingSpec | None, guards: GuardsSpec) -> Iterator[Problem]:
    if evaluate.every:
        return
    need = "evaluations in the rounds, and evaluate.every=0 makes none; expected evaluate.every=1 or more"
    if early_stopping is not None:
        yield Problem("early_stopping", f"needs {need}")
    for name in ("reward_hacking", "heldout_reward"):
        if getattr(guards, name) == "stop":
            yield Problem(f"guards.{name}", f"stop needs {need}")


def watched(
    guards: GuardsSpec, rounds: int, evaluate: EvaluateSpec, reward_model: RewardModelPartSpec | None
) -> Iterator[Problem]:
    """Guards that are to stop and could never strike."""
    if guards.heldout_reward == "stop" and evaluate.reward is None and reward_model is None:
        yield Problem(
            "guards.heldout_reward",
            "stop needs evaluations by another reward than the rounds have; expected off or warn, evaluate.reward, or "
            "reward_model",
        )
    for name in DRIFTS:
        if getattr(guards, name) == "stop" and rounds < 2 * ENDS:
            yield Problem(
                f"guards.{name}",
                f"stop compares the last {ENDS} rounds with the first {ENDS}, and rounds={rounds} are too few; "
                f"expected off or warn, or rounds={2 * ENDS} or more",
            )
    if guards.ensemble_disagreement == "stop" and reward_model is not None and reward_model.models == 1:
        yield Problem(
            "guards.ensemble_disagreement",
            "stop needs judges that can disagree, and reward_model.models=1 is one; expected off or warn, or "
            "reward_model.models=2 or more",
        )


def turn_credit(algorithm: Any) -> Iterator[Problem]:
    """Combinations of `credit: turns` whose gradient has no definition."""
    if not isinstance(algorithm, GRPOSpec) or algorithm.credit != "turns" or not algorithm.kl_coefficient:
        return
    if algorithm.turn_baseline != "index" and algorithm.kl_in == "token_rewards":
        others = "loss" if algorithm.turn_baseline == "process" else "loss or reward"
        yield Problem(
            "algorithm.turn_baseline",
            f"{algorithm.turn_baseline}: compares turns, and with kl_in=token_rewards each token has a return of its "
            f"own; expected turn_baseline=index, or kl_in={others}",
        )
    elif algorithm.turn_baseline == "process" and algorithm.kl_in == "reward":
        yield Problem(
            "algorithm.kl_in",
            "reward: with turn_baseline=process the step rewards are normalised before they are added up, so a KL of "
            "the whole episode would count once for each turn; expected kl_in=loss",
        )


def scale(algorithm: Any) -> Iterator[Problem]:
    """Deviations of a group as the unit of a difference to something else."""
    if isinstance(algorithm, GRPOSpec) and algorithm.scale == "group" and algorithm.baseline in ("batch", "none"):
        yield Problem(
            "algorithm.scale",
            f"group: with baseline={algorithm.baseline} returns are not compared with those of their group, and where "
            "these are nearly equal, their small deviation divides a large difference; expected batch or none, or "
            "baseline=group or leave_one_out",
        )


def sequence_ratio(algorithm: Any, replay: ReplaySpec | None) -> Iterator[Problem]:
    """Ratios of sequences are taken to the policy before the first step, which has not played replayed episodes."""
    if (
        replay is not None
        and isinstance(algorithm, PolicyGradientSpec)
        and algorithm.ratio != "token"
        and algorithm.correction == "none"
    ):
        yield Problem(
            "algorithm.correction",
            f"none: with ratio={algorithm.ratio} ratios are taken to the policy before the first step, and replay "
            "brings episodes of earlier ones; expected truncate or mask",
        )


def costs(algorithm: Any) -> Iterator[Problem]:
    if isinstance(algorithm, PolicyGradientSpec) and algorithm.credit == "turns" and algorithm.reward_cap is not None:
        yield Problem(
            "algorithm.reward_cap",
            f"{algorithm.reward_cap:g} caps the judged reward, which credit=turns does not use; expected null",
        )


def ewc(
    ewc: EWCSpec | None, warmup: WarmupSpec | None, fork: str | None, feedback: FeedbackSpec | None, rounds: int
) -> Iterator[Problem]:
    if ewc is not None and rounds and warmup is None and fork is None and feedback is None:
        yield Problem("ewc", "there is nothing to hold on to: expected a warmup, a fork, feedback, or null")


def people(feedback: FeedbackSpec | None) -> Iterator[Problem]:
    algorithm = feedback.algorithm if feedback is not None else None
    if isinstance(algorithm, SFTSpec) and algorithm.weight_temperature is None:
        yield Problem(
            "feedback.algorithm.weight_temperature",
            "null learns an episode that people scored 1 as much as one that they scored 5; expected a number, such "
            "as 0.25",
        )
