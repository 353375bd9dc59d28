"""Whether the program that an episode ends with passes its tests, in the sandbox.

The tests are a field of the episode, a list of

    {"stdin": "3 4\\n", "stdout": "7\\n"}       the program is run with this input and prints this
    {"call": "add(3, 4)", "result": 7}        the expression, after the program, is this value (JSON)
    "assert add(3, 4) == 7"                   the statement, after the program, raises nothing

Each runs by itself, in a sandbox of its own. Of the first two forms the program never sees what is expected; it is
compared out here. An `assert` runs where the program runs, which could look for it and deceive: take it for programs
that have no reason to. A program that ends before its test is over has not passed it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import JudgeError
from components.rewards.answers import Answer, check_field, field
from components.sandbox import Limits, Sandbox
from components.trajectories.schema import Score, Trajectory

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)

# Runs in the sandbox and nowhere else: here it is only text.
_DRIVER = """
import json, sys
given = json.load(sys.stdin)
sys.stdin = open("/dev/null")
names = {"__name__": "__main__"}
exec(compile(given["code"], "program", "exec"), names)
value = None
if given["call"] is not None:
    value = eval(compile(given["call"], "test", "eval"), names)
else:
    exec(compile(given["test"], "test", "exec"), names)
sys.stdout.flush()
print("\\n" + given["mark"] + json.dumps(value))
"""


class CodeTests:
    """Tests of the program that an episode ends with.

    Args:
        tests: Field that holds the tests (`components.rewards.answers`).
        answer: Where the program stands: the last block between fences of three backticks in it, or all of it.
        give: `share` of the tests that are passed, or `all`: 1 where all of them are, else 0.
        seconds, memory_mb: That each test may take.

    An episode without a program has 0, one without tests is unscored. Raises ResourceError where there is no sandbox.
    """

    blocking = True

    def __init__(
        self,
        tests: str = "input.tests",
        answer: str = "text",
        give: Literal["share", "all"] = "share",
        seconds: Annotated[float, Field(ge=0.1, le=600)] = 5.0,
        memory_mb: Annotated[int, Field(ge=32)] = 256,
    ):
        check_field(tests, "reward.tests")
        self.tests, self.give = tests, give
        self._answer = Answer(answer)
        self._sandbox = Sandbox(
            Limits(seconds=seconds, cpu_seconds=int(seconds) + 1, memory_mb=memory_mb, processes=16, disk_mb=16)
        )

    def __call__(self, trajectory: Trajectory) -> Score:
        tests = field(trajectory, self.tests)
        if not isinstance(tests, list) or not tests:
            raise JudgeError(f"{self.tests} is {tests!r:.100}, expected a list of tests")
        code = program(self._answer.of(trajectory) or "")
        if not code:
            return Score(trajectory.id, 0.0, {"passed": 0.0, "tests": float(len(tests))}, explanation="no program")
        passed, first = 0, ""
        for number, test in enumerate(tests, 1):
            why = self._failed(code, test)
            passed += not why
            first = first or (f"test {number}: {why}" if why else "")
            if why and self.give == "all":
                break
        reward = passed / len(tests) if self.give == "share" else float(passed == len(tests))
        return Score(trajectory.id, reward, {"passed": float(passed), "tests": float(len(tests))}, explanation=first)

    def _failed(self, code: str, test: Any) -> str:
        """Why a test is not passed; empty where it is."""
        if isinstance(test, Mapping) and {"stdin", "stdout"} == set(test):
            ran = self._sandbox.python(code, stdin=str(test["stdin"]))
            if not ran.ok:
                return _ended(ran.killed, ran.stderr)
            return "" if _lines(ran.stdout) == _lines(str(test["stdout"])) else f"it printed {ran.stdout!r:.100}"
        if isinstance(test, str):
            call, statement = None, test
        elif isinstance(test, Mapping) and {"call", "result"} == set(test):
            call, statement = str(test["call"]), ""
        else:
            expected = '{"stdin", "stdout"}, {"call", "result"} or an assert statement'
            raise JudgeError(f"{self.tests} holds {test!r:.100}, expected {expected}")
        mark = secrets.token_hex(16)
        given = {"code": code, "call": call, "test": statement, "mark": mark}
        ran = self._sandbox.python(_DRIVER, stdin=json.dumps(given))
        if not ran.ok:
            return _ended(ran.killed, ran.stderr)
        _, marked, value = ran.stdout.rpartition(mark)
        if not marked:
            return "the program ended before the test was over"
        if call is None:
            return ""
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return f"the value is no JSON: {value!r:.100}"
        same = _typed(found) == _typed(test["result"])
        return "" if same else f"{call:.100} is {found!r:.100}, expected {test['result']!r:.100}"


def program(text: str) -> str:
    """The last block of code of a text, or all of it where it has none."""
    blocks = _FENCE.findall(text)
    return (blocks[-1] if blocks else text).strip()


def _ended(killed: str, stderr: str) -> str:
    last = [line for line in stderr.splitlines() if line.strip()][-1:]
    return f"ended for {killed}" if killed else f"it raised {last[0]:.200}" if last else "it ended with an error"


def _lines(text: str) -> list[str]:
    """Blanks at the ends of lines, and empty lines at the end, do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _typed(value: Any) -> Any:
    """JSON in which True is not 1."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list | tuple):
        return [_typed(one) for one in value]
    return {name: _typed(one) for name, one in value.items()} if isinstance(value, dict) else value
