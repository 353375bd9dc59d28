"""Judgements of programs by their tests, several at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from components.rewards import judge as judging
from components.rewards.rules.code_tests import CodeTests
from components.trajectories.schema import Scenario, Score, Trajectory
from tests.trajectories.builders import talk

Name = TypeVar("Name")


def judged_together(programs: Mapping[Name, tuple[list[Any], str]], reward: CodeTests) -> dict[Name, Score]:
    """Return the score of each program for its tests. Equal programs with equal tests are judged once."""
    distinct: dict[tuple[str, str], Trajectory] = {}
    for tests, code in programs.values():
        scenario = Scenario(f"s{len(distinct)}", {"tests": tests}, "train")
        episode = Trajectory(f"{scenario.id}/0", scenario, 0, [talk("Write it.", f"```python\n{code}\n```")])
        distinct.setdefault((json.dumps(tests), code), episode)
    scores = dict(zip(distinct, judging.judge(reward, list(distinct.values()), concurrency=4), strict=True))
    return {name: scores[json.dumps(tests), code] for name, (tests, code) in programs.items()}
