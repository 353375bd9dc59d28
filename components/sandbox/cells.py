"""Python cells in the sandbox, as in a notebook: a cell sees the variables of earlier cells, and may call tools.

No interpreter stays alive between two cells. Each run starts a new one, replays the earlier cells with their output
hidden, and then runs the new cell. So an episode can be saved and resumed elsewhere, holds no process while the model
generates, and loses nothing when a cell has to be killed: that cell is dropped. The cost is that the time of earlier
cells counts again, and that values they read from the clock change. Random numbers are seeded.

Tools are functions of the cell. The host executes each call once (`components.sandbox.calls`): a replayed cell gets the
recorded answers. If a replayed cell makes other calls than recorded, for example because it read a clock, the run ends
and the variables of all cells are lost.

The value of an expression that ends a cell is printed, as at Python's prompt.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.sandbox.bubblewrap import Sandbox

# Runs in the sandbox only; here it is text.
_DRIVER = r"""
import ast, json, linecache, os, random, sys, threading, traceback
request = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
random.seed(0)
link = int(os.environ["CALLS"])

class ToolError(Exception):
    "Error that a tool returned."

class ReplayDiverged(BaseException):
    "Replay of an earlier cell that made other calls than recorded."

answers, diverged, call_lock = None, False, threading.Lock()

def ask(name, arguments):
    global diverged
    if answers is not None:
        if not answers or answers[0][:2] != [name, arguments]:
            diverged = True
            raise ReplayDiverged
        return answers.pop(0)[2]
    return exchange([name, arguments])

def exchange(message):
    line, received = json.dumps(message).encode() + b"\n", bytearray()
    while line:
        line = line[os.write(link, line):]
    while not received.endswith(b"\n"):
        chunk = os.read(link, 65536)
        if not chunk:
            os._exit(1)
        received += chunk
    return json.loads(received)

def tool(function, name, parameters):
    def call(*values, **arguments):
        if len(values) > len(parameters):
            raise TypeError(f"{function}() takes {len(parameters)} arguments, {len(values)} were given")
        for key, value in zip(parameters, values):
            if key in arguments:
                raise TypeError(f"{function}() received {key!r} twice")
            arguments[key] = value
        arguments = json.loads(json.dumps(arguments, allow_nan=False))
        with call_lock:
            reply = ask(name, arguments)
        if "error" in reply:
            raise ToolError(reply["error"]) from None
        return reply["text"]
    call.__name__ = call.__qualname__ = function
    return call

namespace.update({function: tool(function, *signature) for function, signature in request["tools"].items()})
if request["tools"]:
    namespace["ToolError"] = ToolError

def compiled(code, number):
    "Return the cell without its last expression, and that expression; None if it is not valid Python."
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

def run_cell(body, value):
    sys.stdin = open(os.devnull)  # exit() closes it
    try:
        exec(body, namespace)
        if value is not None:
            value = eval(value, namespace)
            if value is not None:
                print(repr(value))
        return "well"
    except SystemExit:
        return "well"
    except BaseException as error:
        frames = at = error.__traceback__.tb_next
        while at is not None and at.tb_next is not None:
            if at.tb_next.tb_frame.f_code.co_filename == __file__:
                at.tb_next = None  # hides the frames inside a tool
            at = at.tb_next
        print("".join(traceback.format_exception(type(error), error, frames, limit=-6)), end="", file=sys.stderr)
        return "failed"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

# Sent before any code of the agent runs, so that no cell can fake it.
cell = compiled(request["cell"], len(request["earlier"]) + 1)
exchange("unreadable" if cell is None else "begins")
if cell is None:
    os._exit(0)
shown = os.dup(1), os.dup(2)
quiet = os.open("/dev/null", os.O_WRONLY)
os.dup2(quiet, 1), os.dup2(quiet, 2)
for number, (code, answers) in enumerate(request["earlier"], 1):
    earlier = compiled(code, number)
    if earlier is not None:
        run_cell(*earlier)
    if diverged or answers:
        diverged = True
        break
answers = None
os.dup2(shown[0], 1), os.dup2(shown[1], 2)
outcome = "lost" if diverged else run_cell(*cell)
with call_lock:
    exchange(outcome)
os._exit(0)
"""
_STATES = (
    {b'"begins"': "begins", b'"unreadable"': "unreadable"},
    {b'"well"': "well", b'"failed"': "failed", b'"lost"': "lost"},
)
"""First and second state message of the driver in a run."""
_WHY = {
    "time": "it took longer than {seconds:g} s",
    "memory": "it used more than {memory_mb} MB of memory",
    "files": "it created more than {files} files",
    "output": "it printed without end",
    "calls": "it called tools more than {calls} times, or with too much at once",
    "stopped": "the episode was stopped",
}

Call = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Executes a tool call, given name and arguments. `{"text": ...}` is returned by the function, `{"error": ...}` raised
by it."""


@dataclass(frozen=True)
class Cell:
    """Cell that ran to its end."""

    code: str
    calls: Sequence[tuple[str, dict[str, Any], dict[str, Any]]] = ()
    """Name, arguments and answer of each of its calls."""


@dataclass(frozen=True)
class CellOutput:
    """Outcome of a cell."""

    text: str
    """Output, error and the reason why the cell was ended."""
    well: bool
    """True if it ran to its end without an error."""
    kept: bool
    """True if it ran to its end, so that later cells can use its variables."""
    unreadable: bool = False
    """True if it is not valid Python, so that none of it ran."""
    lost: bool = False
    """True if it did not run, because an earlier cell made other calls in the replay."""
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)


def play(
    sandbox: Sandbox,
    earlier: Sequence[Cell],
    code: str,
    stop: threading.Event | None = None,
    *,
    tools: Mapping[str, tuple[str, Sequence[str]]] | None = None,
    call: Call | None = None,
) -> CellOutput:
    """Run a cell after replaying the earlier ones. tools: name and parameters of each tool, by function name. call:
    executes tool calls, in a thread of its own.

    The driver reports two states over the call socket: whether the cell compiles, sent before any code of the agent
    runs, and then how it ended. Code can fake the second one, but gains nothing that ending in that state would not
    give it. Printed text counts as output only."""
    replay = [[cell.code, list(cell.calls)] for cell in earlier]
    stdin = json.dumps({"earlier": replay, "cell": code, "tools": tools or {}})
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    states: list[str] = []
    limits = sandbox.limits

    def answer(line: bytes) -> bytes:
        if len(states) < 2 and (state := _STATES[len(states)].get(line)):
            states.append(state)
            return b"true"
        request = _read(line) if states else None
        if request is None or call is None:
            return b'{"error": "this is no call of a tool"}'
        if len(calls) == limits.calls:
            return b'{"error": "too many calls"}'  # the next line ends the program
        reply = call(*request)
        calls.append((*request, reply))
        return json.dumps(reply).encode()

    result = Sandbox(replace(limits, calls=limits.calls + len(_STATES))).python(
        _DRIVER, stdin=stdin, stop=stop, answer=answer
    )
    outcome = "" if result.killed or not states else states[-1]
    completed = outcome in ("failed", "well", "unreadable")
    output = "" if outcome == "lost" else result.stdout
    parts = [part.rstrip("\n") for part in (output, result.stderr) if part.strip("\n")]
    if result.killed:
        parts.append(f"[the code was ended: {_WHY[result.killed].format(**vars(limits))}]")
    elif outcome == "lost":
        parts = ["[the code was not run: carried out again, earlier code called other tools. All variables are lost]"]
    elif not completed:
        parts.append(f"[the code ended the interpreter, with exit code {result.exit_code}]")
    text = "\n".join(parts) or "[no output]"
    return CellOutput(text, outcome == "well", completed, outcome == "unreadable", outcome == "lost", calls)


def _read(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call; None if it is invalid or cannot be stored as JSON."""
    try:
        name, arguments = json.loads(line)
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()  # no lone surrogates, no NaN
    except (ValueError, TypeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
