"""Checks of data of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from components.algorithms.spec import AlgorithmSpec
from components.data.spec import DataSpec
from components.deployment.spec import DeploySpec
from components.errors import Problem
from components.specs import Target
from flows.experiment.flow import FlowTarget
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec


def data(data: DataSpec, warmup: WarmupSpec | None, flow: FlowTarget) -> Iterator[Problem]:
    """Check that the settings of the source do not exclude each other, and that a training reads the data."""
    for problem in DataSpec.cross_problems(dict(data)):
        yield replace(problem, path=f"data.{problem.path}")
    if not (data.is_set or flow.files) and (data.holds_out or data.split is not None):
        text = "null, but data.split or a held-out part of the data is set; expected data.path=FILE, data.dataset=NAME"
        yield Problem("data.path", f"{text}, or data=none")
    if data.is_set and warmup is None and flow.is_built_in and not flow.offline:
        source = "path" if data.path is not None else "dataset"
        yield Problem(
            f"data.{source}",
            f"is set, but warmup=none, and flow={flow.name} trains on it in the warmup only; expected warmup=sft, or "
            "flow=offline",
        )


def heldout(data: DataSpec, environment: Target | None, deploy: DeploySpec) -> Iterator[Problem]:
    """Check that an export can be compared with the policy on held-out prompts."""
    if data.is_set and data.heldout == 0 and environment is None and deploy.mode != "none":
        text = "0: exports are checked on held-out prompts, and environment=none has no others"
        yield Problem("data.heldout", f"{text}; expected more than 0, or deploy=none")


def preferences(reward_model: RewardModelPartSpec | None, data: DataSpec, flow: FlowTarget) -> Iterator[Problem]:
    """Check the settings of preferences that a reward model learns from in place of the run's episodes, and that a
    recipe that needs files has them."""
    if flow.files and not data.is_set:
        yield Problem("data.path", f"null: flow={flow.name} imitates demonstrations first; expected data.path=FILE")
    if flow.files and (reward_model is None or not reward_model.data.is_set):
        text = "trains a reward model on preferences; expected reward_model.data.path=FILE"
        yield Problem("reward_model.data.path", f"null: flow={flow.name} {text}")
    if reward_model is None:
        return
    own = reward_model.data
    for problem in DataSpec.cross_problems(dict(own)):
        yield replace(problem, path=f"reward_model.data.{problem.path}")
    if not own.is_set:
        return
    for name in ("every", "continuations"):
        if value := getattr(reward_model, name):
            yield Problem(
                f"reward_model.{name}",
                f"{value}: needs episodes of the run, and the reward model learns from reward_model.data; expected 0",
            )
    for name in ("heldout", "heldout_path", "heldout_split"):
        if (value := getattr(own, name)) is not None:
            yield Problem(
                f"reward_model.data.{name}",
                f"{value}: the reward model holds out pairs itself; expected null, and "
                "reward_model.algorithm.held_out=SHARE",
            )


def offline_algorithm(algorithm: AlgorithmSpec, flow: FlowTarget) -> Iterator[Problem]:
    """Check that the algorithm of an offline recipe can learn from data that the policy did not sample."""
    if flow.offline and not algorithm.feedback_kinds:
        yield Problem(
            "algorithm.name",
            f"{algorithm.name} learns from episodes that the policy itself plays; with flow={flow.name}, expected "
            "algorithm=sft, dpo, ipo, orpo or kto",
        )


def demonstrated(warmup: WarmupSpec | None, data: DataSpec, flow: FlowTarget) -> WarmupSpec | None:
    """Return the warmup if it plays demonstrations; None if it trains on imported data, or without one."""
    return warmup if flow.offline or not (data.is_set or flow.files) else None
