"""Repair of programs: tasks with a solution, sandboxed tests, and no success for tampering."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from typing import Any

import pytest

from components.environments.protocol import Step
from components.environments.tools import call
from components.environments.worlds.repair import Repair
from components.environments.worlds.repair_programs import FAULTS, draw_function
from tests.environments import checks

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("sandbox_here")]

TEST = call("test", {})


@pytest.fixture(scope="module")
def programs() -> Repair:
    return Repair(train=21, heldout=9, seconds=60)


def play(programs: Repair, *actions: dict[str, Any]) -> list[Step]:
    """Return the steps of an episode of the first program, which has one module."""
    return checks.play(programs, programs.scenarios("train")[0], actions)


def module_of(programs: Repair) -> str:
    """Return the path of the module of the first program."""
    (path,) = (path for path in programs.scenarios("train")[0].input["files"] if path != "tests.py")
    return path


def insertion(programs: Repair, line: str) -> dict[str, Any]:
    """Return an edit of the first program that adds a line to its function."""
    new = f"    {line}\n    result = 0"
    return call("edit", {"path": module_of(programs), "old": "    result = 0", "new": new})


def test_it_keeps_what_every_environment_keeps():
    checks.check(lambda: Repair(train=6, heldout=3, seconds=60), few=1)


def test_every_program_fails_and_is_repaired_by_its_solution(programs):
    kinds = Counter()
    for scenario in (*programs.scenarios("train"), *programs.scenarios("heldout")):
        (untouched,) = checks.play(programs, scenario, [TEST])
        assert not untouched.done
        assert (
            scenario.input["issue"].partition(": ")[2].partition(" returns ")[0] in untouched.observation[0]["content"]
        )
        assert checks.solved(programs, scenario), scenario
        kinds[scenario.type] += 1
    assert set(kinds) == {*FAULTS, "several"}


def test_hidden_tests_tell_a_repair_from_values_of_the_visible_tests(programs):
    """Also of two faults, the repair of one is no success."""
    for scenario in programs.scenarios("train")[:6]:
        assert not set(scenario.input["visible"]) & set(scenario.input["hidden"])
    visible = programs.scenarios("train")[0].input["visible"]
    names = re.search(r"\((.*)\):", programs.scenarios("train")[0].input["files"][module_of(programs)])[1]
    table = {called.partition("(")[2][:-1]: value for called, value in visible.items()}
    memorized = f"return {table}.get(str(({names},))[1:-1].rstrip(','), 0)"
    step = play(programs, insertion(programs, memorized), TEST)[-1]
    assert step.done
    assert step.info["tests_pass"]
    assert not step.info["success"]
    for scenario in programs.scenarios("train")[2::3]:
        edits = [action for action in programs.solve(scenario) if action["tool_calls"][0]["function"]["name"] == "edit"]
        assert len(edits) == 2
        assert not any(checks.play(programs, scenario, [edit])[0].info["success"] for edit in edits)


def test_splits_share_no_structure_and_do_not_depend_on_the_other_size():
    """The structure of a function is its code without numbers and names."""
    structures = {
        split: {
            re.sub(r"\d+", "N", draw_function(random.Random(number), "x.py", "x", split, None).source)
            for number in range(200)
        }
        for split in checks.SPLITS
    }
    assert not structures["train"] & structures["heldout"]
    assert min(map(len, structures.values())) > 120
    small, large = Repair(train=3, heldout=6), Repair(train=9, heldout=6)
    assert small.scenarios("heldout") == large.scenarios("heldout")
    assert small.scenarios("train") == large.scenarios("train")[:3]
    branches = Repair(train=9, heldout=1, faults=["branch"], difficulties=[1]).scenarios("train")
    assert {(scenario.type, scenario.difficulty) for scenario in branches} == {("branch", 1)}


def test_random_edits_rarely_succeed(programs):
    def guess(draw: random.Random, messages: list[dict]) -> dict:
        lines = next((one["content"] for one in messages[2:] if "def " in one["content"]), "").split("\n")
        path = messages[1]["content"].partition(":")[0]
        if len(lines) < 2:
            return call("read", {"path": path})
        return draw.choice([TEST, call("edit", {"path": path, "old": draw.choice(lines), "new": draw.choice(lines)})])

    level = Repair(train=24, heldout=1, difficulties=[1], seconds=60)
    assert checks.success_of(level, level.scenarios("train"), guess, turns=4) < 0.1


@pytest.mark.parametrize("path", ["tests.py", "./tests.py", "/etc/passwd", "../notes.txt", "a/../../notes.txt"])
def test_an_edit_of_the_tests_or_outside_the_folder_forfeits_the_reward(programs, path):
    solution = programs.solve(programs.scenarios("train")[0])
    steps = play(programs, call("edit", {"path": path, "old": "assert", "new": "#"}), *solution)
    assert steps[0].observation[0]["content"] == f"error: {path} must not be changed"
    assert steps[-1].done
    assert steps[-1].info["tests_pass"]
    assert steps[-1].info["tampered"]
    assert not steps[-1].info["success"]


@pytest.mark.parametrize(
    "line",
    [
        "open('tests.py', 'w')",
        "__import__('os').remove(__file__)",
        "__import__('os').open('/tmp/x', 65)",
        "__import__('pathlib').Path('notes').mkdir()",
        "__import__('shutil').rmtree('.')",
        "__import__('subprocess').run(['true'])",
        "__import__('os').fork()",
        "__import__('socket').socket()",
    ],
)
def test_code_that_writes_deletes_or_starts_something_forfeits_the_reward(programs, line):
    solution = programs.solve(programs.scenarios("train")[0])
    steps = play(programs, insertion(programs, f"exec({line!r})"), *solution)
    assert steps[0].info == {
        "success": False,
        "tests_pass": False,
        "tampered": True,
        "test_runs": 0,
        "invalid_actions": 0,
    }
    assert steps[-1].info["tampered"]
    undone = insertion(programs, "pass")
    assert not play(programs, insertion(programs, f"exec({line!r})"), undone, *solution)[-1].info["success"]


def test_a_file_cannot_be_emptied(programs):
    text = programs.scenarios("train")[0].input["files"][module_of(programs)]
    (step,) = play(programs, call("edit", {"path": module_of(programs), "old": text, "new": "\n"}))
    assert step.observation[0]["content"].endswith("must not be emptied")
    assert step.info["tampered"]


def test_faults_of_the_edited_code_fail_its_tests(programs):
    slow = Repair(train=21, heldout=9, seconds=1)
    for environment, line, value in [
        (programs, "return (", '{"raises": "SyntaxError"}'),
        (programs, "exit()", '{"raises": "SystemExit"}'),
        (programs, "print('noise'); return 'many'", '"many"'),
        (programs, "return {1}", '{"raises": "TypeError"}'),
        (programs, "import os; os._exit(0)", "without a result"),
        (programs, "return [1] * 10 ** 9", '{"raises": "MemoryError"}'),
        (slow, "while True: pass", "without a result"),
    ]:
        step = play(environment, insertion(environment, line), TEST)[-1]
        assert f"is {value}, not " in step.observation[0]["content"]
        assert not step.done
        assert step.info["test_runs"] == 1


def test_a_cancelled_step_ends_its_tests(programs):
    async def go() -> None:
        programs.reset(programs.scenarios("train")[0])
        task = asyncio.create_task(programs.step(insertion(programs, "__import__('time').sleep(50)")))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    start = time.monotonic()
    asyncio.run(go())
    assert time.monotonic() - start < 40
