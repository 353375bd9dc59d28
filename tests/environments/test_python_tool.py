"""The Python tool: puzzles whose code is right, cells that build on each other, and code that only the sandbox runs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from components.environments.tools import call
from components.environments.worlds.python_tool import PythonTool
from components.environments.worlds.python_tool.environment import same
from components.errors import ResourceError
from tests.environments import checks

pytestmark = pytest.mark.timeout(1800)


sandboxed = pytest.mark.usefixtures("sandbox_here")


@pytest.fixture(scope="module")
def puzzles() -> PythonTool:
    return PythonTool()


def told(puzzles: PythonTool, *codes: str) -> list[str]:
    """What each of these pieces of code shows, in one episode."""
    steps = checks.play(puzzles, puzzles.scenarios("train")[0], [call("python", {"code": code}) for code in codes])
    return [step.observation[0]["content"] for step in steps]


@sandboxed
def test_it_keeps_what_every_environment_keeps():
    checks.check(lambda: PythonTool(train=6, heldout=3, seconds=60), few=1)


def test_the_code_of_every_puzzle_finds_its_answer():
    """Answer and code were found in different ways. This code is ours: it needs no sandbox."""
    for seed in (0, 7):
        puzzles = PythonTool(seed, train=150, heldout=50)
        for scenario in (*puzzles.scenarios("train"), *puzzles.scenarios("heldout")):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(scenario.input["code"], {})
            assert same(said.getvalue(), scenario.input["answer"]), scenario.input


@sandboxed
def test_the_solver_solves():
    puzzles = PythonTool(seconds=60)
    kinds = {(one.type, one.difficulty): one for one in puzzles.scenarios("train")}
    assert len(kinds) == 15
    for scenario in kinds.values():
        steps = checks.play(puzzles, scenario, puzzles.solve(scenario))
        assert same(steps[0].observation[0]["content"], scenario.input["answer"])
        assert steps[-1].info == {"success": True, "submitted": True, "runs": 1, "failed_runs": 0, "invalid_actions": 0}


def test_splits_types_and_difficulties(puzzles):
    asked = [one.input["question"] for split in checks.SPLITS for one in puzzles.scenarios(split)]
    assert len(asked) == len(set(asked)) == 640
    for split in checks.SPLITS:
        found = Counter((one.type, one.difficulty) for one in puzzles.scenarios(split))
        assert len(found) == 15
    lengths = [
        [len(one.input["code"]) for one in puzzles.scenarios("train") if one.difficulty == level and one.type != "text"]
        for level in (1, 2, 3)
    ]
    means = [sum(one) / len(one) for one in lengths]
    assert means == sorted(means)
    for scenario in puzzles.scenarios("train"):
        answer = scenario.input["answer"]
        assert answer != []
        assert (
            isinstance(answer, list)
            or str(answer) not in scenario.input["question"].split()[5:]
            or len(str(answer)) < 4
        )


@sandboxed
def test_chance_solves_next_to_nothing(puzzles):
    def guess(draw: random.Random, messages: list[dict]) -> dict:
        words = messages[1]["content"].replace(",", " ").replace("?", " ").split()
        return call("submit", {"answer": draw.choice([*words, str(draw.randrange(100))])})

    assert checks.success_of(puzzles, puzzles.scenarios("train"), guess, turns=1) < 0.02


@sandboxed
def test_cells_build_on_each_other():
    puzzles = PythonTool(seconds=60)
    shown = told(puzzles, "x = 20\nprint('shown once')", "x += 1\nx / 0", "def f():\n    return 2 * x\nf()", "y")
    assert shown[0] == "shown once"
    assert '"<cell 2>", line 2' in shown[1]
    assert shown[1].endswith("ZeroDivisionError: division by zero")
    assert shown[2] == "42"
    assert shown[3].endswith("NameError: name 'y' is not defined")
    assert "json.load" not in shown[1]
    info = puzzles.outcome("")
    assert (info["runs"], info["failed_runs"]) == (4, 2)


@sandboxed
def test_chance_is_the_same_again():
    puzzles = PythonTool(seconds=60)
    code = "import random; x = random.random(); print(x, hash('a'))"
    first, again, later = told(puzzles, code, "print(x, hash('a'))", "print(list({'a', 'b', 'c'}), x)")
    assert first == again
    assert [first] == told(puzzles, code)
    assert later.endswith(first.split()[0])


@sandboxed
def test_without_state_each_run_starts_with_nothing():
    shown = told(PythonTool(seconds=60, stateful=False), "x = 1", "x")
    assert shown[0] == "[no output]"
    assert "NameError" in shown[1]


@sandboxed
def test_a_cell_that_ends_badly_is_told_and_dropped():
    puzzles = PythonTool(seconds=60, memory_mb=64)
    shown = told(puzzles, "x = 3", "import os; x = 4; print('going'); os._exit(7)", "exit()", "x", "print(input())")
    assert shown[1] == "[the code ended the interpreter, with exit code 7]"  # what it printed was not yet written
    assert shown[2] == "[no output]"
    assert shown[3] == "3"
    assert shown[4].endswith("EOFError: EOF when reading a line")
    slow = PythonTool(seconds=1)
    shown = told(slow, "while True: pass")
    assert shown == ["[the code was ended: it took longer than 1 s]"]
    assert slow.cells == []
    assert told(puzzles, "'a' * 10 ** 9")[0].endswith("MemoryError")
    long = told(PythonTool(seconds=60, output=200), "print('a' * 1000)")[0]
    assert "bytes cut ...]" in long
    assert len(long) < 260
    assert told(puzzles, "print('\\udc80')", "f(", "\ud83d", "x" * 30_000)[-1].startswith("error: the code has 30000")


@sandboxed
def test_code_reaches_nothing_of_ours(tmp_path):
    target = tmp_path / "written"
    code = f"import os; os.makedirs({str(tmp_path)!r}); open({str(target)!r}, 'w')\nos.listdir('/')"
    (shown,) = told(PythonTool(seconds=60), code)
    assert "home" in shown
    assert not target.exists()
    (shown,) = told(PythonTool(seconds=60), f"open({str(Path(__file__))!r}).read()")
    assert "FileNotFoundError" in shown


@sandboxed
def test_others_go_on_while_code_runs_and_a_cancelled_step_kills_it():
    slow, quick = PythonTool(seconds=120), PythonTool(seconds=120)

    async def go():
        slow.reset(slow.scenarios("train")[0])
        quick.reset(quick.scenarios("train")[0])
        task = asyncio.create_task(slow.step(call("python", {"code": "import time; time.sleep(100)"})))
        shown = (await quick.step(call("python", {"code": "6 * 7"}))).observation[0]["content"]
        assert not task.done()
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return shown, time.monotonic() - began

    shown, seconds = asyncio.run(go())
    assert shown == "42"
    assert seconds < 60


@pytest.mark.parametrize(
    ("given", "answer", "right"),
    [
        ("42", 42, True),
        (" 42.0 ", 42, True),
        ("42.5", 42, False),
        ("1" * 30, int("1" * 30), True),
        ("1" * 29 + "2", int("1" * 30), False),
        ("Friday", "Friday", True),
        ("'friday'", "Friday", True),
        ("['a', 'b']", ["a", "b"], True),
        ("a, b", ["a", "b"], True),
        ("['b', 'a']", ["a", "b"], False),
        ("['a']", ["a", "b"], False),
        ("(1, 2)", [1, 2], True),
        ("[]", [], True),
        ("0", [], False),
        ("about 42", 42, False),
    ],
)
def test_answers_are_compared_as_they_are_meant(given, answer, right):
    assert same(given, answer) is right


@sandboxed
def test_one_submission_counts(puzzles):
    scenario = puzzles.scenarios("train")[0]
    right = call("submit", {"answer": str(scenario.input["answer"])})
    assert not checks.play(puzzles, scenario, [call("submit", {"answer": "no"}), right])[-1].info["success"]
    info = checks.play(puzzles, scenario, [call("submit", {"answer": " "}), right])[-1].info
    assert (info["success"], info["invalid_actions"]) == (True, 1)


def test_without_a_sandbox_the_first_episode_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    puzzles = PythonTool(train=2, heldout=1)
    with pytest.raises(ResourceError, match="apt-get install bubblewrap"):
        puzzles.reset(puzzles.scenarios("train")[0])
