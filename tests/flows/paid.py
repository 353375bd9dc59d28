"""Rewards that cost something: each call is written into a file, and one waits while a file is there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from components.errors import JudgeError
from components.trajectories.schema import Score

WAITS = "c/0"
"""The trajectory at which a reward waits."""
FAILS = "b/1"
"""The trajectory that cannot be scored the first time."""


class Each:
    """Judges one trajectory at a time. `folder` has the calls, and `wait` as long as it is to wait."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def __call__(self, trajectory) -> float:
        asked = self.folder / "asked"
        before = asked.read_text().split() if asked.exists() else []
        with asked.open("a") as file:  # a kill may come at any moment
            file.write(f"{trajectory.id}\n")
        while trajectory.id == WAITS and (self.folder / "wait").exists():
            time.sleep(0.02)
        if trajectory.id == FAILS and FAILS not in before:
            raise JudgeError("the judge is busy")
        return trajectory.sample + 0.5


class Awaited:
    """The same, several at once."""

    def __init__(self, folder: str):
        self.one = Each(folder)

    async def __call__(self, trajectory) -> float:
        return await asyncio.to_thread(self.one, trajectory)


class Together:
    """The same for groups; a group with one that fails is judged, but for that one."""

    def __init__(self, folder: str):
        self.one = Each(folder)

    def score_group(self, group) -> list[Score]:
        return [self._score(trajectory) for trajectory in group]

    def _score(self, trajectory) -> Score:
        try:
            return Score(trajectory.id, self.one(trajectory), {"part": 0.1}, explanation="bought", cost=0.25)
        except JudgeError:
            return Score(trajectory.id, None)
