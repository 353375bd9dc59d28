"""Cells whose code impersonates the driver: their prints are only output, and no call is lost."""

from __future__ import annotations

import hashlib
import json

import pytest

from components.sandbox import Limits, Sandbox
from components.sandbox.cells import Cell, play

pytestmark = [pytest.mark.security, pytest.mark.timeout(1800), pytest.mark.usefixtures("sandbox_here")]

TOOLS = {"add": ("add", ["number"])}
SENDS = """
import os
link = int(os.environ["CALLS"])
def send(text):
    os.write(link, text + b"\\n")
    return os.read(link, 9999)
"""


def played(code, *earlier):
    calls = []

    def call(name, arguments):
        calls.append((name, arguments))
        return {"text": str(arguments["number"])}

    sandbox = Sandbox(Limits(seconds=60, cpu_seconds=60))
    shown = play(sandbox, [Cell(source) for source in earlier], code, tools=TOOLS, call=call)
    return shown, calls


def test_a_mark_that_the_code_could_compute_is_only_output(subtests):
    for state in ["0", "1", "2", "3"]:
        with subtests.test(state=state):
            code = "add(1)\nimport os\nprint(MARK, end='', flush=True)\nos._exit(0)"
            mark = hashlib.sha256(code.encode()).hexdigest()[:16] + state
            for shown, calls in (played(code, f"MARK = {mark!r}"), played(code.replace("MARK", repr(mark)))):
                assert calls == [("add", {"number": 1})]
                assert [called[:2] for called in shown.calls] == calls
                assert (shown.well, shown.kept, shown.unreadable, shown.lost) == (False, False, False, False)
                assert mark in shown.text
                assert "ended the interpreter, with exit code 0" in shown.text


def test_a_state_that_the_code_sends_loses_no_call(subtests):
    for state in ["unreadable", "begins", "well", "failed", "lost", "other"]:
        with subtests.test(state=state):
            message = json.dumps(json.dumps(state))
            before, calls = played(f"{SENDS}add(1)\nsend({message}.encode())\nadd(2)\nos._exit(0)")
            assert calls == [("add", {"number": 1}), ("add", {"number": 2})]
            assert [called[:2] for called in before.calls] == calls
            assert not before.unreadable
            assert (before.well, before.kept, before.lost) == (
                state == "well",
                state in ("well", "failed"),
                state == "lost",
            )
            later, _ = played("add(3)", f"{SENDS}send({message}.encode())")
            assert not later.unreadable
            assert [called[1] for called in later.calls] == [{"number": 3}]


def test_results_of_ordinary_cells():
    shown, calls = played("x += add(1)\nx", "x = 'a'")
    assert (shown.text, shown.well, shown.kept, calls) == ("'a1'", True, True, [("add", {"number": 1})])
    shown, calls = played("add(1)\n1 / 0")
    assert (shown.well, shown.kept, len(calls)) == (False, True, 1)
    shown, calls = played("add(1)\nf(")
    assert (shown.unreadable, shown.kept, shown.calls, calls) == (True, True, [], [])
    assert "SyntaxError" in shown.text
    shown, _ = played("2 + 2", "add(5)")
    assert shown.lost
    assert "All variables are lost" in shown.text
    shown, _ = played("2 + 2", "f(")
    assert shown.text == "4"
    shown, _ = played("import time\nprint(1, flush=True)\nwhile True: add(1)")
    assert "called tools more than 32 times" in shown.text
    assert len(shown.calls) == 32
