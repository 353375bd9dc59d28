"""Checks of the agent, the inference engine and the options of `collect` against each other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from components.algorithms.spec import AlgorithmSpec
from components.errors import Problem
from components.evaluation.spec import EvaluateSpec
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.composition.by_role import ByRole
from components.rollout.spec import AgentSpec, CollectSpec
from components.specs import Target
from components.trajectories.roles import MAIN, PLANNER, WORKER


def agent(agent: AgentSpec, environment: Target, algorithm: AlgorithmSpec, rounds: int) -> Iterator[Problem]:
    """Check the format, the roles and the function of the agent."""
    if agent.format != "native" and environment.arguments.get("format") == agent.format == "react":
        yield Problem(
            "agent.format",
            "react: the environment already parses Thought and Action (environment.format=react); expected native, or "
            "environment.format=tool",
        )
    if agent.code is not None and agent.format != "code":
        yield Problem(
            "agent.code", f"limits code execution, which agent.format={agent.format} does not use; expected null"
        )
    if agent.roles is not None:
        if agent.function is not None:
            yield Problem("agent.roles", "set, but agent.function replaces the agent loop; expected null")
        if agent.format in ("chat", "code"):
            yield Problem("agent.format", f"{agent.format}: workers act by tool calls; expected native or react")
        if rounds and algorithm.credits_turns and not algorithm.credits_roles:
            yield Problem(
                "algorithm.credit",
                "turns: the turns of planner and workers (agent.roles) are not in order of time; expected episode or "
                "roles",
            )
    if agent.function is None:
        return
    if agent.format != "native":
        yield Problem(
            "agent.format", f"{agent.format}: applies to the agent loop, which agent.function replaces; expected native"
        )
    if agent.max_observation != AgentSpec().max_observation:
        yield Problem(
            "agent.max_observation",
            f"{agent.max_observation}: truncates observations of the agent loop, which agent.function replaces; "
            f"expected {AgentSpec().max_observation}",
        )


def role_rewards(agent: AgentSpec, reward: Target, evaluate: EvaluateSpec) -> Iterator[Problem]:
    """Check that a reward by role has exactly the roles of the agent. With `agent.function` its code names them."""
    if agent.function is not None:
        return
    roles = [MAIN] if agent.roles is None else [PLANNER, WORKER]
    for root, declared in (("reward", reward), ("evaluate.reward", evaluate.reward)):
        for path, target in [*declared.below(root), (root, declared)] if declared is not None else ():
            rewarded = list(target.arguments.get("roles") or ()) if target.factory() is ByRole else roles
            if rewarded and set(rewarded) != set(roles):
                source = "agent.roles=null has" if agent.roles is None else "agent.roles has"
                remedy = "agent=planner_worker" if agent.roles is None else f"{path}.roles with these"
                yield Problem(
                    f"{path}.roles",
                    f"{', '.join(rewarded)}: {source} {', '.join(roles)}, and an episode with a role without a reward "
                    f"is unscored; expected {remedy}, or another reward",
                )


def play_modes(
    collect: CollectSpec, agent: AgentSpec, environment: Target, algorithm: AlgorithmSpec, rounds: int
) -> Iterator[Problem]:
    """Check reflection, continuations, teachers and self-play, at most one of which a round may use."""
    self_play = collect.opponent != "environment"
    names = ("reflection", "continuations", "teacher")
    modes = [*(name for name in names if getattr(collect, name)), *["opponent"] * self_play]
    if collect.teacher is not None and rounds and algorithm.needs_sampled_tokens:
        yield Problem(
            "collect.teacher",
            f"{algorithm.name} learns only from tokens that the policy sampled; expected null, or algorithm=sft, "
            "distill or a preference algorithm",
        )
    if collect.teacher is not None and collect.teacher.samples > collect.group_size:
        yield Problem(
            "collect.teacher.samples",
            f"{collect.teacher.samples}: a group has collect.group_size={collect.group_size} episodes; expected at "
            "most that",
        )
    if self_play and "opponent" not in inspect.signature(environment.factory()).parameters:
        yield Problem(
            "collect.opponent",
            f"{collect.opponent}: {environment.target} has no parameter `opponent`; expected environment, or a game "
            "with two sides, such as environment=tictactoe",
        )
    if environment.arguments.get("opponent") == "agent":
        yield Problem(
            "environment.opponent",
            "agent: leaves the opponent's moves to the agent, in evaluations too; expected another value, and "
            "collect.opponent=policy or base for the rounds",
        )
    if collect.partial is not None:
        yield from _partial_problems(collect, agent, [*modes, *(["refills"] if collect.refills else [])])
    if agent.function is not None:
        for name in modes:
            yield Problem(f"collect.{name}", "needs the agent loop, which agent.function replaces; expected it unset")
    for name in sorted({*modes} - {"reflection", "teacher"}):
        if agent.format == "code":
            yield Problem(
                f"collect.{name}",
                "resumes after a single action, but one code block of agent.format=code may run several; expected "
                "another format",
            )
    if agent.roles is not None:
        for name in sorted({*modes} - {"reflection", "teacher"}):
            yield Problem(
                f"collect.{name}", "supports a single agent, but agent.roles has several; expected agent.roles=null"
            )
    if len(modes) > 1:
        yield Problem(f"collect.{modes[1]}", f"cannot be combined with collect.{modes[0]}; expected one of them")
    if collect.reflection and collect.reflection.demonstrate and rounds and algorithm.needs_sampled_tokens:
        yield Problem(
            "collect.reflection.demonstrate",
            f"true: demonstrations are text, but {algorithm.name} learns only from sampled tokens; expected false, or "
            "algorithm=sft, distill or a preference algorithm",
        )


def _partial_problems(collect: CollectSpec, agent: AgentSpec, excluded: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of partial rollouts. excluded: options in use that belong to a whole episode or round."""
    assert collect.partial is not None
    turns = collect.partial.turns
    if turns is not None and turns >= agent.max_turns:
        yield Problem(
            "collect.partial.turns",
            f"{turns}: no episode has more than agent.max_turns={agent.max_turns} messages, so none is paused; "
            "expected less, or collect.partial=null",
        )
    for name in excluded:
        yield Problem(f"collect.{name}", "needs whole episodes, which collect.partial pauses; expected it unset")
    for name in ("function", "roles"):
        if getattr(agent, name) is not None:
            yield Problem(
                f"agent.{name}",
                "collect.partial pauses the agent loop of a single agent; expected null for one of them",
            )


def tokens(inference: InferenceSpec, rounds: int) -> Iterator[Problem]:
    """Check that the engine returns tokens if rounds train on them."""
    if not inference.returns_tokens and rounds:
        problem = inference.lacks_tokens(f"rounds={rounds} trains on the collected tokens")
        yield Problem(problem.path, f"{problem.message}, or rounds=0")


def engine(inference: InferenceSpec, model: ModelSpec, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    """Check the engine against the adapter, the sampling and the overlap of the rounds."""
    yield from inference.problems(
        rounds=rounds,
        lora_rank=model.lora.rank if model.lora else 0,
        min_p=collect.min_p,
        top_p=collect.top_p,
        overlap=collect.overlap,
    )


def lengths(agent: AgentSpec, model: ModelSpec) -> Iterator[Problem]:
    """Check that a response leaves room for a prompt in the context."""
    if agent.max_tokens >= model.max_length:
        yield Problem(
            "agent.max_tokens",
            f"{agent.max_tokens}: leaves no room for a prompt in model.max_length={model.max_length}; expected less",
        )
