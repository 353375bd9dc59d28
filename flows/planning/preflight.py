"""Check of a run's foreign parts before its first stage, so that a mistake in one of them costs no stage.

It covers the pending stages that run in the process of the flow. Servers of engines and judges answer one question; a
judge's answer is cached. The environment's solver demonstrates scenarios if the run needs demonstrations. The reward
scores an episode: a demonstration, else the solution of a scenario, else an answer that need not be right. A reward
that asks a judge is not called; its parts that compute without a model are.

Single scenarios may lack a solution or a score, so solver and reward are refused only if they fail on all scenarios
that are tried. An environment that fails is left to the stages, which retry and report it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from typing import Any

from components.aio import run
from components.artifacts import Artifact
from components.environments.protocol import Environment, Messages, Solver
from components.errors import (
    EngineError,
    EnvironmentFailed,
    EnvironmentUnavailable,
    EspalierError,
    JudgeError,
    Problem,
    SpecError,
)
from components.inference.protocol import ChatCompletion, ChatRequest, Sampling
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.composition.composed import NOT_APPLICABLE, Composed
from components.rewards.judge import RewardCaller, judge
from components.rewards.llm.budget import Meter
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.spec import JudgeModel, asked_by
from components.rewards.protocol import GroupReward, ModelReward
from components.rollout.agent import Episode, as_messages, ask
from components.rollout.formats import Presentation
from components.rollout.pool import close
from components.rollout.random_agent import RandomEngine
from components.rollout.request import EpisodeRequest
from components.rollout.usage import REASONING_TOKENS
from components.specs import Target, nearest
from components.trajectories.parts import SOLVER
from components.trajectories.schema import Failure, Scenario, Score, Trajectory
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.recipes.rehearsal import placeholder
from flows.recipes.run import Run
from flows.stages.base import Context, Request, StageSpec
from flows.stages.collect import CollectStage
from flows.stages.episodes import scenarios_of
from flows.stages.evaluate import EvaluateStage
from flows.stages.execute import find_stage, stage_and_spec
from flows.stages.generate import TASKS
from flows.stages.judge import JudgeStage, model_resources
from flows.stages.sample import SampleStage

SCENARIOS = 16
"""Maximum number of scenarios to try; normally the first one suffices."""
TURNS = 1000
"""Maximum number of turns of an attempt; a solution may need more than `agent.max_turns`."""
MOST_STAGES = 100
"""Maximum number of pending stages to consider; later rounds use the same parts."""
ANSWERS = ("", "1", "{}", r"\boxed{1}")
"""Answers to scenarios without a solution, in turn: a reward may not be made for each of them."""
QUESTION = [{"role": "user", "content": "Are you ready? Answer with the word yes."}]


def check(spec: ExperimentSpec, context: Context, start: StartingPoint) -> list[Request]:
    """Return the requests of the first stages that are not cached, and begin to start the server of an engine that
    they use on this machine.

    Raises the error that the run would end with: ResourceError, EngineError or JudgeError of a server that does not
    answer, EnvironmentFailed for a solver and JudgeError for a reward that fails on each scenario."""
    pending = list(_pending(spec, context, start))
    _start_engine((request for request in pending if not spec.compute.place(request.stage).remote), context)
    requests = [
        request
        for request in pending
        if not spec.compute.place(request.stage).concurrent  # it runs in this process
    ]
    parts = [stage_and_spec(request)[1] for request in requests]
    for model, inference, max_tokens in _engines(parts):
        _ask_engine(model, inference, max_tokens, context)
    for judge_model in _judges(parts):
        _ask_judge(judge_model, spec, context)
    if any(TASKS in request.inputs for request in requests):
        return pending  # a pending stage writes the tasks
    rewards = list({repr(reward): reward for part in parts if (reward := part.applied_reward())}.values())
    solved = [
        (part, request.seed)
        for request, part in zip(requests, parts, strict=True)
        if isinstance(part, CollectStage) and part.actor == "solver"
    ]
    played = [part for part in parts if isinstance(part, CollectStage | EvaluateStage) and part.actor != "solver"]
    single = spec.agent.own is None and spec.agent.roles is None and not spec.collect.player.both_sides
    if solved:
        _try_rewards(rewards, _demonstrations(*solved[0], spec, context))
    elif played and single:
        _try_rewards(rewards, _attempts(played[0], context))
    if played and single:
        _check_costs(spec, _attempts(played[0], context), context)
    return pending


class _Enough(Exception):
    """Signal that enough stages are known."""


def _pending(spec: ExperimentSpec, context: Context, start: StartingPoint) -> list[Request]:
    """Return the requests of the first stages that are not cached."""
    pending: dict[str, Request] = {}

    def call(label: str, step: int, request: Request) -> Artifact:
        if pending.keys().isdisjoint(request.inputs.values()) and (artifact := find_stage(request, context)):
            return artifact
        if len(pending) == MOST_STAGES:
            raise _Enough
        pending[label] = request
        return placeholder(label, request.stage)

    with suppress(_Enough, EspalierError):  # the recipe's refusals belong to the run, which knows all results
        Run(spec, call, start=start).execute()
    return list(pending.values())


# Servers


def _engines(parts: Sequence[StageSpec]) -> Iterator[tuple[ModelSpec, InferenceSpec, int]]:
    """Yield the engines on servers that run already, without duplicates: model, engine, tokens of a response."""
    asked: list[InferenceSpec] = []
    for part in parts:
        if isinstance(part, SampleStage) and part.inference.is_external and part.inference not in asked:
            asked.append(part.inference)
            yield part.model, part.inference, part.max_tokens
        if not isinstance(part, CollectStage | EvaluateStage) or part.actor in ("solver", "random"):
            continue
        teacher = part.collect.teacher if isinstance(part, CollectStage) else None
        for inference in (part.inference, *([teacher.inference] if teacher else [])):
            if inference.is_external and inference not in asked:
                asked.append(inference)
                yield part.model, inference, part.agent.max_tokens


def _start_engine(requests: Iterable[Request], context: Context) -> None:
    """Begin to start the server of the first stage that generates with the policy."""
    for request in requests:
        part = stage_and_spec(request)[1]
        if isinstance(part, CollectStage | EvaluateStage) and part.actor not in ("solver", "random", "teacher"):
            part.inference.start(part.model, context)
            return


def _ask_engine(model: ModelSpec, inference: InferenceSpec, max_tokens: int, context: Context) -> None:
    engine = inference.build(model, context)
    try:
        request = ChatRequest(QUESTION, policy=engine.policy, sampling=Sampling(max_tokens=max_tokens))
        run(ask(engine.chat, request, error=EngineError))
    finally:
        engine.close()


def _judges(parts: Sequence[StageSpec]) -> list[JudgeModel]:
    """Return the models on servers that score or write, without duplicates."""
    asked: list[JudgeModel] = []
    for part in parts:
        unused = isinstance(part, JudgeStage) and part.applied_reward() is None
        asked += [model for model in ([] if unused else asked_by(part)) if model.paid and model not in asked]
    return asked


def _ask_judge(model: JudgeModel, spec: ExperimentSpec, context: Context) -> None:
    client = JudgeClient(model, model_resources(Meter(spec.judge.budget), context, spec.model, None, None))

    async def question() -> None:
        client.keep(await client.ask(QUESTION, immediate=True))

    try:
        run(question())
    finally:
        client.close()


# Solver


def _demonstrations(stage: CollectStage, seed: int, spec: ExperimentSpec, context: Context) -> list[Trajectory]:
    """Return demonstrations up to the first successful one. Raises EnvironmentFailed if the solver fails on all
    scenarios, or if the filter of the warmup would keep no demonstration."""
    from components.rollout.collector import choose_scenarios, demonstrate

    available = scenarios_of(stage.environment, stage.split, context)
    scenarios = choose_scenarios(available, stage.collect.scenarios, stage.round, seed)[:SCENARIOS]
    demonstrations: list[Trajectory] = []
    errors: list[str] = []
    for scenario in scenarios:
        try:
            [demonstration] = demonstrate(
                stage.environment.build, [scenario], stage.agent.presentation(), stage.agent.roles
            )
        except EnvironmentUnavailable:
            return demonstrations
        except EnvironmentFailed as error:
            errors.append(f"{scenario.id}: {error}")
            continue
        demonstrations.append(demonstration)
        if demonstration.success:
            return demonstrations
    if not demonstrations:
        raise EnvironmentFailed(
            f"environment: {stage.environment.target} fails on each of {len(scenarios)} scenarios that it is to "
            f"demonstrate; the first: {errors[0]}. Correct solve(scenario), or set warmup=none"
        )
    if not _is_any_kept(demonstrations, spec):
        outcome = f"{demonstrations[0].scenario.id} ends with {demonstrations[0].outcome!r:.200}"
        raise EnvironmentFailed(
            f"environment: {stage.environment.target} solves none of {len(scenarios)} scenarios that it is to "
            f"demonstrate, and warmup.filter keeps none; the first: {outcome}. Correct solve(scenario), or set "
            "warmup=none"
        )
    return demonstrations


def _is_any_kept(demonstrations: Sequence[Trajectory], spec: ExperimentSpec) -> bool:
    """Return True if the filter of the warmup keeps a demonstration, or if the reward cannot be computed here."""
    from components.filters.select import apply
    from components.trajectories.sources import InMemory

    reward = spec.reward.build()
    if isinstance(reward, ModelReward) or spec.warmup is None:
        return True
    scores = judge(reward, demonstrations, concurrency=spec.judge.concurrency)
    rows = [replace(row, reward=score.reward) for row, score in zip(demonstrations, scores, strict=True)]
    reasons = (reason for _, reasons_N in apply(spec.warmup.filter.build(), InMemory(rows)) for reason in reasons_N)
    return None in reasons


# Reward


class _Script(RandomEngine):
    """Engine whose responses are given messages, of one token each."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = policy
        self.messages: Messages = []

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        prompt = [0] * (2 * len(request.messages))
        return ChatCompletion(self.messages.pop(0), "stop", prompt, [0], [-1.0], self.policy, reasoning_tokens=1)


def _attempts(stage: CollectStage | EvaluateStage, context: Context) -> Iterator[Trajectory]:
    """Yield finished episodes with the environment's solutions, or with `ANSWERS` without a solver."""
    split = stage.split if isinstance(stage, CollectStage) else stage.evaluate.split
    scenarios = scenarios_of(stage.environment, split, context)[:SCENARIOS]
    for scenario, answer in zip(scenarios, cycle(ANSWERS), strict=False):
        trajectory = run(_attempt(stage, scenario, answer))
        if trajectory is not None:
            yield trajectory


async def _attempt(stage: CollectStage | EvaluateStage, scenario: Scenario, answer: str) -> Trajectory | None:
    """Return the episode of a scenario; None if it fails, or is not finished: its outcome is no basis of a score."""
    limits = stage.collect if isinstance(stage, CollectStage) else stage.evaluate
    request = EpisodeRequest(
        scenario=scenario,
        sample=0,
        seed=0,
        sampling=Sampling(),
        max_turns=TURNS,
        timeout=limits.timeout,
        step_timeout=limits.step_timeout,
    )
    environment = stage.environment.build()
    try:
        solves = _solves(environment, scenario)
        engine = _Script(SOLVER if solves else answer)
        episode = Episode(engine, environment, request, Presentation("native", stage.agent.max_observation))
        async with episode.within():
            await episode.begin()
            if solves:
                engine.messages = as_messages(await ask(environment.solve, scenario), "solve")
            else:
                engine.messages = [{"role": "assistant", "content": answer}]
            while engine.messages and not episode.ended:
                await episode.turn()
        return episode.trajectory() if episode.done and episode.failure is None else None
    finally:
        await close(environment)


def _solves(environment: Environment, scenario: Scenario) -> bool:
    """Return True if the environment has a solution of the scenario."""
    if not isinstance(environment, Solver):
        return False
    with suppress(SpecError):
        getattr(environment, "check_solutions", lambda scenarios: None)([scenario])
        return True
    return False


def _try_rewards(rewards: Sequence[Target], episodes: Iterable[Trajectory]) -> None:
    """Raise JudgeError for a reward that fails on every episode. Each reward scores episodes up to its first score."""
    untested = [(target, part) for target in rewards for part in _computed(target.build())]
    error = None
    for episode in episodes:
        failures = [_failure(target, part, episode) for target, part in untested]
        untested = [entry for entry, failure in zip(untested, failures, strict=True) if failure]
        if not untested:
            return
        failure = next(filter(None, failures))
        content = "the solution" if episode.policy == SOLVER else f"the answer {episode.policy!r}"
        error = JudgeError(
            f"reward: {untested[0][0].target} cannot score {content} of scenario {episode.scenario.id}: "
            f"{failure.kind}: {failure.message}. No stage has run"
        )
    if error is not None:
        raise error


def _computed(reward: Any) -> Iterator[Any]:
    """Yield the reward if it computes without a model, else its parts that do."""
    if not isinstance(reward, ModelReward):
        yield reward
    elif isinstance(reward, Composed):
        for part in reward.parts.values():
            yield from _computed(part.reward)


def _scores(reward: Any, episode: Trajectory) -> list[Score]:
    """Return the score of an episode; of a reward of groups, the scores of the episode and of a copy."""
    again = replace(episode, id=f"{episode.scenario.id}/1", sample=1)
    group = [episode, again] if isinstance(reward, GroupReward) else [episode]
    caller = RewardCaller(reward)
    return run(caller.call_group_async(group)) if caller.waits else caller.call_group(group)


def _check_costs(spec: ExperimentSpec, episodes: Iterable[Trajectory], context: Context) -> None:
    """Raise SpecError for a cost that neither the first scored episode nor its score has. The components of a score by
    a model, and the metrics of players and of code are not known before they run."""
    from components.algorithms.policy_gradient.cost_constraints import numbers_of
    from components.models.weights import load_tokenizer, prepare
    from components.trajectories.chat import ChatFormat

    reward = spec.reward.build()
    unknown = spec.reward_model is not None or isinstance(reward, ModelReward)
    if not spec.algorithm.constraints or unknown or spec.collect.players() or spec.agent.format == "code":
        return
    for episode in episodes:
        score = _scores(reward, episode)[0]
        if score.reward is not None:
            chat = ChatFormat(load_tokenizer(prepare(spec.model.base(), context.cache)))
            unmeasured = {REASONING_TOKENS} if chat.reasoning is None else set()
            names = sorted((numbers_of(episode) | score.components).keys() - unmeasured)
            message = f"no episode has a cost of this name; expected one of {', '.join(names)}. No stage has run"
            missing = [name for name in spec.algorithm.constraints if name not in names]
            if missing:
                raise SpecError([Problem(f"algorithm.costs.{name}", message, nearest(name, names)) for name in missing])
            return


def _failure(target: Target, reward: Any, episode: Trajectory) -> Failure | None:
    """Return the failure of a reward on a copy of the episode, or on a pair for a reward of groups; None if it scores
    one, or leaves it unscored for a reason that need not be a mistake."""
    scores = _scores(reward, episode)
    failures = [score.failure for score in scores if score.reward is None]
    failure = failures[0] if len(failures) == len(scores) else None
    if failure is None or failure.kind == NOT_APPLICABLE:
        return None
    deliberate = failure.kind == JudgeError.__name__ and (
        target.target.startswith("components.") or not episode.success
    )
    return None if deliberate else failure
