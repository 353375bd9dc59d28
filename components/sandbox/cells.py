"""Python cells in the sandbox, as in a notebook: a cell sees the variables of the ones before it, and may call tools.

No interpreter waits between two cells. Each run starts afresh, carries out the earlier cells without showing what they
print, and then the new one; so an episode can be saved and gone on with elsewhere, holds no process while the model
thinks, and loses nothing when a cell has to be killed: that cell is dropped. The price is that the time of the earlier
cells counts again, and what they read from the clock differs. Chance is seeded.

Tools are functions of the cell. What they do is done by whoever runs it (`components.sandbox.calls`), once: an earlier
cell that is carried out again is given the answers that it was given then. Where it calls something else than it did
then, for it has read a clock, the run ends with that, and the variables of all cells are lost.

The value of an expression that ends a cell is shown, as Python's prompt does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.sandbox.bubblewrap import Sandbox

# Runs in the sandbox and nowhere else: here it is only text.
_DRIVER = r"""
import ast, json, linecache, os, random, sys, threading, traceback
given = json.load(sys.stdin)
names = {"__name__": "__main__"}
random.seed(0)
link = int(os.environ["CALLS"])

class ToolError(Exception):
    "What a tool answers to a call that it does not carry out."

class Otherwise(BaseException):
    "An earlier cell does not do again what it did."

answers, otherwise, one_at_a_time = None, False, threading.Lock()

def ask(name, arguments):
    global otherwise
    if answers is not None:
        if not answers or answers[0][:2] != [name, arguments]:
            otherwise = True
            raise Otherwise
        return answers.pop(0)[2]
    return exchange([name, arguments])

def exchange(message):
    line, got = json.dumps(message).encode() + b"\n", bytearray()
    while line:
        line = line[os.write(link, line):]
    while not got.endswith(b"\n"):
        more = os.read(link, 65536)
        if not more:
            os._exit(1)
        got += more
    return json.loads(got)

def tool(function, name, parameters):
    def call(*values, **arguments):
        if len(values) > len(parameters):
            raise TypeError(f"{function}() takes {len(parameters)} arguments, {len(values)} were given")
        for key, value in zip(parameters, values):
            if key in arguments:
                raise TypeError(f"{function}() got {key!r} twice")
            arguments[key] = value
        arguments = json.loads(json.dumps(arguments, allow_nan=False))
        with one_at_a_time:
            told = ask(name, arguments)
        if "error" in told:
            raise ToolError(told["error"]) from None
        return told["text"]
    call.__name__ = call.__qualname__ = function
    return call

names.update({function: tool(function, *how) for function, how in given["tools"].items()})
if given["tools"]:
    names["ToolError"] = ToolError

def compiled(code, number):
    "The cell without its last expression, and that; None if it is no Python."
    place = f"<cell {number}>"
    linecache.cache[place] = len(code), None, code.splitlines(True), place
    try:
        tree = ast.parse(code, place)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = compile(tree, place, "exec")
        return body, None if last is None else compile(ast.Expression(last.value), place, "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr, flush=True)
        return None

def play(body, value):
    sys.stdin = open(os.devnull)  # exit() closes it
    try:
        exec(body, names)
        if value is not None:
            value = eval(value, names)
            if value is not None:
                print(repr(value))
        return "well"
    except SystemExit:
        return "well"
    except BaseException as error:
        frames = at = error.__traceback__.tb_next
        while at is not None and at.tb_next is not None:
            if at.tb_next.tb_frame.f_code.co_filename == __file__:
                at.tb_next = None  # the inside of a tool
            at = at.tb_next
        print("".join(traceback.format_exception(type(error), error, frames, limit=-6)), end="", file=sys.stderr)
        return "failed"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

# Before anything of the agent runs, so that no cell can claim that there was none.
cell = compiled(given["cell"], len(given["earlier"]) + 1)
exchange("unreadable" if cell is None else "begins")
if cell is None:
    os._exit(0)
shown = os.dup(1), os.dup(2)
quiet = os.open("/dev/null", os.O_WRONLY)
os.dup2(quiet, 1), os.dup2(quiet, 2)
for number, (code, answers) in enumerate(given["earlier"], 1):
    earlier = compiled(code, number)
    if earlier is not None:
        play(*earlier)
    if otherwise or answers:
        otherwise = True
        break
answers = None
os.dup2(shown[0], 1), os.dup2(shown[1], 2)
how = "lost" if otherwise else play(*cell)
with one_at_a_time:
    exchange(how)
os._exit(0)
"""
_STATES = (
    {b'"begins"': "begins", b'"unreadable"': "unreadable"},
    {b'"well"': "well", b'"failed"': "failed", b'"lost"': "lost"},
)
"""First and second message of the driver about the state of a run."""
_WHY = {
    "time": "it took longer than {seconds:g} s",
    "memory": "it used more than {memory_mb} MB of memory",
    "files": "it created more than {files} files",
    "output": "it printed without end",
    "calls": "it called tools more than {calls} times, or with too much at once",
    "stopped": "the episode was stopped",
}

Call = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Carries out a call of a tool, by name and arguments: `{"text": ...}` is what the function returns, `{"error": ...}`
what it raises."""


@dataclass(frozen=True)
class Cell:
    """A cell that ran to its end."""

    code: str
    calls: Sequence[tuple[str, dict[str, Any], dict[str, Any]]] = ()
    """Name, arguments and answer of each call that it made."""


@dataclass(frozen=True)
class Shown:
    """What a cell came to."""

    text: str
    """Its output, and what went wrong."""
    well: bool
    """Whether it ran to its end without an error."""
    kept: bool
    """Whether it ran to its end, so that later cells can build on it."""
    unreadable: bool = False
    """Whether it is no Python, so that nothing of it ran."""
    lost: bool = False
    """Whether it did not run, for an earlier cell did not do again what it did."""
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)


def play(
    sandbox: Sandbox,
    earlier: Sequence[Cell],
    code: str,
    stop: threading.Event | None = None,
    *,
    tools: Mapping[str, tuple[str, Sequence[str]]] | None = None,
    call: Call | None = None,
) -> Shown:
    """Run a cell after the earlier ones. tools: by the name of the function, name and parameters. call: carries their
    calls out, in a thread of its own.

    The state of the run comes over the socket of the calls: first whether the cell can be compiled, sent before any
    code of the agent runs, then how it ended. Code can send the second in the driver's place, and gains nothing that it
    could not have by ending so. What it prints is only output."""
    replay = [[one.code, list(one.calls)] for one in earlier]
    given = json.dumps({"earlier": replay, "cell": code, "tools": tools or {}})
    made: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    states: list[str] = []
    limits = sandbox.limits

    def answer(line: bytes) -> bytes:
        if len(states) < 2 and (state := _STATES[len(states)].get(line)):
            states.append(state)
            return b"true"
        asked = _read(line) if states else None
        if asked is None or call is None:
            return b'{"error": "this is no call of a tool"}'
        if len(made) == limits.calls:
            return b'{"error": "too many calls"}'  # and whatever comes next ends the program
        told = call(*asked)
        made.append((*asked, told))
        return json.dumps(told).encode()

    result = Sandbox(replace(limits, calls=limits.calls + len(_STATES))).python(
        _DRIVER, stdin=given, stop=stop, answer=answer
    )
    how = "" if result.killed or not states else states[-1]
    kept = how in ("failed", "well", "unreadable")
    output = "" if how == "lost" else result.stdout
    parts = [part.rstrip("\n") for part in (output, result.stderr) if part.strip("\n")]
    if result.killed:
        parts.append(f"[the code was ended: {_WHY[result.killed].format(**vars(limits))}]")
    elif how == "lost":
        parts = ["[the code was not run: carried out again, earlier code called other tools. All variables are lost]"]
    elif not kept:
        parts.append(f"[the code ended the interpreter, with exit code {result.exit_code}]")
    text = "\n".join(parts) or "[no output]"
    return Shown(text, how == "well", kept, how == "unreadable", how == "lost", made)


def _read(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call, if it is one that can be stored and shown."""
    try:
        name, arguments = json.loads(line)
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()  # no lone surrogates, no NaN
    except (ValueError, TypeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
