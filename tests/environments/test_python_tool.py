"""Python tool: puzzles with right code, stateful cells, and sandboxed execution."""

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
from components.environments.worlds.python_tool import PythonTool, same
from components.errors import ResourceError
from tests.environments import checks

pytestmark = pytest.mark.timeout(1800)


sandboxed = pytest.mark.usefixtures("sandbox_here")


@pytest.fixture(scope="module")
def puzzles() -> PythonTool:
    return PythonTool()


def outputs_of(puzzles: PythonTool, *codes: str) -> list[str]:
    """Return the output of each piece of code, run in one episode."""
    steps = checks.play(puzzles, puzzles.scenarios("train")[0], [call("python", {"code": code}) for code in codes])
    return [step.observation[0]["content"] for step in steps]


@sandboxed
def test_it_keeps_what_every_environment_keeps():
    checks.check(lambda: PythonTool(train=6, heldout=3, seconds=60), few=1)


def test_the_code_of_every_puzzle_finds_its_answer():
    """Answer and code use different methods. The code is trusted, so it runs without the sandbox."""
    for seed in (0, 7):
        puzzles = PythonTool(seed, train=150, heldout=50)
        for scenario in (*puzzles.scenarios("train"), *puzzles.scenarios("heldout")):
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(scenario.input["code"], {})
            assert same(stdout.getvalue(), scenario.input["answer"]), scenario.input


@sandboxed
def test_the_solver_solves():
    puzzles = PythonTool(seconds=60)
    kinds = {(scenario.type, scenario.difficulty): scenario for scenario in puzzles.scenarios("train")}
    assert len(kinds) == 15
    for scenario in kinds.values():
        steps = checks.play(puzzles, scenario, puzzles.solve(scenario))
        assert same(steps[0].observation[0]["content"], scenario.input["answer"])
        assert steps[-1].info == {"success": True, "submitted": True, "runs": 1, "failed_runs": 0, "invalid_actions": 0}


def test_splits_types_and_difficulties(puzzles):
    asked = [scenario.input["question"] for split in checks.SPLITS for scenario in puzzles.scenarios(split)]
    assert len(asked) == len(set(asked)) == 640
    for split in checks.SPLITS:
        kinds = Counter((scenario.type, scenario.difficulty) for scenario in puzzles.scenarios(split))
        assert len(kinds) == 15
    lengths = [
        [
            len(scenario.input["code"])
            for scenario in puzzles.scenarios("train")
            if scenario.difficulty == level and scenario.type != "text"
        ]
        for level in (1, 2, 3)
    ]
    means = [sum(level_lengths) / len(level_lengths) for level_lengths in lengths]
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
def test_random_answers_rarely_succeed(puzzles):
    def guess(draw: random.Random, messages: list[dict]) -> dict:
        words = messages[1]["content"].replace(",", " ").replace("?", " ").split()
        return call("submit", {"answer": draw.choice([*words, str(draw.randrange(100))])})

    assert checks.success_of(puzzles, puzzles.scenarios("train"), guess, turns=1) < 0.02


@sandboxed
def test_cells_build_on_each_other():
    puzzles = PythonTool(seconds=60)
    shown = outputs_of(puzzles, "x = 20\nprint('shown once')", "x += 1\nx / 0", "def f():\n    return 2 * x\nf()", "y")
    assert shown[0] == "shown once"
    assert '"<cell 2>", line 2' in shown[1]
    assert shown[1].endswith("ZeroDivisionError: division by zero")
    assert shown[2] == "42"
    assert shown[3].endswith("NameError: name 'y' is not defined")
    assert "json.load" not in shown[1]
    info = puzzles.outcome("")
    assert (info["runs"], info["failed_runs"]) == (4, 2)


@sandboxed
def test_randomness_is_reproducible():
    puzzles = PythonTool(seconds=60)
    code = "import random; x = random.random(); print(x, hash('a'))"
    first, again, later = outputs_of(puzzles, code, "print(x, hash('a'))", "print(list({'a', 'b', 'c'}), x)")
    assert first == again
    assert [first] == outputs_of(puzzles, code)
    assert later.endswith(first.split()[0])


@sandboxed
def test_without_state_each_run_starts_with_nothing():
    shown = outputs_of(PythonTool(seconds=60, stateful=False), "x = 1", "x")
    assert shown[0] == "[no output]"
    assert "NameError" in shown[1]


@sandboxed
def test_a_crashing_cell_is_reported_and_dropped():
    puzzles = PythonTool(seconds=60, memory_mb=64)
    shown = outputs_of(
        puzzles, "x = 3", "import os; x = 4; print('going'); os._exit(7)", "exit()", "x", "print(input())"
    )
    assert shown[1] == "[the code ended the interpreter, with exit code 7]"  # what it printed was not yet written
    assert shown[2] == "[no output]"
    assert shown[3] == "3"
    assert shown[4].endswith("EOFError: EOF when reading a line")
    slow = PythonTool(seconds=1)
    shown = outputs_of(slow, "while True: pass")
    assert shown == ["[the code was ended: it took longer than 1 s]"]
    assert slow.cells == []
    assert outputs_of(puzzles, "'a' * 10 ** 9")[0].endswith("MemoryError")
    long = outputs_of(PythonTool(seconds=60, output=200), "print('a' * 1000)")[0]
    assert "bytes cut ...]" in long
    assert len(long) < 260
    assert outputs_of(puzzles, "print('\\udc80')", "f(", "\ud83d", "x" * 30_000)[-1].startswith(
        "error: the code has 30000"
    )


@sandboxed
def test_code_cannot_reach_host_files(tmp_path):
    target = tmp_path / "written"
    code = f"import os; os.makedirs({str(tmp_path)!r}); open({str(target)!r}, 'w')\nos.listdir('/')"
    (shown,) = outputs_of(PythonTool(seconds=60), code)
    assert "home" in shown
    assert not target.exists()
    (shown,) = outputs_of(PythonTool(seconds=60), f"open({str(Path(__file__))!r}).read()")
    assert "FileNotFoundError" in shown


@sandboxed
def test_code_does_not_block_others_and_is_killed_if_cancelled():
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


def test_answers_are_compared_in_normalized_form(subtests):
    for submitted, answer, right in [
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
    ]:
        with subtests.test(submitted=submitted):
            assert same(submitted, answer) is right


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
