"""Puzzles with a Python tool: the agent writes code, reads what it prints, and submits the answer.

Puzzles are generated from a seed. The code runs in the sandbox (`components/sandbox`), which needs bubblewrap on Linux;
without it the first episode is refused with what to install. Code that fails is answered with its error and counted as
`failed_runs`: writing code that fails and mending it is no invalid action.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from components.environments.protocol import Step
from components.environments.scenario_counts import CountOrNone
from components.environments.tools import Invalid, ToolEnvironment, call, tool
from components.environments.worlds.python_tool.puzzles import KINDS, LEVELS
from components.sandbox import Limits, Sandbox, cells
from components.sandbox.bubblewrap import check, stoppable
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST = 20_000
"""Characters of one piece of code."""


@registered("environment.python_tool")
class PythonTool(ToolEnvironment):
    """seed: of the generator. train, heldout: puzzles of the two splits. stateful: whether code sees the variables of
    earlier code. seconds, memory_mb: that a run may take. output: characters of stdout, and of stderr, that are shown.

    Scenario types: counting, dates, numbers, simulation, text. Difficulty: 1 one expression, 2 a few lines, 3 a small
    program.
    """

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
            raise ValueError(f"train + heldout is {train + heldout}; at most 20000 puzzles are generated")
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

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split]

    def begin(self, scenario: Scenario) -> str:
        check()
        self.cells: list[str] = []
        self.submitted, self.runs, self.failed_runs = "", 0, 0
        return str(scenario.input["question"])

    async def step(self, action: dict[str, Any]) -> Step:  # type: ignore[override]  # the protocol allows both
        """In a thread: other episodes go on while code runs. Cancelled, the code is killed."""
        self._stop = threading.Event()
        return await stoppable(functools.partial(super().step, action), self._stop)

    @tool
    def python(self, code: Annotated[str, "a program; the value of its last line is shown, too"]) -> str:
        """runs Python code"""
        if len(code) > LONGEST:
            raise Invalid(f"the code has {len(code)} characters; {LONGEST} at most")
        shown = cells.play(self._sandbox, [cells.Cell(one) for one in self.cells], code, self._stop)
        self.runs += 1
        self.failed_runs += not shown.well
        if self.stateful and shown.kept:
            self.cells.append(code)
        return shown.text

    @tool
    def submit(self, answer: Annotated[str, "the answer alone"]) -> str:
        """gives the answer and ends the task"""
        if not answer.strip() or len(answer) > 4000:
            raise Invalid("an answer has 1 to 4000 characters")
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
        """Code that finds the answer, and the answer."""
        answer = str(scenario.input["answer"])
        return [call("python", {"code": scenario.input["code"]}, 0), call("submit", {"answer": answer}, 1)]

    def save(self) -> dict[str, Any]:
        kept = ("cells", "submitted", "runs", "failed_runs", "invalid_actions", "done")
        return {name: getattr(self, name) for name in kept}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        self.reset(scenario)
        for name, value in state.items():
            setattr(self, name, value)
        self.cells = list(state["cells"])


def same(given: str, answer: int | str | list[Any]) -> bool:
    """Whether a submitted answer is the right one: brackets, quotes, blanks and upper case do not matter."""
    wanted = answer if isinstance(answer, list) else [answer]
    found = [part.strip().strip("'\"").strip() for part in given.strip().strip("[]()").split(",")]
    if wanted == []:
        return found == [""]
    return len(found) == len(wanted) and all(map(_equal, found, wanted))


def _equal(given: str, wanted: int | str) -> bool:
    if isinstance(wanted, str):
        return given.lower() == wanted.lower()
    return given.removesuffix(".0").removeprefix("+") == str(wanted)


@functools.lru_cache(maxsize=4)  # a collector makes many environments of the same puzzles
def _generate(seed: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    rng = random.Random(f"python_tool {seed}")
    found: dict[str, Scenario] = {}
    while len(found) < train + heldout:
        split = "train" if len(found) < train else "heldout"
        at = len(found) if split == "train" else len(found) - train
        kind, level = rng.choice(sorted(KINDS)), rng.choice(LEVELS)
        puzzle = KINDS[kind](rng, level)
        if puzzle.question not in found:
            found[puzzle.question] = Scenario(
                id=f"python-{split}-{at}",
                input={"question": puzzle.question, "code": puzzle.code, "answer": puzzle.answer},
                split=split,
                type=kind,
                difficulty=level,
            )
    return tuple(found.values())
