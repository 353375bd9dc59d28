"""Checks of the algorithm against the episodes that it learns from and the model that it trains."""

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
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rollout.spec import CollectSpec
from components.specs import Target
from flows.experiment.early_stopping import EarlyStoppingSpec
from flows.experiment.feedback import FeedbackSpec
from flows.experiment.guards import DRIFTS, GuardsSpec
from flows.experiment.guards.drift import ENDS
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec


def algorithm(algorithm: Any, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    """Check group size, minibatches, temperature, overlong penalty and KL target."""
    if rounds == 0:
        return
    if isinstance(algorithm, PairSpec) and collect.group_size == 1:
        yield Problem(
            "collect.group_size",
            f"1: {algorithm.name} compares two episodes of a scenario; expected at least 2, or algorithm=kto",
        )
    if not isinstance(algorithm, PolicyGradientSpec):
        return
    if collect.group_size == 1 and _compares(algorithm):
        yield Problem(
            "collect.group_size",
            f"1: {algorithm.name} compares episodes within a group; expected at least 2, another algorithm, or "
            "algorithm.baseline=batch with algorithm.scale=batch",
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
            "0: greedy decoding does not sample, so the policy gradient is undefined; expected more than 0",
        )
    if algorithm.overlong_buffer > algorithm.overlong:
        yield Problem(
            "algorithm.overlong_buffer",
            f"{algorithm.overlong_buffer}: the buffer ends at algorithm.overlong={algorithm.overlong} tokens; expected "
            "at most that",
        )
    if isinstance(algorithm, PPOSpec) and algorithm.kl_target is not None and not algorithm.kl_coefficient:
        yield Problem(
            "algorithm.kl_target",
            f"{algorithm.kl_target:g}: scales algorithm.kl_coefficient by a factor, which has no effect on 0; expected "
            "null, or an algorithm.kl_coefficient above 0",
        )


def _compares(algorithm: Any) -> bool:
    """Return True if the algorithm compares the episodes of a group with each other."""
    grouped = isinstance(algorithm, GRPOSpec) and algorithm.baseline in ("group", "leave_one_out")
    return grouped or isinstance(algorithm, PairSpec)


def weights(model: ModelSpec, inference: InferenceSpec, algorithm: Any, rounds: int) -> Iterator[Problem]:
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
    if not inference.in_process:
        yield Problem(
            "model.lora",
            f"null: the server of inference={inference.name} loads adapters, not full weights; expected a rank, or "
            "inference=embedded",
        )
    if rounds and isinstance(algorithm, PPOSpec) and algorithm.value == "model":
        yield Problem(
            "algorithm.value",
            "model: the value model is a second LoRA adapter, but model.lora=null; expected head",
        )


def signal(filter: Target, algorithm: Any, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    """Check that the filter keeps the episodes that the algorithm needs, and that refills can occur."""
    if not rounds:
        return
    parts = {f"filter{end}": link for end, link in links(filter).items() if isinstance(link, Target)}
    for path, part in parts.items():
        kind = part.factory()
        if kind is Signal and collect.group_size == 1 and not _compares(algorithm):
            yield Problem(
                path,
                "signal keeps groups whose rewards differ, and a group of one episode (collect.group_size=1) never "
                "does; expected filter=everything, or a collect.group_size of at least 2",
            )
        elif kind is Signal and (isinstance(algorithm, DistillSpec) or _has_costs(algorithm)):
            reason = (
                "does not use rewards"
                if isinstance(algorithm, DistillSpec)
                else "also learns from groups that differ in their costs only"
            )
            yield Problem(
                path,
                f"signal keeps groups whose rewards differ, but {algorithm.name} {reason}; expected filter=everything",
            )
        elif kind is Best and part.arguments.get("count", 1) == 1 and _compares(algorithm):
            yield Problem(
                f"{path}.count",
                f"1: keeps one episode per group, but {algorithm.name} compares episodes within a group; "
                f"expected {path}.count=2 or more, filter=signal, or algorithm=sft",
            )
    if collect.refills and all(_keeps_every_scenario(part) for part in parts.values()):
        yield Problem(
            "collect.refills",
            f"{collect.refills}: refills replace scenarios that the filter drops, and {_filter_name(filter)} drops "
            "none; expected 0, or filter=signal",
        )


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
    collect: CollectSpec, algorithm: Any, replay: ReplaySpec | None, reward_model: RewardModelPartSpec | None
) -> Iterator[Problem]:
    """Check the options that off-policy episodes (`collect.overlap=1`, one version behind) exclude."""
    if not collect.overlap:
        return
    if isinstance(algorithm, PolicyGradientSpec) and algorithm.correction == "none":
        yield Problem(
            "algorithm.correction",
            "none: with collect.overlap=1 a round is collected with a policy one version behind the one in training, "
            "and clipping removes the gradient where they differ; expected truncate or mask, or collect.overlap=0",
        )
    if replay is not None and replay.max_staleness == 0:
        yield Problem(
            "replay.max_staleness",
            "0: drops all rounds collected with collect.overlap=1, which are one version old; expected at least 1",
        )
    if reward_model is not None and reward_model.every:
        yield Problem(
            "reward_model.every",
            f"{reward_model.every}: with collect.overlap=1 a round is scored during training, before the reward model "
            "is retrained; expected 0, or collect.overlap=0",
        )


def _has_costs(algorithm: Any) -> bool:
    return bool(getattr(algorithm, "costs", None))


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


def turn_credit(algorithm: Any) -> Iterator[Problem]:
    """Check options with which the gradient of `credit: turns` is undefined."""
    if not isinstance(algorithm, GRPOSpec) or algorithm.credit != "turns" or not algorithm.kl_coefficient:
        return
    if algorithm.turn_baseline != "index" and algorithm.kl_in == "token_rewards":
        kl_options = "loss" if algorithm.turn_baseline == "process" else "loss or reward"
        yield Problem(
            "algorithm.turn_baseline",
            f"{algorithm.turn_baseline}: compares returns of turns, but kl_in=token_rewards gives each token its own "
            f"return; expected turn_baseline=index, or kl_in={kl_options}",
        )
    elif algorithm.turn_baseline == "process" and algorithm.kl_in == "reward":
        yield Problem(
            "algorithm.kl_in",
            "reward: turn_baseline=process normalizes step rewards before it sums them, so the KL of the whole episode "
            "would count once per turn; expected kl_in=loss",
        )


def scale(algorithm: Any) -> Iterator[Problem]:
    """Check that group scaling is used only with a group baseline."""
    if isinstance(algorithm, GRPOSpec) and algorithm.scale == "group" and algorithm.baseline in ("batch", "none"):
        yield Problem(
            "algorithm.scale",
            f"group: with baseline={algorithm.baseline} the advantage is not relative to the group, and a group of "
            "nearly equal returns would divide it by a very small standard deviation; expected batch or none, or "
            "baseline=group or leave_one_out",
        )


def sequence_ratio(algorithm: Any, replay: ReplaySpec | None) -> Iterator[Problem]:
    """Check that sequence-level importance ratios with replay have an off-policy correction.

    These ratios are relative to the policy before the first gradient step, which did not sample replayed episodes."""
    if (
        replay is not None
        and isinstance(algorithm, PolicyGradientSpec)
        and algorithm.ratio != "token"
        and algorithm.correction == "none"
    ):
        yield Problem(
            "algorithm.correction",
            f"none: with ratio={algorithm.ratio} ratios are relative to the policy before the first gradient step, but "
            "replay adds episodes of earlier policies; expected truncate or mask",
        )


def costs(algorithm: Any) -> Iterator[Problem]:
    """Check that `reward_cap` applies to the chosen credit assignment."""
    if isinstance(algorithm, PolicyGradientSpec) and algorithm.credit == "turns" and algorithm.reward_cap is not None:
        yield Problem(
            "algorithm.reward_cap",
            f"{algorithm.reward_cap:g}: caps the episode's reward, which credit=turns does not use; expected null",
        )


def ewc(
    ewc: EWCSpec | None, warmup: WarmupSpec | None, fork: str | None, feedback: FeedbackSpec | None, rounds: int
) -> Iterator[Problem]:
    """Check that elastic weight consolidation has an earlier training to preserve."""
    if ewc is not None and rounds and warmup is None and fork is None and feedback is None:
        yield Problem(
            "ewc", "has no earlier training to preserve; expected a warmup, a fork or feedback in the run, or ewc=null"
        )


def feedback_weights(feedback: FeedbackSpec | None) -> Iterator[Problem]:
    """Check that training on human feedback weights episodes by their score."""
    algorithm = feedback.algorithm if feedback is not None else None
    if isinstance(algorithm, SFTSpec) and algorithm.weight_temperature is None:
        yield Problem(
            "feedback.algorithm.weight_temperature",
            "null: gives episodes that annotators scored 1 the same weight as those scored 5; expected a number, such "
            "as 0.25",
        )
