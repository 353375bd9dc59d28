"""Helpers for rewards that ask a judge behind a socket: resources, replies, and parsed requests."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.errors import SpecError
from components.models.spec import ModelSpec
from components.rewards.judge import judge
from components.rewards.llm.budget import Meter
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
from components.specs import Target, validate
from components.trajectories.schema import Score, Trajectory
from flows.experiment.config_loader import CONF
from tests.rewards.judge_server import Asked, JudgeServer, Reply, judge_server

PRICE = {"input": 1.0, "output": 4.0}


def spec(server: JudgeServer, **changes: Any) -> ServedJudge:
    return ServedJudge(
        **{"url": server.url, "model": "judge", "retry_for": 5.0, "timeout": 300.0, "price": PRICE} | changes
    )


def means(answers: Path | None = None, meter: Meter | None = None, engine: Any = None) -> RewardResources:
    return RewardResources(Path(), ModelSpec(name="tiny", source="random"), meter or Meter(), answers, engine)


@contextlib.contextmanager
def used(reward: Any, resources: RewardResources | None = None) -> Iterator[Any]:
    reward.use(resources or means())
    try:
        yield reward
    finally:
        reward.close()


def scores(
    reward: Any, episodes: list[Trajectory], resources: RewardResources | None = None, concurrency: int = 8
) -> list[Score]:
    with used(reward, resources):
        return list(judge(reward, episodes, concurrency=concurrency))


def says(answer: Any) -> Reply:
    return Reply(answer if isinstance(answer, str) else json.dumps(answer))


def always(answer: Any) -> Callable[[Asked], Reply]:
    return lambda asked: says(answer)


def task(asked: Asked) -> str:
    """Return the system message."""
    return str(asked.body["messages"][0]["content"])


def data(asked: Asked) -> str:
    """Return the text of the judged episode in a prompt."""
    match = re.search(r"<trajectory>\n(.*)\n</trajectory>", asked.body["messages"][1]["content"], re.S)
    assert match is not None
    return match[1]


def target(name: str, **changes: Any) -> Target:
    """Return the reward of `conf/reward/NAME.yaml`, with a judge behind a URL and these arguments in place of the
    file's."""
    arguments = yaml.safe_load((CONF / "reward" / f"{name}.yaml").read_text())
    del arguments["defaults"]
    judge_model = {"name": "served", "url": "http://there/v1", "model": "name"}
    return validate(Target, {**arguments, "model": judge_model, **changes}, path="reward")


def mistakes(name: str, **changes: Any) -> dict[str, str]:
    """Return the messages about invalid arguments, by key."""
    with pytest.raises(SpecError) as caught:
        target(name, **changes)
    return {problem.path: problem.message for problem in caught.value.problems}


__all__ = [
    "Asked",
    "Reply",
    "always",
    "data",
    "judge_server",
    "means",
    "mistakes",
    "says",
    "scores",
    "spec",
    "target",
    "task",
    "used",
]
