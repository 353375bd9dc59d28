"""Puzzles with a Python tool: the agent writes code, reads its output, and submits the answer.

Puzzles are generated from a seed. The code runs in the sandbox (`components/sandbox`), which needs bubblewrap on Linux;
without it, the first reset raises an error that says what to install. The observation of failed code is its error.
Failed code counts as `failed_runs` and not as an invalid action, because debugging is part of the task.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from components.aio import stoppable
from components.environments.protocol import Step
from components.environments.restorable import RestorableState
from components.environments.seeded import CountOrNone
from components.environments.tools import InvalidAction, call, tool
from components.environments.worlds.python_puzzles import KINDS, LEVELS
from components.sandbox import Limits, Sandbox, cells
from components.sandbox.bubblewrap import check
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST = 20_000
"""Maximum number of characters of one piece of code."""


@registered("environment.python_tool")
class PythonTool(RestorableState):
    """seed: generator seed. train, heldout: puzzles of the two splits. stateful: keep variables between runs. seconds,
    memory_mb: limits of a run. output: maximum number of shown characters, each of stdout and stderr.

    Scenario types: counting, dates, numbers, simulation, text. Difficulty: 1 one expression, 2 a few lines, 3 a small
    program.
    """

    saved = ("cells", "submitted", "runs", "failed_runs")

    def __init__(
        self,
        seed: int = 0,
        train: CountOrNone = 512,
        heldout: CountOrNone = 128,
        stateful: bool = True,
        seconds: Annotated[float, Field(ge=0.1, le=600)] = 10.0,
        memory_mb: Annotated[int, Field(ge=32)] = 256,
        output: Annotated[int, Field(ge=100, le=100_000)] = 2000,
    ):
        if train + heldout > 20_000:
            raise ValueError(f"train + heldout = {train + heldout}: expected at most 20000")
        memory = "Variables stay from one call to the next." if stateful else "Each call starts with no variables."
        self.system = (
            f"Solve the puzzle with Python. python runs code and shows what it prints. {memory} Then submit "
            f"the answer: a "
            f"number, a word, or a list such as [1, 2]. You can submit once."
        )
        self.stateful = stateful
        limits = Limits(
            seconds=seconds,
            cpu_seconds=int(seconds) + 1,
            memory_mb=memory_mb,
            processes=16,
            disk_mb=16,
            output_bytes=output,
        )
        self._sandbox = Sandbox(limits)
        self._scenarios = _generate(seed, train, heldout)
        self._stop = threading.Event()

    def begin(self, scenario: Scenario) -> str:
        check()
        self.cells: list[str] = []
        self.submitted, self.runs, self.failed_runs = "", 0, 0
        return str(scenario.input["question"])

    async def step(self, action: dict[str, Any]) -> Step:  # type: ignore[override]  # the protocol allows both
        """Run the step in a thread, so that code does not block other episodes; kill the code if cancelled."""
        self._stop = threading.Event()
        return await stoppable(functools.partial(super().step, action), self._stop)

    @tool
    def python(self, code: Annotated[str, "a program; the value of its last line is shown, too"]) -> str:
        """runs Python code"""
        result = run_code(self._sandbox, self.cells, code, self._stop)
        self.runs += 1
        self.failed_runs += not result.well
        if self.stateful and result.kept:
            self.cells.append(code)
        return result.text

    @tool
    def submit(self, answer: Annotated[str, "the answer alone"]) -> str:
        """gives the answer and ends the task"""
        if not answer.strip() or len(answer) > 4000:
            raise InvalidAction("an answer has 1 to 4000 characters")
        self.submitted, self.done = answer, True
        return "submitted"

    def outcome(self, answer: str) -> dict[str, Any]:
        return {
            "success": bool(self.submitted) and same(self.submitted, self.scenario.input["answer"]),
            "submitted": bool(self.submitted),
            "runs": self.runs,
            "failed_runs": self.failed_runs,
        }

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return calls that run code which prints the answer, and submit it."""
        answer = str(scenario.input["answer"])
        return [call("python", {"code": scenario.input["code"]}, 0), call("submit", {"answer": answer}, 1)]


def run_code(sandbox: Sandbox, earlier: Sequence[str], code: str, stop: threading.Event) -> cells.CellOutput:
    """Return the result of a piece of code after the earlier ones. Raises InvalidAction if it is too long."""
    if len(code) > LONGEST:
        raise InvalidAction(f"the code has {len(code)} characters; {LONGEST} at most")
    return cells.play(sandbox, [cells.Cell(cell) for cell in earlier], code, stop)


def same(submitted: str, answer: int | str | list[Any]) -> bool:
    """Return True if a submitted answer is right, ignoring brackets, quotes, blanks and case."""
    expected = answer if isinstance(answer, list) else [answer]
    parts = [part.strip().strip("'\"").strip() for part in submitted.strip().strip("[]()").split(",")]
    if expected == []:
        return parts == [""]
    return len(parts) == len(expected) and all(map(_equal, parts, expected))


def _equal(submitted: str, expected: int | str) -> bool:
    if isinstance(expected, str):
        return submitted.lower() == expected.lower()
    return submitted.removesuffix(".0").removeprefix("+") == str(expected)


@functools.lru_cache(maxsize=4)  # a collector creates many environments with the same puzzles
def _generate(seed: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    rng = random.Random(f"python_tool {seed}")
    scenarios: dict[str, Scenario] = {}
    while len(scenarios) < train + heldout:
        split = "train" if len(scenarios) < train else "heldout"
        index = len(scenarios) if split == "train" else len(scenarios) - train
        kind, level = rng.choice(sorted(KINDS)), rng.choice(LEVELS)
        puzzle = KINDS[kind](rng, level)
        if puzzle.question not in scenarios:
            scenarios[puzzle.question] = Scenario(
                id=f"python-{split}-{index}",
                input={"question": puzzle.question, "code": puzzle.code, "answer": puzzle.answer},
                split=split,
                type=kind,
                difficulty=level,
            )
    return tuple(scenarios.values())
