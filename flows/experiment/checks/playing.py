"""What agents, engines and the ways to play a round need of each other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from components.algorithms.spec import PolicyGradientSpec
from components.errors import Problem
from components.inference.spec import RANKS, InferenceSpec, RemoteSpec, VllmSpec
from components.models.spec import ModelSpec
from components.rollout.spec import AgentSpec, CollectSpec
from components.specs import Target


def agent(agent: AgentSpec, environment: Target, algorithm: Any, rounds: int) -> Iterator[Problem]:
    if agent.format != "native" and environment.arguments.get("format") == agent.format == "react":
        yield Problem(
            "agent.format",
            "react: the environment reads Thought and Action itself (environment.format=react); expected native, or "
            "environment.format=tool",
        )
    if agent.code is not None and agent.format != "code":
        yield Problem("agent.code", f"limits code that agent.format={agent.format} does not write; expected null")
    if agent.roles is not None:
        if agent.function is not None:
            yield Problem("agent.roles", "given, and agent.function plays as it likes; expected null")
        if agent.format in ("chat", "code"):
            yield Problem("agent.format", f"{agent.format}: a worker acts by calls of tools; expected native or react")
        if rounds and getattr(algorithm, "credit", "episode") == "turns":
            yield Problem(
                "algorithm.credit",
                "turns: those of planner and workers (agent.roles) do not stand in the order of time; expected episode",
            )
    if agent.function is None:
        return
    if agent.format != "native":
        yield Problem("agent.format", f"{agent.format}: is for the loop, and agent.function writes as it likes")
    if agent.max_observation != AgentSpec().max_observation:
        yield Problem(
            "agent.max_observation",
            f"{agent.max_observation}: cuts what the loop shows, and agent.function reads its environment itself; "
            f"expected {AgentSpec().max_observation}",
        )


def ways(collect: CollectSpec, agent: AgentSpec, environment: Target, algorithm: Any, rounds: int) -> Iterator[Problem]:
    """Other ways of playing than each episode once."""
    played = collect.opponent != "environment"
    ways = ("reflection", "continuations", "teacher")
    given = [*(name for name in ways if getattr(collect, name)), *["opponent"] * played]
    if collect.teacher is not None and rounds and isinstance(algorithm, PolicyGradientSpec):
        yield Problem(
            "collect.teacher",
            f"{algorithm.name} learns from what the policy itself sampled; expected null, or algorithm=sft, distill or "
            "a preference algorithm",
        )
    if collect.teacher is not None and collect.teacher.samples > collect.group_size:
        yield Problem(
            "collect.teacher.samples",
            f"{collect.teacher.samples} of {collect.group_size} episodes (collect.group_size); expected no more",
        )
    if played and "opponent" not in inspect.signature(environment.factory()).parameters:
        yield Problem(
            "collect.opponent",
            f"{collect.opponent}: {environment.target} takes no `opponent`; expected environment, or a game whose "
            "both sides can be played, such as environment=tictactoe",
        )
    if environment.arguments.get("opponent") == "agent":
        yield Problem(
            "environment.opponent",
            "agent leaves a side to be played, in evaluations too; expected another, and collect.opponent=policy or "
            "base for the rounds",
        )
    if agent.function is not None:
        for name in given:
            yield Problem(
                f"collect.{name}", "is a way of the agent loop, and agent.function plays as it likes; expected it unset"
            )
    for name in sorted({*given} - {"reflection", "teacher"}):
        if agent.format == "code":
            yield Problem(
                f"collect.{name}",
                "goes on from single actions, and a block of agent.format=code may be many; expected another format",
            )
    if agent.roles is not None:
        for name in sorted({*given} - {"reflection", "teacher"}):
            yield Problem(
                f"collect.{name}", "is played by one agent, and agent.roles are several; expected roles: null"
            )
    if len(given) > 1:
        yield Problem(f"collect.{given[1]}", f"does not go together with collect.{given[0]}; expected one of them")
    if collect.reflection and collect.reflection.demonstrate and rounds and isinstance(algorithm, PolicyGradientSpec):
        yield Problem(
            "collect.reflection.demonstrate",
            f"true: demonstrations are text, and {algorithm.name} learns from sampled tokens alone; expected false, or "
            "algorithm=sft, distill or a preference algorithm",
        )


def inference(inference: InferenceSpec, rounds: int) -> Iterator[Problem]:
    if isinstance(inference, RemoteSpec) and not inference.tokens and rounds:
        yield Problem(
            "inference.tokens",
            f"false, and rounds={rounds} train on what is collected; expected true, or rounds=0",
        )


def vllm(inference: InferenceSpec, model: ModelSpec, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    """What a vLLM server can be asked."""
    if not isinstance(inference, VllmSpec):
        return
    rank, most = (model.lora.rank if model.lora else 0), inference.max_lora_rank
    if most is not None and rank > most:
        yield Problem(
            "inference.max_lora_rank", f"{most}: model.lora.rank={rank} is more; expected at least {rank}, or null"
        )
    if rank > RANKS[-1]:
        yield Problem("model.lora.rank", f"{rank}: vLLM takes {RANKS[-1]} at most; expected less")
    if collect.min_p > 0 and collect.top_p < 1 and rounds:
        yield Problem(
            "collect.min_p",
            f"{collect.min_p:g}: vLLM cuts by it before collect.top_p={collect.top_p:g}, and training reckons with the "
            "cut after it; expected one of them",
        )
    if inference.sleep and collect.overlap:
        yield Problem("inference.sleep", "true: with collect.overlap the server plays all the time; expected false")
    if inference.key_variable and not inference.urls:
        yield Problem(
            "inference.key_variable", f"{inference.key_variable}: a server of the run's own has no key; expected null"
        )


def lengths(agent: AgentSpec, model: ModelSpec) -> Iterator[Problem]:
    if agent.max_tokens >= model.max_length:
        yield Problem(
            "agent.max_tokens",
            f"{agent.max_tokens} leaves no room for a prompt in model.max_length={model.max_length}; expected less",
        )
