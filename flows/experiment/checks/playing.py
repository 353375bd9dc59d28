"""Checks of the agent, the inference engine and the options of `collect` against each other."""

from __future__ import annotations

from collections.abc import Iterator

from components.algorithms.spec import AlgorithmSpec
from components.errors import Problem
from components.evaluation.spec import EvaluateSpec
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.composition.by_role import ByRole
from components.rollout.collect_spec import CollectSpec
from components.rollout.players.player import PlaySetup
from components.rollout.spec import AgentSpec
from components.specs import Target
from components.trajectories.roles import MAIN, PLANNER, WORKER


def agent(agent: AgentSpec, environment: Target, algorithm: AlgorithmSpec, rounds: int) -> Iterator[Problem]:
    """Check the format, the roles, the function and the command of the agent."""
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
        if agent.own is not None:
            yield Problem("agent.roles", f"set, but {agent.own} replaces the agent loop; expected null")
        if agent.format in ("chat", "code"):
            yield Problem("agent.format", f"{agent.format}: workers act by tool calls; expected native or react")
        if rounds and algorithm.credits_turns and not algorithm.credits_roles:
            yield Problem(
                "algorithm.credit",
                "turns: the turns of planner and workers (agent.roles) are not in order of time; expected episode or "
                "roles",
            )
    if agent.own is None:
        return
    if agent.function is not None and agent.command is not None:
        yield Problem("agent.command", "set, but agent.function plays the episodes; expected one of them")
    if agent.format != "native":
        yield Problem(
            "agent.format", f"{agent.format}: applies to the agent loop, which {agent.own} replaces; expected native"
        )
    if agent.max_observation != AgentSpec().max_observation:
        yield Problem(
            "agent.max_observation",
            f"{agent.max_observation}: truncates observations of the agent loop, which {agent.own} replaces; "
            f"expected {AgentSpec().max_observation}",
        )


def role_rewards(agent: AgentSpec, reward: Target, evaluate: EvaluateSpec) -> Iterator[Problem]:
    """Check that a reward by role has exactly the roles of the agent. An agent of one's own names them itself."""
    if agent.own is not None:
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


def players(
    collect: CollectSpec, agent: AgentSpec, environment: Target, algorithm: AlgorithmSpec, rounds: int
) -> Iterator[Problem]:
    """Check the player of the rounds, which use at most one."""
    if environment.arguments.get("opponent") == "agent":
        yield Problem(
            "environment.opponent",
            "agent: leaves the opponent's moves to the agent, in evaluations too; expected another value, and "
            "collect.opponent=policy or base for the rounds",
        )
    sampled_only = algorithm.name if rounds and algorithm.needs_sampled_tokens else None
    setup = PlaySetup(agent, environment, collect.scenarios, collect.group_size, collect.refills, sampled_only)
    declared = collect.players()
    for player in declared:
        yield from player.problems(setup)
    yield from (declared[0].excluded(player) for player in declared[1:])


def tokens(inference: InferenceSpec, rounds: int) -> Iterator[Problem]:
    """Check that the engine returns tokens if rounds train on them."""
    if not inference.returns_tokens and rounds:
        problem = inference.lacks_tokens(f"rounds={rounds} trains on the collected tokens")
        yield Problem(problem.path, f"{problem.message}, or rounds=0")


def engine(
    inference: InferenceSpec, model: ModelSpec, collect: CollectSpec, rounds: int, agent: AgentSpec
) -> Iterator[Problem]:
    """Check the engine against the adapter, the sampling, the agent and the overlap of the rounds."""
    if agent.max_thinking_tokens is not None and not inference.ends_reasoning:
        yield Problem(
            "agent.max_thinking_tokens",
            f"{agent.max_thinking_tokens}: inference.name={inference.name} cannot end the reasoning of a response; "
            "expected null, or inference.name=embedded",
        )
    if collect.partial is not None and collect.partial.groups is not None and not inference.completes_responses:
        yield Problem(
            "collect.partial.groups",
            f"{collect.partial.groups}: inference.name={inference.name} cannot complete a response that was "
            "interrupted; expected null, or inference=embedded or vllm",
        )
    yield from inference.problems(
        rounds=rounds,
        lora_rank=model.lora.rank if model.lora else 0,
        min_p=collect.min_p,
        top_p=collect.top_p,
        overlap=collect.overlap,
    )


def template(inference: InferenceSpec, model: ModelSpec) -> Iterator[Problem]:
    """Check that the engine renders conversations as the template and its options say."""
    if model.chat_template is not None and not inference.needs_model:
        text = f"set, but the server of inference={inference.name} renders conversations with its own; expected null"
        yield Problem("model.chat_template", f"{text}, and a server that is started with this template")
    for name in ("call_form", "keep_reasoning"):
        if getattr(model, name) and not inference.needs_model:
            text = f"set, but the server of inference={inference.name} reads answers itself; expected its default"
            yield Problem(f"model.{name}", text)
    if model.chat_template_kwargs and not inference.loads_policies:
        text = f"set, but a provider of inference={inference.name} has no chat template; expected {{}}"
        yield Problem("model.chat_template_kwargs", f"{text}, and the provider's own parameters in inference.extra")


def lengths(agent: AgentSpec, model: ModelSpec) -> Iterator[Problem]:
    """Check that a response leaves room for a prompt in the context."""
    if agent.max_tokens >= model.max_length:
        yield Problem(
            "agent.max_tokens",
            f"{agent.max_tokens}: leaves no room for a prompt in model.max_length={model.max_length}; expected less",
        )
    if agent.max_thinking_tokens is not None and agent.max_thinking_tokens >= agent.max_tokens:
        yield Problem(
            "agent.max_thinking_tokens",
            f"{agent.max_thinking_tokens}: leaves no room for an answer in agent.max_tokens={agent.max_tokens}; "
            "expected less",
        )
