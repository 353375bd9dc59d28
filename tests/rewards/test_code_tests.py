"""Programs of a model and their tests, in the sandbox."""

from __future__ import annotations

import json

import pytest

from components.errors import ResourceError, SpecError
from components.rewards import judge as judging
from components.rewards.code_tests import CodeTests, program
from components.sandbox import bubblewrap
from components.trajectories.schema import Scenario, Trajectory
from tests.trajectories.builders import talk

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = [{"call": "add(3, 4)", "result": 7}, {"call": "add('a', 'b')", "result": "ab"}, "assert add(1, 1) == 2"]


def scored(text, tests=TESTS, **options):
    one = Trajectory("s/0", Scenario("s", {"tests": tests}, "train"), 0, [talk("Write add.", text)])
    (score,) = judging.judge(CodeTests(**options), [one])
    return score


def test_the_last_block_is_the_program():
    assert program("First:\n```python\na = 1\n```\nBetter:\n```py\nb = 2\n```\nDone.") == "b = 2"
    assert program("```\nopen = 1") == "open = 1"
    assert program("x = 3") == "x = 3"


@pytest.mark.usefixtures("sandbox_here")
class TestInTheSandbox:
    def test_the_share_of_the_tests_that_it_passes(self):
        score = scored(f"Here:\n{ADD}\nGood luck.")
        assert (score.reward, score.components, score.explanation) == (1.0, {"passed": 3.0, "tests": 3.0}, "")
        score = scored("```python\ndef add(a, b):\n    return 7\n```")
        assert score.reward == pytest.approx(1 / 3)
        assert score.explanation == "test 2: add('a', 'b') is 7, expected 'ab'"
        assert scored("```python\ndef add(a, b):\n    return 7\n```", give="all").reward == 0.0
        assert scored(ADD, give="all").reward == 1.0

    def test_a_program_that_prints_is_compared_by_what_it_prints(self):
        tests = [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "1 1\n", "stdout": "2\n"}]
        assert scored("print(sum(map(int, input().split())), ' ')", tests).reward == 1.0
        score = scored("print(7)", tests)
        assert (score.reward, score.explanation) == (0.5, "test 2: it printed '7\\n'")

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("def add(a, b): return 1 / 0", "it raised ZeroDivisionError: division by zero"),
            ("def add(a, b", "it raised SyntaxError"),
            ("while True: pass", "ended for time"),
            ("import sys; sys.exit(0)", "the program ended before the test was over"),
            ("import os; os._exit(0)", "the program ended before the test was over"),
            ("def add(a, b): return object()", "it raised TypeError"),
            ("def add(a, b): return True", "add(3, 4) is True, expected 7"),
            ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "it raised"),
            ("add = lambda a, b: 'x' * 10**7", "the value is no JSON or ended for output"),
        ],
    )
    def test_a_program_that_fails_passes_nothing(self, code, said):
        seconds = 1.0 if code.startswith("while") else 30.0  # a busy machine takes a while to begin
        score = scored(f"```python\n{code}\n```", [TESTS[0]], seconds=seconds)
        assert score.reward == 0.0
        assert any(one in score.explanation for one in said.split(" or "))

    def test_who_prints_what_a_driver_would_print_does_not_know_what_is_expected(self):
        cheat = (
            "import sys\nmark = sys._getframe(1).f_globals['given']['mark']\nprint(mark + '7')\n"
            "import os; sys.stdout.flush(); os._exit(0)"
        )
        seen = "import sys\nprint(sys._getframe(1).f_globals['given'])\n"
        assert "result" not in json.dumps(scored(f"```python\n{seen}\n```", [TESTS[0]]).explanation)
        # It may guess; it is not told.
        assert scored(f"```python\n{cheat}\n```", [{"call": "add(3, 5)", "result": 8}]).reward == 0.0

    def test_many_at_once_do_not_disturb_each_other(self):
        rows = [
            Trajectory(
                f"s{i}/0", Scenario(f"s{i}", {"tests": [f"assert n == {i}"]}, "train"), 0, [talk("?", f"n = {i}")]
            )
            for i in range(6)
        ]
        assert [one.reward for one in judging.judge(CodeTests(), rows, concurrency=3)] == [1.0] * 6

    @pytest.mark.parametrize("tests", [[], "assert True", [{"stdin": "1"}], [3], None])
    def test_what_is_no_test_leaves_the_episode_unscored(self, tests):
        score = scored(ADD, tests)
        assert score.reward is None
        assert "expected" in score.failure.message


def test_an_episode_without_a_program_has_nothing_and_one_without_tests_is_unscored():
    assert scored("").reward == 0.0
    one = Trajectory("s/0", Scenario("s", {}, "train"), 0, [talk("Write add.", ADD)])
    (score,) = judging.judge(CodeTests(), [one])
    assert "there is no 'input.tests'" in score.failure.message


def test_without_a_sandbox_it_says_what_to_install(monkeypatch):
    def missing():
        raise ResourceError("the sandbox needs bwrap, which is not here")

    monkeypatch.setattr(bubblewrap, "check", missing)
    with pytest.raises(ResourceError, match="bwrap"):
        scored(ADD)


def test_a_field_of_nothing_is_refused():
    with pytest.raises(SpecError, match=r"reward\.tests"):
        CodeTests("scenario.tests")
