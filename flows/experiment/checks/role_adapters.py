"""Checks of an adapter for each role (`model.lora.roles`): the roles that the agent has, and the options that read one
adapter."""

from __future__ import annotations

from collections.abc import Iterator

from components.algorithms.continual.spec import EWCSpec
from components.algorithms.spec import AlgorithmSpec
from components.data.spec import DataSpec
from components.deployment.spec import DeploySpec
from components.environments.mixture import Mixture
from components.errors import Problem
from components.evaluation.spec import CalibrateSpec, EvaluateSpec
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.llm.spec import asks_policy
from components.rollout.collect_spec import CollectSpec
from components.rollout.spec import AgentSpec
from components.specs import Target
from components.trajectories.roles import MAIN, PLANNER, WORKER
from flows.experiment.feedback import FeedbackSpec
from flows.experiment.sections import RewardModelPartSpec


def roles(model: ModelSpec, agent: AgentSpec, environment: Target | None, collect: CollectSpec) -> Iterator[Problem]:
    """Check that the adapters are those of the agent's roles. An agent of one's own names them itself."""
    if agent.by_environment:
        yield from _by_environment(model, agent, environment, collect)
        return
    if not (named := _roles(model)) or agent.own is not None:
        return
    shown = ", ".join(named)
    if agent.roles is None:
        text = f"{shown}: one agent plays (agent.roles=null), with the only role {MAIN}"
        yield Problem("model.lora.roles", f"{text}; expected null, or agent=planner_worker")
    elif set(named) != {PLANNER, WORKER}:
        text = f"{shown}: agent.roles has {PLANNER} and {WORKER}, and each needs an adapter"
        yield Problem("model.lora.roles", f"{text}; expected [{PLANNER}, {WORKER}], or null")


def training(
    model: ModelSpec,
    algorithm: AlgorithmSpec,
    feedback: FeedbackSpec | None,
    ewc: EWCSpec | None,
    reward_model: RewardModelPartSpec | None,
    data: DataSpec,
) -> Iterator[Problem]:
    """Check that all that is trained can train the adapter of a role."""
    if not (named := _roles(model)):
        return
    taught = feedback.trainings if feedback is not None else {}
    for path, chosen in {"algorithm": algorithm, **{f"feedback.{name}": part for name, part in taught.items()}}.items():
        if not chosen.trains_roles:
            yield _problem(f"{path}.name", chosen.name, "trains one adapter", named, "grpo or a variant of it, or sft")
    if model.quantization != "none":
        reason = "quantizes a base with one adapter"
        yield _problem("model.quantization", model.quantization, reason, named, "none")
    if ewc is not None:
        yield _problem("ewc", "set", "also changes the adapters of roles that are not trained", named, "null")
    if reward_model is not None:
        yield _problem("reward_model", "set", "starts from the one adapter of the policy", named, "none")
    if data.is_set:
        yield _problem(
            f"data.{'path' if data.path is not None else 'dataset'}",
            "set",
            "imports the conversations of one agent",
            named,
            "null",
        )


def playing(
    model: ModelSpec,
    inference: InferenceSpec,
    collect: CollectSpec,
    reward: Target,
    evaluate: EvaluateSpec,
    calibrate: CalibrateSpec,
) -> Iterator[Problem]:
    """Check that the engine has an adapter for each role, and that nobody but the roles asks the policy."""
    if not (named := _roles(model)):
        return
    if not inference.serves_roles:
        yield inference.refuses_roles(named)
    if collect.reflection is not None:
        yield _problem("collect.reflection", "set", "reflects as none of the roles", named, "null")
    for path, target in {
        "reward": reward,
        "evaluate.reward": evaluate.reward,
        "calibrate.truth": calibrate.truth,
    }.items():
        if target is not None and asks_policy(target):
            yield _problem(path, target.target, "asks the policy as none of its roles", named, "another judge_model")


def exports(model: ModelSpec, deploy: DeploySpec, certify: bool) -> Iterator[Problem]:
    """Check that the exports hold adapters, and that no certificate is asked for."""
    if not (named := _roles(model)):
        return
    if deploy.mode == "serve":
        yield _problem("deploy.mode", "serve", "serves one merged model", named, "export, or none")
    elif deploy.mode == "export" and (others := [form for form in deploy.formats if form != "adapter"]):
        reason = "holds one model, and the adapters cannot be merged into one"
        yield _problem("deploy.formats", ", ".join(others), reason, named, "[adapter]")
    if deploy.mode != "none" and deploy.target is not None:
        yield _problem("deploy.target", deploy.target.name, "deploys one merged model", named, "null")
    if certify:
        yield certificate(named)


def certificate(named: list[str]) -> Problem:
    """Return the problem of a certificate of a policy with several adapters."""
    text = f"{', '.join(named)}: a certificate checks an engine with one adapter; expected null, or certify=false"
    return Problem("model.lora.roles", text)


def _by_environment(
    model: ModelSpec, agent: AgentSpec, environment: Target | None, collect: CollectSpec
) -> Iterator[Problem]:
    """Check that each environment of a mixture has an adapter, and that the agent loop alone plays it."""
    if environment is None or environment.factory() is not Mixture:
        yield Problem("agent.by_environment", "true: names the agent after an environment of a mixture; expected false")
        return
    names = list(environment.arguments["environments"])
    if set(_roles(model)) != set(names):
        shown, expected = ", ".join(_roles(model)) or "null", ", ".join(names)
        yield Problem("model.lora.roles", f"{shown}: agent.by_environment has the environments; expected [{expected}]")
    if agent.own or agent.roles or collect.players():
        other = agent.own or ("agent.roles" if agent.roles else "collect")
        yield Problem("agent.by_environment", f"true: {other} plays the episodes with names of its own; expected false")


def _roles(model: ModelSpec) -> list[str]:
    return (model.lora.roles or []) if model.lora is not None else []


def _problem(path: str, value: str, reason: str, named: list[str], expected: str) -> Problem:
    text = f"{value}: {reason}, but model.lora.roles = [{', '.join(named)}] trains one for each role"
    return Problem(path, f"{text}; expected {expected}, or model.lora.roles=null")
