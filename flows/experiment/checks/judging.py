"""What rewards, reward models and filters need to do their part."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from components.algorithms.spec import (
    DistillSpec,
    ProcessRewardModelSpec,
)
from components.errors import Problem, ResourceError, SpecError
from components.evaluation.spec import CalibrateSpec, EvaluateSpec
from components.filters.chain import Chain, links
from components.inference.spec import InferenceSpec, RemoteSpec
from components.rewards.llm.spec import ServedJudge, asked_by
from components.rewards.protocol import ReadingReward
from components.rewards.rules.answers import of_input
from components.rewards.spec import JudgeSpec
from components.rollout.spec import AgentSpec, CollectSpec
from components.specs import Target
from components.trajectories.step_labels import CONTINUED
from flows.experiment.checks.worlds import TRAIN, stated
from flows.experiment.guards import GuardsSpec
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec


def reward(reward: Target) -> Iterator[Problem]:
    """Of the reward and of those that it is made of, those furthest down first: what one is refused for, the ones
    around it would be refused for, too."""
    wrong: list[str] = []
    for place, target in [*reward.below("reward"), ("reward", reward)]:
        if not any(one.startswith(f"{place}.") for one in wrong):
            found = list(_refused(place, target))
            wrong += [place] if found else []
            yield from found


def _refused(place: str, reward: Target) -> Iterator[Problem]:
    thing = reward.factory()
    try:
        built = reward.build()
    except SpecError as error:
        for one in error.problems:
            path = f"{place}{one.path.removeprefix('reward')}" if one.path.startswith("reward") else place
            yield replace(one, path=path)
        return
    except ResourceError as error:
        yield Problem(place, str(error))
        return
    except Exception as error:  # noqa: BLE001  code of the user: whatever it raises is the answer
        yield Problem(place, f"{reward.target} cannot be built: {type(error).__name__}: {error}")
        return
    scores = inspect.isfunction(thing) or callable(built) or hasattr(built, "score_group")
    if place == "reward" and not scores:
        yield Problem(f"{place}._target_", f"{reward.target} can score nothing; expected `__call__` or `score_group`")


def others(evaluate: EvaluateSpec, calibrate: CalibrateSpec, environment: Target) -> Iterator[Problem]:
    """Rewards beside the declared one."""
    for path, target in (("evaluate.reward", evaluate.reward), ("calibrate.truth", calibrate.truth)):
        for problem in reward(target) if target is not None else ():
            yield replace(problem, path=problem.path.replace("reward", path, 1))
    if calibrate.solutions and "solve" not in dir(environment.factory()):
        yield Problem(
            "calibrate.solutions", f"true, and {environment.target} has no solve(scenario); expected null or false"
        )


def fields(reward: Target, environment: Target, evaluate: EvaluateSpec, agent: AgentSpec) -> Iterator[Problem]:
    """Fields that rewards read and no scenario has: every episode would be unscored, which only the first evaluation
    would show. A name alone is expected in the input, unless an agent of the user's states the outcome."""
    read: dict[str, tuple[str, str]] = {}
    for path, declared in (("reward", reward), ("evaluate.reward", evaluate.reward)):
        for place, target in [*declared.below(path), (path, declared)] if declared is not None else ():
            for key, where in _fields(target).items():
                if (name := of_input(where, outcome=agent.function is not None)) is not None:
                    read[f"{place}.{key}"] = (where, name)
    scenarios = stated(environment, (TRAIN, evaluate.split)) if read else []
    inputs = set().union(*(one.input for one in scenarios))
    for key, (where, name) in read.items() if scenarios else ():
        if name not in inputs:
            has = ", ".join(sorted(map(str, inputs))) or "nothing"
            yield Problem(
                key,
                f"{where!r}: no scenario of {environment.target} has it in its input, which has {has}; expected one "
                "of these, outcome.FIELD for what the environment says at the end of an episode, or another reward",
            )


def _fields(reward: Target) -> Mapping[str, str]:
    try:
        built = reward.build()
    except Exception:  # noqa: BLE001  `reward` says so
        return {}
    return built.fields_read() if isinstance(built, ReadingReward) else {}


def judges(reward: Target, judge: JudgeSpec, collect: CollectSpec, evaluate: EvaluateSpec) -> Iterator[Problem]:
    """What the models that a reward asks need of the rest."""
    thing = reward.factory()
    together = hasattr(thing, "score_group")
    most = max(collect.scenarios * (1 if together else collect.group_size), evaluate.scenarios or 0)
    for one in [*asked_by(reward), *asked_by(evaluate.reward)]:
        if isinstance(one, ServedJudge) and one.price is None and judge.budget is not None:
            yield Problem(
                "judge.budget",
                f"{judge.budget:g} cannot be kept: what {one.model} costs is not known; expected its price for a "
                "million tokens, reward.model.price={input: 2.0, output: 8.0}, or judge.budget=null",
            )
        if isinstance(one, ServedJudge) and one.batch and judge.concurrency < most:
            what = "groups" if together else "episodes"
            yield Problem(
                "judge.concurrency",
                f"{judge.concurrency}: so many {what} are in one batch, and a batch may take a day; expected at least "
                f"{most}, so that those of a stage are one",
            )
        limits = ("requests_per_minute", "tokens_per_minute")
        for name in limits if isinstance(one, ServedJudge) and one.batch else ():
            if getattr(one, name) is not None:
                value = f"{getattr(one, name):g}"
                yield Problem(f"reward.model.{name}", f"{value}: batches have none; expected null, or batch=false")


def refresh(reward_model: RewardModelPartSpec | None, rounds: int, guards: GuardsSpec) -> Iterator[Problem]:
    if reward_model is None:
        return
    every = reward_model.every
    if every >= max(rounds, 1):
        most = f"at most {rounds - 1}, or 0" if rounds > 1 else "0"
        yield Problem("reward_model.every", f"{every}: with rounds={rounds} no round comes after it; expected {most}")
    if not every and reward_model.keep != "all":
        yield Problem(
            "reward_model.keep",
            f"{reward_model.keep}: says what is trained on again after rounds, and every=0 trains once; expected all, "
            "or reward_model.every=1 or more",
        )
    for name in ("reward_hacking", "heldout_reward"):
        if every != 1 or getattr(guards, name) != "stop":
            continue
        yield Problem(
            f"guards.{name}",
            "stop compares the training rewards of rounds that the same reward model judged, and reward_model.every=1 "
            "leaves no two of them; expected off or warn, or reward_model.every=2 or more",
        )


def reward_model(
    reward_model: RewardModelPartSpec | None,
    collect: CollectSpec,
    inference: InferenceSpec,
    algorithm: Any,
    agent: AgentSpec,
) -> Iterator[Problem]:
    if reward_model is None:
        return
    trained = reward_model.algorithm
    if reward_model.continuations and not (CONTINUED in trained.heads and isinstance(trained, ProcessRewardModelSpec)):
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations} label steps, and no head learns them; expected 0, or reward_model=process "
            f"with reward_model.algorithm.heads={{{CONTINUED}: 1.0}}",
        )
    if CONTINUED in trained.heads and not reward_model.continuations:
        yield Problem(
            "reward_model.algorithm.heads",
            f"{CONTINUED} learns the labels of continuations, and reward_model.continuations=0 makes none; expected 1 "
            "or more",
        )
    if reward_model.continuations and (agent.function is not None or agent.roles is not None):
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: go on from a step of the agent loop, and agent.function or agent.roles "
            "play in its place; expected 0",
        )
    if reward_model.continuations and agent.format == "code":
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: go on from single actions, and a block of agent.format=code may be many; "
            "expected 0, or another format",
        )
    if reward_model.continuations and collect.opponent != "environment":
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: go on against the environment's opponent; expected 0, or "
            "collect.opponent=environment",
        )
    by_turn = isinstance(trained, ProcessRewardModelSpec) and trained.loss == "mse"
    if isinstance(algorithm, DistillSpec):
        yield Problem("reward_model", "algorithm=distill learns from no reward; expected reward_model=none")
    if getattr(algorithm, "credit", "episode") == "turns" and not isinstance(trained, ProcessRewardModelSpec):
        yield Problem(
            "algorithm.credit",
            f"turns: reward_model.algorithm.name={trained.name} scores whole episodes; expected episode, or "
            "reward_model=process",
        )
    if not by_turn and reward_model.group_size == 1:
        yield Problem(
            "reward_model.group_size", "1: pairs are two episodes of a scenario; expected at least 2, or loss: mse"
        )
    if not by_turn and collect.temperature == 0:
        yield Problem("collect.temperature", "0 plays every episode of a scenario alike; expected more than 0")
    if isinstance(inference, RemoteSpec) and not inference.tokens:
        yield Problem("inference.tokens", "false, and reward_model reads the tokens of episodes; expected true")
    if reward_model.models == 1 and reward_model.combine != "mean":
        yield Problem(
            "reward_model.combine", f"{reward_model.combine}: says what several models give, and models=1 is one"
        )


def filters(filter: Target, warmup: WarmupSpec | None) -> Iterator[Problem]:
    for path, target in [("filter", filter), *([("warmup.filter", warmup.filter)] if warmup else [])]:
        found = [one for end, link in links(target).items() for one in _filter(f"{path}{end}", link)]
        yield from found or (_built(path, target) if target.factory() is Chain else ())


def _filter(path: str, target: Any) -> Iterator[Problem]:
    expected = "expected a function (trajectory) -> bool, or a class with a method `select` or `survey`"
    if not isinstance(target, Target):
        yield Problem(path, f"{target!r:.80} is no filter; {expected}, as _target_")
        return
    thing = target.factory()
    if inspect.isclass(thing):
        usable = bool({"select", "survey", "__call__"} & set(dir(thing)))
    else:
        usable = any(one.kind in _POSITIONAL for one in inspect.signature(thing).parameters.values())
    if not usable:
        yield Problem(f"{path}._target_", f"{target.target} is no filter; {expected}")
        return
    yield from _built(path, target)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _built(path: str, target: Target) -> Iterator[Problem]:
    """What a filter says of its arguments together."""
    try:
        target.build()
    except SpecError as error:
        yield from (Problem(path + one.path.removeprefix("filter"), one.message, one.nearest) for one in error.problems)
    except Exception as error:  # noqa: BLE001  code of the user: whatever it raises is the answer
        yield Problem(path, f"{target.target} cannot be built: {type(error).__name__}: {error}")
