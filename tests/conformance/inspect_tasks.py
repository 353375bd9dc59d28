"""Tasks for Inspect, which runs them in its own environment: `inspect eval inspect_tasks.py@NAME -T items=FILE`.

FILE: JSON list of items: `id`, `prompt` (messages), `answer`. `arithmetic` answers in one message; in `calculator`
Inspect executes the calls of tools. Answers are scored here, independently of Espalier's environments; only the
calculator is theirs.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.tool import ToolDef
from inspect_ai.util import store

from components.environments.tools import InvalidAction
from components.environments.worlds import calculator as exact

ROLES = {"system": ChatMessageSystem, "user": ChatMessageUser}


@task
def arithmetic(items: str) -> Task:
    return Task(dataset=samples(items), solver=generate(), scorer=final_number())


@task
def calculator(items: str, turns: int = 3) -> Task:
    return Task(dataset=samples(items), solver=tool_loop(turns), scorer=submitted_number())


def samples(items: str) -> MemoryDataset:
    """Return the items of a file as samples."""
    return MemoryDataset(
        [
            Sample(
                id=item["id"],
                input=[ROLES[message["role"]](content=message["content"]) for message in item["prompt"]],
                target=item["answer"],
            )
            for item in json.loads(Path(items).read_text())
        ]
    )


@solver
def tool_loop(turns: int) -> Solver:
    """Generate and execute calls until a message without calls, a submission, or `turns` messages."""

    async def calculate(expression: str) -> str:
        try:
            return exact.format_number(exact.evaluate(expression))
        except InvalidAction as error:
            return f"error: {error}"

    async def submit(answer: str) -> str:
        try:
            exact.parse_number(answer)
        except InvalidAction as error:
            return f"error: {error}"
        store().set("submitted", answer)
        return "submitted"

    operators = "numbers, + - * / // % **, brackets, round, floor, ceil, abs, min, max"
    tools = [
        ToolDef(calculate, description="calculates exactly", parameters={"expression": operators}),
        ToolDef(
            submit,
            description="gives the answer and ends the task",
            parameters={"answer": "a number, such as 1234.5"},
        ),
    ]

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.tools = [tool.as_tool() for tool in tools]
        for _ in range(turns):
            state = await generate(state, tool_calls="single")
            if not state.output.message.tool_calls or state.store.get("submitted") is not None:
                break
        return state

    return solve


@scorer(metrics=[accuracy(), stderr()])
def final_number() -> Scorer:
    """Score the last `#### NUMBER` of the answer."""

    async def score(state: TaskState, target: Target) -> Score:
        numbers = re.findall(r"####\s*(-?\d+)\b", state.output.completion)
        return Score(value="C" if numbers and int(numbers[-1]) == int(target.text) else "I")

    return score


@scorer(metrics=[accuracy(), stderr()])
def submitted_number() -> Scorer:
    """Score the number that the tool `submit` received."""

    async def score(state: TaskState, target: Target) -> Score:
        submitted = state.store.get("submitted")
        return Score(value="C" if submitted is not None and Fraction(submitted) == Fraction(target.text) else "I")

    return score
