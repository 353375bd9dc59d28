"""Repair of small Python programs: the agent reads, searches and edits files, and runs tests, until the tests pass.

Programs and their faults are generated (`repair_programs.py`). The files of an episode are data in this process; code
runs only in the sandbox (`components/sandbox`), afresh for each version of the files, so nothing that it does lasts.
It gets the calls of the visible and the hidden tests, never their expected values, which are compared here.

An episode is tampered with, and never succeeds, if it edits the tests, empties a file, or edits a path outside its
folder, or if its code, while it is tested, writes or deletes a file, starts a program, or opens a connection.
"""

from __future__ import annotations

import functools
import json
import posixpath
import threading
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

from pydantic import Field

from components.aio import stoppable
from components.environments.protocol import Step
from components.environments.restorable import RestorableState
from components.environments.seeded import Count, Make, generate
from components.environments.tools import InvalidAction, call, shorten, tool
from components.environments.worlds.repair_programs import FAULTS, LEVELS, TESTS, Fault, Level, draw_task
from components.sandbox import Limits, Sandbox
from components.sandbox.bubblewrap import check
from components.specs.registered import registered
from components.trajectories.schema import Scenario

MOST_MATCHES = 20
"""Maximum number of lines that `search` shows."""
LONGEST = 4000
"""Maximum number of characters of a file after an edit."""
_FORBIDDEN = 77
"""Exit code of the driver when an audit hook ends it."""
# The values go to a copy of the standard output, so that the code can print. Audit hooks cannot be removed.
_DRIVER = f"""
import json, os, sys
imports, calls = json.load(sys.stdin)
values = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def audit(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    acts = event.startswith(("os.", "shutil.", "subprocess.", "socket.", "ctypes."))
    if writes or acts and event not in ("os.listdir", "os.scandir"):
        os._exit({_FORBIDDEN})
sys.addaudithook(audit)
def value_of(call, names):
    try:
        exec(imports, names)
        return json.dumps(eval(call, names))
    except BaseException as error:
        return json.dumps({{"raises": type(error).__name__}})
for call in calls:
    print(value_of(call, {{}}), file=values, flush=True)
"""


@registered("environment.repair")
class Repair(RestorableState):
    """seed: generator seed. train, heldout: programs of the two splits. difficulties: used in rotation. faults: kinds
    of planted faults. seconds, memory_mb: limits of a test run.

    Scenario types: operator, off_by_one, branch, missing_case, several. Difficulty: 1 one function, 2 two modules, 3
    three modules and two faults.
    """

    saved = ("files", "tampered", "test_runs")
    system = f"Repair the fault: read the file, edit the wrong lines, then test. Do not change {TESTS}."

    def __init__(
        self,
        seed: int = 0,
        train: Count = 512,
        heldout: Count = 128,
        difficulties: Annotated[Sequence[Level], Field(min_length=1)] = LEVELS,
        faults: Annotated[Sequence[Fault], Field(min_length=1)] = FAULTS,
        seconds: Annotated[float, Field(ge=0.1, le=600)] = 10.0,
        memory_mb: Annotated[int, Field(ge=32)] = 128,
    ):
        self._sandbox = Sandbox(Limits(seconds=seconds, memory_mb=memory_mb, processes=16, disk_mb=4))
        self._scenarios = generate("repair", _drawing(tuple(faults)), seed, train, heldout, tuple(difficulties), LEVELS)
        self._stop = threading.Event()

    def begin(self, scenario: Scenario) -> str:
        check()
        self.files: dict[str, str] = dict(scenario.input["files"])
        self.tampered, self.test_runs = False, 0
        self._tested: tuple[dict[str, str], dict[str, str]] = ({}, {})
        return str(scenario.input["issue"])

    async def step(self, action: dict[str, Any]) -> Step:  # type: ignore[override]  # the protocol allows both
        """Run the step in a thread, so that tests do not block other episodes; kill them if cancelled."""
        self._stop = threading.Event()
        return await stoppable(functools.partial(super().step, action), self._stop)

    @tool
    def list_files(self) -> str:
        """lists the files"""
        return "\n".join(sorted(self.files))

    @tool
    def read(self, path: str) -> str:
        """shows a file"""
        return self.files[self._existing(path)]

    @tool
    def search(self, text: str) -> str:
        """shows the lines that contain a text"""
        lines = [(path, *line) for path in sorted(self.files) for line in enumerate(self.files[path].split("\n"), 1)]
        matches = [f"{path}:{number}: {line}" for path, number, line in lines if text in line]
        return shorten("\n".join(matches[:MOST_MATCHES]) or "no line")

    @tool
    def edit(self, path: str, old: Annotated[str, "occurs once in the file"], new: str) -> str:
        """replaces a text in a file"""
        name = posixpath.normpath(path)
        if name == TESTS or name.startswith(("/", "..")):
            self._tamper(f"{path} must not be changed")
        text = self.files[self._existing(path)]
        if not old or old == new or (count := text.count(old)) != 1:
            reason = "equals new" if old == new else f"occurs {count} times in {name}" if old else "is empty"
            raise InvalidAction(f"old {reason}; expected a text that occurs once, and another new one")
        edited = text.replace(old, new)
        if len(edited) > LONGEST:
            raise InvalidAction(f"the file would have {len(edited)} characters; {LONGEST} at most")
        if not edited.strip():
            self._tamper(f"{path} must not be emptied")
        self.files[name] = edited
        return "edited"

    @tool
    def test(self) -> str:
        """runs the tests; the task ends when they pass"""
        self.test_runs += 1
        failures = self._failures("visible")
        self.done = not failures
        return "\n".join(failures[:2]) or "all tests pass"

    def outcome(self, answer: str) -> dict[str, Any]:
        changed = self.files != self.scenario.input["files"]  # the original fails
        tests_pass = changed and not self._failures("visible")
        success = tests_pass and not self._failures("hidden") and not self.tampered
        return {
            "success": success, "tests_pass": tests_pass, "tampered": self.tampered, "test_runs": self.test_runs
        }  # fmt: skip

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return calls that read the faulty files, edit them, and run the tests."""
        return [call(name, values, at) for at, (name, values) in enumerate(scenario.input["solution"])]

    def _existing(self, path: str) -> str:
        name = posixpath.normpath(path)
        if name not in self.files:
            raise InvalidAction(f"no file {path}; there are {', '.join(sorted(self.files))}")
        return name

    def _tamper(self, reason: str) -> NoReturn:
        self.tampered = True
        raise InvalidAction(reason)

    def _failures(self, tests: str) -> list[str]:
        """Return a line for each of the visible or hidden tests that fails."""
        values = self._values()
        return [
            f"{called} is {values.get(called, 'without a result')}, not {json.dumps(expected)}"
            for called, expected in self.scenario.input[tests].items()
            if values.get(called) != json.dumps(expected)
        ]

    def _values(self) -> dict[str, str]:
        """Return the values of all tested calls as JSON, from a run of the present files."""
        tested, values = self._tested
        if tested != self.files:
            calls = [*self.scenario.input["visible"], *self.scenario.input["hidden"]]
            imports = self.files[TESTS].partition("\n\n")[0]
            modules = {path: text for path, text in self.files.items() if path != TESTS}
            request = json.dumps([imports, calls])
            result = self._sandbox.python(_DRIVER, stdin=request, files=modules, stop=self._stop)
            self.tampered = self.tampered or result.exit_code == _FORBIDDEN
            values = dict(zip(calls, map(shorten, result.stdout.splitlines()), strict=False))
            self._tested = dict(self.files), values
        return values


@functools.cache
def _drawing(faults: tuple[Fault, ...]) -> Make:
    """Return the same function for the same faults, so that tasks are generated once."""
    return functools.partial(draw_task, faults=faults)
