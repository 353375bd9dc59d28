"""Checks of data of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from components.algorithms.spec import AlgorithmSpec
from components.data.spec import DataSpec
from components.errors import Problem
from flows.experiment.flow import FlowTarget
from flows.experiment.sections import WarmupSpec


def data(data: DataSpec, warmup: WarmupSpec | None, flow: FlowTarget) -> Iterator[Problem]:
    """Check that the settings of the source do not exclude each other, and that a training reads the data."""
    for problem in DataSpec.cross_problems(dict(data)):
        yield replace(problem, path=f"data.{problem.path}")
    if data.is_set and warmup is None and flow.is_built_in and not flow.offline:
        source = "path" if data.path is not None else "dataset"
        yield Problem(
            f"data.{source}",
            f"is set, but warmup=none, and flow={flow.name} trains on it in the warmup only; expected warmup=sft, or "
            "flow=offline",
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
    return warmup if not data.is_set or flow.offline else None
