"""Tests of the final program of an episode, in the sandbox.

The tests are a field of the episode, a list of

    {"stdin": "3 4\\n", "stdout": "7\\n"}       the program, run with this input, prints this
    {"call": "add(3, 4)", "result": 7}        the expression, after the program, has this value (JSON)
    "assert add(3, 4) == 7"                   the statements, after the program, raise nothing

Each test runs separately. The program never sees the expected result and takes no part in the comparison: output and
values are compared here; statements run in a second sandbox, where the program's names are proxies that forward calls
to it, and only plain data comes back (`components.sandbox.remote`). So statements may import, define functions
(`def check(candidate): ...`, as HumanEval does) and catch built-in exceptions, but they cannot

    compare objects of the program's own classes       compare their attributes, or str() of them
    subclass or copy these classes                     write {"call": ..., "result": ...}
    see that a call changed one of its arguments       write {"call": "[x := [3, 1], sort(x), x][-1]", "result": [1, 3]}
    pass it objects that are no plain data             pass plain data or functions

An expression of a `call` is evaluated in the program's own process, where all of this works. In statements, the name of
a built-in or of a standard library module always refers to Python's, even if the program redefines it. Statements that
name no class of the program (`Stack`, by its initial capital) expect plain data of its functions; what else these
return may only be called, and iterated once. So no object whose operators answer anything passes for a result. A helper
function of the program that statements apply to its results is not trustworthy: let tests define or import what they
compare with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import JudgeError
from components.rewards.rules.answers import AnswerReader, check_field, field
from components.sandbox import Limits, Sandbox
from components.sandbox.pair import ProgramFailed, SandboxedProgram
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_CALLS = 20_000
"""Maximum number of messages between a program and its test."""


@registered("reward.code_tests")
class CodeTests:
    """Tests of the final program of an episode.

    Args:
        tests: Field with the tests (`components.rewards.rules.answers`).
        answer: Place of the program: the last block fenced by three backticks there, or the whole text.
        give: `share` of the passed tests, or `all`: 1 if all tests pass, else 0.
        seconds, memory_mb: Limits of each test; statements have the same limits again for themselves.

    An episode without a program gets 0, one without tests is unscored. Raises ResourceError if there is no sandbox.
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
        self._answer = AnswerReader(answer)
        self._sandbox = Sandbox(
            Limits(
                seconds=seconds,
                cpu_seconds=int(seconds) + 1,
                memory_mb=memory_mb,
                processes=16,
                disk_mb=16,
                calls=_CALLS,
            )
        )

    def fields_read(self) -> dict[str, str]:
        """Return the fields of the episode that are read, by configuration key."""
        return {"tests": self.tests}

    def __call__(self, trajectory: Trajectory) -> Score:
        tests = field(trajectory, self.tests)
        if not isinstance(tests, list) or not tests:
            raise JudgeError(f"{self.tests} is {tests!r:.100}, expected a list of tests")
        code = program(self._answer.of(trajectory) or "")
        if not code:
            return Score(trajectory.id, 0.0, {"passed": 0.0, "tests": float(len(tests))}, explanation="no program")
        passed, first_failure = 0, ""
        for number, test in enumerate(tests, 1):
            reason = self._failure(code, test)
            passed += not reason
            first_failure = first_failure or (f"test {number}: {reason}" if reason else "")
            if reason and self.give == "all":
                break
        reward = passed / len(tests) if self.give == "share" else float(passed == len(tests))
        return Score(
            trajectory.id, reward, {"passed": float(passed), "tests": float(len(tests))}, explanation=first_failure
        )

    def _failure(self, code: str, test: Any) -> str:
        """Return the reason why a test fails; empty if it passes."""
        if isinstance(test, Mapping) and {"stdin", "stdout"} == set(test):
            return self._printed(code, str(test["stdin"]), str(test["stdout"]))
        try:
            if isinstance(test, str):
                return self._statements(code, test)
            if isinstance(test, Mapping) and {"call", "result"} == set(test):
                return self._call(code, str(test["call"]), test["result"])
        except ProgramFailed as error:
            return str(error) or "the program failed"
        expected = '{"stdin", "stdout"}, {"call", "result"} or an assert statement'
        raise JudgeError(f"{self.tests} holds {test!r:.100}, expected {expected}")

    def _printed(self, code: str, stdin: str, expected: str) -> str:
        limits = self._sandbox.limits
        output_limit = max(limits.output_bytes, 2 * len(expected.encode(errors="replace")) + 1000)
        result = Sandbox(replace(limits, output_bytes=output_limit)).python(code, stdin=stdin)
        if not result.ok:
            return _ended(result.killed, result.stderr)
        return "" if _lines(result.stdout) == _lines(expected) else f"it printed {result.stdout!r:.100}"

    def _statements(self, code: str, test: str) -> str:
        with SandboxedProgram(self._sandbox, code) as running:
            verdict = running.verdict(test)
        if verdict.invalid:
            raise JudgeError(
                f"{self.tests} holds {test!r:.100}, which {verdict.reason}; expected statements that name a function "
                f'of the program, or {{"call": ..., "result": ...}}'
            )
        return "" if verdict.passed else verdict.reason or "the test failed"

    def _call(self, code: str, call: str, expected: Any) -> str:
        with SandboxedProgram(self._sandbox, code) as running:
            text = running.value_of(call)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return f"the value is no JSON: {text!r:.100}"
        try:
            same = _typed(value) == _typed(expected)
        except RecursionError:
            return f"the value is nested too deep: {text!r:.100}"
        return "" if same else f"{call:.100} is {value!r:.100}, expected {expected!r:.100}"


def program(text: str) -> str:
    """Return the last code block of a text, or the whole text if it has none."""
    blocks = _FENCE.findall(text)
    return (blocks[-1] if blocks else text).strip()


def _ended(killed: str, stderr: str) -> str:
    last = [line for line in stderr.splitlines() if line.strip()][-1:]
    return f"ended for {killed}" if killed else f"it raised {last[0]:.200}" if last else "it ended with an error"


def _lines(text: str) -> list[str]:
    """Return the lines without trailing whitespace and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _typed(value: Any) -> Any:
    """Return JSON data in which True differs from 1."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return {name: _typed(item) for name, item in value.items()} if isinstance(value, dict) else value
