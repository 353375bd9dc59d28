"""Checks of rewards, judges, reward models and filters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from components.algorithms.spec import AlgorithmSpec
from components.data.spec import DataSpec
from components.errors import Problem, ResourceError, SpecError
from components.evaluation.judge_drift import TESTS, level, smallest_p
from components.evaluation.spec import CalibrateSpec, EvaluateSpec
from components.exceptions import described
from components.filters.among import Among
from components.filters.chain import combines, links
from components.inference.spec import InferenceSpec
from components.rewards.llm.spec import asked_by
from components.rewards.protocol import ReadingReward
from components.rewards.rules.answer_format import Matches
from components.rewards.rules.answers import of_input
from components.rewards.rules.costs import Costs
from components.rewards.rules.tool_use import Calls
from components.rewards.spec import JudgeSpec
from components.rollout.collect_spec import CollectSpec
from components.rollout.spec import AgentSpec
from components.specs import Target
from components.trajectories.step_labels import CONTINUED
from flows.experiment.checks.importing import demonstrated
from flows.experiment.checks.worlds import TRAIN, input_fields, offered_tools, scenario_kinds
from flows.experiment.flow import FlowTarget
from flows.experiment.guards import GuardsSpec
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec


def reward(reward: Target) -> Iterator[Problem]:
    """Check that the reward and the rewards nested in it can be built, innermost first.

    A reward that contains an invalid one is skipped: it would fail for the same reason."""
    invalid_paths: list[str] = []
    for path, target in [*reward.below("reward"), ("reward", reward)]:
        if not any(invalid.startswith(f"{path}.") for invalid in invalid_paths):
            problems = list(_build_problems(path, target))
            invalid_paths += [path] if problems else []
            yield from problems


def _build_problems(path: str, reward: Target) -> Iterator[Problem]:
    factory = reward.factory()
    try:
        built = reward.build()
    except SpecError as error:
        for problem in error.problems:
            inside = problem.path.startswith("reward")
            yield replace(problem, path=f"{path}{problem.path.removeprefix('reward')}" if inside else path)
        return
    except ResourceError as error:
        yield Problem(path, str(error))
        return
    except Exception as error:  # noqa: BLE001  user code may raise anything
        yield Problem(path, f"{reward.target} cannot be built: {described(error)}")
        return
    scores = inspect.isfunction(factory) or callable(built) or hasattr(built, "score_group")
    if path == "reward" and not scores:
        yield Problem(
            f"{path}._target_", f"{reward.target} cannot score; expected a method `__call__` or `score_group`"
        )


ADDED = ("reflection", "continuations", "opponent", "teacher")
"""Options of `collect` with which a group has more episodes than its size."""


def ahead(
    judge: JudgeSpec, reward: Target, collect: CollectSpec, reward_model: RewardModelPartSpec | None
) -> Iterator[Problem]:
    """Check that the reward can judge episodes while others are played (`judge.ahead`)."""
    if not judge.ahead or list(_build_problems("reward", reward)):
        return
    from components.rewards.judge import RewardCaller

    models = asked_by(reward)
    if reward_model is not None:
        reason = "reward models score the rounds, and they compute in the process of the judge stage"
    elif not RewardCaller(reward.build()).waits:
        reason = f"{reward.target} computes its scores and waits for no service, so there is nothing to overlap"
    elif any(model.asks_policy or model.frozen_model is not None for model in models):
        reason = "the reward asks a model in the process that plays the episodes"
    elif any(getattr(model, "batch", False) for model in models):
        reason = "the judge sends one batch for all episodes of a stage (reward.model.batch=true)"
    elif ways := [name for name in ADDED if getattr(collect, name) != getattr(CollectSpec(), name)]:
        reason = f"collect.{ways[0]} adds episodes to a group after its own ones have finished"
    else:
        return
    yield Problem("judge.ahead", f"true: {reason}; expected false")


def other_rewards(evaluate: EvaluateSpec, calibrate: CalibrateSpec, environment: Target) -> Iterator[Problem]:
    """Check `evaluate.reward` and `calibrate`."""
    for path, target in (("evaluate.reward", evaluate.reward), ("calibrate.truth", calibrate.truth)):
        for problem in reward(target) if target is not None else ():
            yield replace(problem, path=problem.path.replace("reward", path, 1))
    if calibrate.solutions and "solve" not in dir(environment.factory()):
        yield Problem(
            "calibrate.solutions",
            f"true, but {environment.target} has no method solve(scenario); expected null or false",
        )


def fields(reward: Target, environment: Target, evaluate: EvaluateSpec, agent: AgentSpec) -> Iterator[Problem]:
    """Check that scenarios have the input fields that rewards read.

    Without the field every episode would be unscored, which only the first evaluation would show. A name without a
    prefix counts as an input field, unless an agent of one's own plays, whose outcome may have a field of that name."""
    fields_read: dict[str, tuple[str, str]] = {}
    for path, target in _declared(reward, evaluate):
        for key, field in _fields(target).items():
            if (name := of_input(field, outcome=agent.own is not None)) is not None:
                fields_read[f"{path}.{key}"] = (field, name)
    inputs = input_fields(environment, (TRAIN, evaluate.split)) if fields_read else None
    for key, (field, name) in fields_read.items() if inputs is not None else ():
        if inputs is not None and name not in inputs:
            available = ", ".join(sorted(map(str, inputs))) or "no fields"
            yield Problem(
                key,
                f"{field!r}: no scenario of {environment.target} has this input field (available: {available}); "
                "expected one of these, outcome.FIELD for a field of the episode's outcome, or another reward",
            )


def tools(reward: Target, environment: Target, evaluate: EvaluateSpec, agent: AgentSpec) -> Iterator[Problem]:
    """Check that the environment offers the tools whose calls are counted: a list of forbidden actions with a misspelt
    name forbids nothing. Tools of an agent of one's own or of roles are unknown."""
    targets = [] if agent.own is not None or agent.roles is not None else _declared(reward, evaluate)
    counted = {f"{path}.tools": target.arguments.get("tools") for path, target in targets if target.factory() is Calls}
    offered = {tool["function"]["name"] for tool in offered_tools(environment)} if any(counted.values()) else set()
    for path, name in ((path, name) for path, names in counted.items() for name in names or () if offered):
        if name not in offered:
            available = ", ".join(sorted(offered))
            yield Problem(path, f"{name!r}: {environment.target} has no such tool; expected one of {available}")


NOTHING = "(?!)"
"""Regular expression that matches nothing."""


def forbidden(reward: Target, evaluate: EvaluateSpec) -> Iterator[Problem]:
    """Check that costs of calls and texts are restricted: `reward=forbidden` as it is counts every call and no text."""
    for path, target in _declared(reward, evaluate):
        named = target.arguments.get("costs", {}).items() if target.factory() is Costs else ()
        costs = {name: cost for name, cost in named if isinstance(cost, Target)}
        kinds = {name: cost.factory() for name, cost in costs.items()}
        patterns = [cost.arguments.get(key) for cost in costs.values() for key in ("tools", "pattern")]
        if {*kinds.values()} in ({Matches}, {Matches, Calls}) and all(text in (None, NOTHING) for text in patterns):
            keys: dict[Any, str] = {Calls: "tools=[TOOL]", Matches: "pattern=EXPRESSION"}
            ways = " or ".join(f"{path}.costs.{name}.{keys[kind]}" for name, kind in kinds.items())
            yield Problem(f"{path}.costs", f"forbid nothing: every call counts, and no text; expected {ways}")


def _declared(reward: Target, evaluate: EvaluateSpec) -> Iterator[tuple[str, Target]]:
    """Yield the rewards of training and evaluation and those nested in them, with their keys."""
    for root, declared in (("reward", reward), ("evaluate.reward", evaluate.reward)):
        if declared is not None:
            yield from [*declared.below(root), (root, declared)]


def _fields(reward: Target) -> Mapping[str, str]:
    try:
        built = reward.build()
    except Exception:  # noqa: BLE001  the check `reward` reports it
        return {}
    return built.fields_read() if isinstance(built, ReadingReward) else {}


def judges(reward: Target, judge: JudgeSpec, collect: CollectSpec, evaluate: EvaluateSpec) -> Iterator[Problem]:
    """Check the LLM judges against the settings of the judge stage: budget, batch size, rate limits."""
    by_group = hasattr(reward.factory(), "score_group")
    requests = max(collect.scenarios * (1 if by_group else collect.group_size), evaluate.scenarios or 0)
    for model in [*asked_by(reward), *asked_by(evaluate.reward)]:
        yield from model.problems(judge, requests, "groups" if by_group else "episodes")


def refresh(
    reward_model: RewardModelPartSpec | None, rounds: int, guards: GuardsSpec, fork: str | None
) -> Iterator[Problem]:
    """Check that the reward model is retrained within the rounds, and that guards can compare its rewards."""
    if reward_model is None:
        return
    every = reward_model.every
    if every >= max(rounds, 1):
        most = f"at most {rounds - 1}, or 0" if rounds > 1 else "0"
        yield Problem("reward_model.every", f"{every}: with rounds={rounds} no round comes after it; expected {most}")
    if not every and reward_model.keep != "all":
        yield Problem(
            "reward_model.keep",
            f"{reward_model.keep}: has no effect with reward_model.every=0, which trains the reward model once; "
            "expected all, or reward_model.every=1 or more",
        )
    if reward_model.adversarial and (not every or fork is not None):
        reason = "the rounds before a fork are not judged again" if every else "every=0 trains the reward model once"
        expected = "false, or no fork" if every else "false, or reward_model.every=1 or more"
        yield Problem("reward_model.adversarial", f"true: {reason}; expected {expected}")
    for name in ("reward_hacking", "heldout_reward"):
        if every != 1 or getattr(guards, name) != "stop":
            continue
        yield Problem(
            f"guards.{name}",
            "stop compares training rewards of rounds that the same reward model scored, and reward_model.every=1 "
            "retrains it after each round; expected off or warn, or reward_model.every=2 or more",
        )


def drift(
    guards: GuardsSpec, rounds: int, collect: CollectSpec, reward_model: RewardModelPartSpec | None
) -> Iterator[Problem]:
    """Check that the judge's drift can be measured, and that it can raise an alarm."""
    if guards.judge_drift == "off":
        return
    if rounds < 2:
        yield Problem(
            "guards.judge_drift",
            f"{guards.judge_drift} compares later rounds with the first, and rounds={rounds} is too few; expected off, "
            "or rounds=2 or more",
        )
        return
    if reward_model is not None and not reward_model.task_weight:
        yield Problem(
            "guards.judge_drift",
            f"{guards.judge_drift} judges episodes again with the declared reward, but reward models score the rounds; "
            "expected off, reward_model=none, or reward_model.task_weight above 0",
        )
    groups, limit = min(guards.anchors, collect.scenarios), level(guards.drift_alpha, rounds - 1)
    if smallest_p(groups) > limit:
        needed = next(number for number in range(groups, 1000) if smallest_p(number) <= limit)
        key = "anchors" if guards.anchors < needed else "judge_drift"
        value = guards.anchors if key == "anchors" else guards.judge_drift
        yield Problem(
            f"guards.{key}",
            f"{value}: with the episodes of {groups} scenarios no p-value is below "
            f"drift_alpha={guards.drift_alpha:g} / {TESTS * (rounds - 1)} tests, so no drift raises an alarm; expected "
            "guards.anchors and "
            f"collect.scenarios of at least {needed}, or a larger drift_alpha",
        )


def reward_model(
    reward_model: RewardModelPartSpec | None,
    collect: CollectSpec,
    inference: InferenceSpec,
    algorithm: AlgorithmSpec,
    agent: AgentSpec,
) -> Iterator[Problem]:
    """Check the training of the reward model against the episodes that it learns from."""
    if reward_model is None:
        return
    trained = reward_model.algorithm
    if reward_model.continuations and not (CONTINUED in trained.heads and trained.scores_turns):
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: continuations label steps, but no head learns these labels; expected 0, or "
            f"reward_model=process with reward_model.algorithm.heads={{{CONTINUED}: 1.0}}",
        )
    if CONTINUED in trained.heads and not reward_model.continuations:
        yield Problem(
            "reward_model.algorithm.heads",
            f"{CONTINUED} learns from continuations, but reward_model.continuations=0; expected 1 or more",
        )
    if reward_model.continuations and (agent.own is not None or agent.roles is not None):
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: continuations start from a step of the agent loop, which "
            f"{agent.own or 'agent.roles'} replaces; expected 0",
        )
    if reward_model.continuations and agent.format == "code":
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: continuations start from a single action, but one code block of "
            "agent.format=code may run several; expected 0, or another format",
        )
    if reward_model.continuations and any(player.both_sides for player in collect.players()):
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: continuations play against the environment's opponent, but "
            f"collect.opponent={collect.opponent}; expected 0, or collect.opponent=environment",
        )
    by_turn = trained.learns_turn_labels
    if algorithm.ignores_rewards:
        yield Problem("reward_model", f"algorithm={algorithm.name} does not use rewards; expected reward_model=none")
    if algorithm.credits_turns and not trained.scores_turns:
        yield Problem(
            "algorithm.credit",
            f"turns: reward_model.algorithm.name={trained.name} scores whole episodes; expected episode, or "
            "reward_model=process",
        )
    if not by_turn and not reward_model.data.is_set and reward_model.group_size == 1:
        yield Problem(
            "reward_model.group_size",
            "1: a preference pair needs two episodes of a scenario; expected at least 2, or loss: mse",
        )
    if not by_turn and not reward_model.data.is_set and collect.temperature == 0:
        yield Problem("collect.temperature", "0: all episodes of a scenario would be identical; expected more than 0")
    if not inference.returns_tokens:
        yield inference.lacks_tokens("reward_model needs the tokens of episodes")
    if reward_model.models == 1 and reward_model.combine != "mean":
        yield Problem(
            "reward_model.combine",
            f"{reward_model.combine}: combines the scores of several models, but reward_model.models=1; expected mean, "
            "or reward_model.models=2 or more",
        )


def filters(filter: Target, warmup: WarmupSpec | None) -> Iterator[Problem]:
    """Check that `filter` and `warmup.filter` are filters and can be built."""
    for path, target in [("filter", filter), *([("warmup.filter", warmup.filter)] if warmup else [])]:
        problems = [problem for end, link in links(target).items() for problem in _filter(f"{path}{end}", link)]
        yield from problems or (_filter_build_problems(path, target) if combines(target) else ())


def filtered_scenarios(
    filter: Target, warmup: WarmupSpec | None, environment: Target, data: DataSpec, flow: FlowTarget, rounds: int
) -> Iterator[Problem]:
    """Check that the environment has scenarios of the types and difficulties that filters of its episodes name.

    Filters of imported data are not checked here: the filter stage reads the scenarios of the data."""
    warmup = demonstrated(warmup, data, flow)
    played = {"filter": filter} if rounds else {}
    if warmup is not None:
        played["warmup.filter"] = warmup.filter
    links_by_path = {f"{path}{end}": link for path, target in played.items() for end, link in links(target).items()}
    among = {path: link for path, link in links_by_path.items() if isinstance(link, Target) and link.factory() is Among}
    kinds = scenario_kinds(environment, TRAIN) if among and not flow.generates else {}
    for path, link in among.items():
        if any(kinds.values()) and not list(_filter_build_problems(path, link)):
            built: Among = link.build()
            for problem in built.problems(kinds[built.by], f"scenario of split {TRAIN!r}"):
                yield replace(problem, path=path + problem.path.removeprefix("filter"))


def _filter(path: str, target: Any) -> Iterator[Problem]:
    expected = "expected a function (trajectory) -> bool, or a class with a method `select` or `survey`"
    if not isinstance(target, Target):
        yield Problem(path, f"{target!r:.80} is not a filter; {expected}, as _target_")
        return
    factory = target.factory()
    if inspect.isclass(factory):
        usable = bool({"select", "survey", "__call__"} & set(dir(factory)))
    else:
        usable = any(parameter.kind in _POSITIONAL for parameter in inspect.signature(factory).parameters.values())
    if not usable:
        yield Problem(f"{path}._target_", f"{target.target} is not a filter; {expected}")
        return
    yield from _filter_build_problems(path, target)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _filter_build_problems(path: str, target: Target) -> Iterator[Problem]:
    """Yield the problems that building the filter raises."""
    try:
        target.build()
    except SpecError as error:
        for problem in error.problems:
            yield Problem(path + problem.path.removeprefix("filter"), problem.message, problem.nearest)
    except Exception as error:  # noqa: BLE001  user code may raise anything
        yield Problem(path, f"{target.target} cannot be built: {described(error)}")
