"""Python cells in the sandbox, as in a notebook: a cell sees the variables of the ones before it.

No interpreter waits between two cells. Each run starts afresh, carries out the earlier cells without showing what they
print, and then the new one; so an episode can be saved and gone on with elsewhere, holds no process while the model
thinks, and loses nothing when a cell has to be killed: that cell is dropped. The price is that the time of the earlier
cells counts again, and what they read from the clock differs. Chance is seeded.

The value of an expression that ends a cell is shown, as Python's prompt does.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass

from components.sandbox import Sandbox

# Runs in the sandbox and nowhere else: here it is only text.
_DRIVER = r"""
import ast, json, linecache, os, random, sys, traceback
given = json.load(sys.stdin)
names = {"__name__": "__main__"}
random.seed(0)

def play(code, number):
    place = f"<cell {number}>"
    sys.stdin = open(os.devnull)  # exit() closes it
    linecache.cache[place] = len(code), None, code.splitlines(True), place
    try:
        tree = ast.parse(code, place)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, place, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), place, "eval"), names)
            if value is not None:
                print(repr(value))
        return True
    except SystemExit:
        return True
    except BaseException as error:
        frames = error.__traceback__.tb_next
        print("".join(traceback.format_exception(type(error), error, frames, limit=-6)), end="", file=sys.stderr)
        return False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

shown = os.dup(1), os.dup(2)
quiet = os.open("/dev/null", os.O_WRONLY)
os.dup2(quiet, 1), os.dup2(quiet, 2)
for number, cell in enumerate(given["earlier"], 1):
    play(cell, number)
os.dup2(shown[0], 1), os.dup2(shown[1], 2)
well = play(given["cell"], len(given["earlier"]) + 1)
print(given["ended"] + str(int(well)), end="", flush=True)
os._exit(0)
"""
_WHY = {
    "time": "it took longer than {seconds:g} s",
    "memory": "it used more than {memory_mb} MB of memory",
    "files": "it created more than {files} files",
    "output": "it printed without end",
    "stopped": "the episode was stopped",
}


@dataclass(frozen=True)
class Shown:
    """What a cell came to."""

    text: str
    """Its output, and what went wrong."""
    well: bool
    """Whether it ran to its end without an error."""
    kept: bool
    """Whether it ran to its end, so that later cells can build on it."""


def play(sandbox: Sandbox, earlier: list[str], cell: str, stop: threading.Event | None = None) -> Shown:
    """Runs a cell after the earlier ones."""
    # Cells cannot know this beforehand, so a cell that ends the interpreter is told from one that ran to its end.
    ended = hashlib.sha256("\0".join([*earlier, cell]).encode(errors="surrogatepass")).hexdigest()[:16]
    given = json.dumps({"earlier": earlier, "cell": cell, "ended": ended})
    result = sandbox.python(_DRIVER, stdin=given, stop=stop)
    output, _, well = result.stdout.rpartition(ended)
    kept = well in ("0", "1") and not result.killed
    if not kept:
        output = result.stdout
    parts = [part.rstrip("\n") for part in (output, result.stderr) if part.strip("\n")]
    if result.killed:
        parts.append(f"[the code was ended: {_WHY[result.killed].format(**vars(sandbox.limits))}]")
    elif not kept:
        parts.append(f"[the code ended the interpreter, with exit code {result.exit_code}]")
    return Shown("\n".join(parts) or "[no output]", kept and well == "1", kept)
