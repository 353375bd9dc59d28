"""How long the command takes to answer: help, a mistake, the composed config.

    python tests/benchmarks/startup.py [--json] [--repeat 5]

The best of several starts of a new process, in seconds, beside that of an interpreter that does nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = ["-m", "flows.run"]
MISTAKES = ["+experiment=quikstart", "model=tinny", "algoritm.learning_rate=1", "algorithm.learning_rate=fast"]
CASES = {
    "python": (["-c", "pass"], 0),
    "help": ([*COMMAND, "--help"], 0),
    "mistakes": ([*COMMAND, *MISTAKES], 2),
    "cfg": ([*COMMAND, "+experiment=quickstart", "--cfg", "job"], 0),
}
"""Arguments of the interpreter, and the exit code that they must give."""


def seconds(arguments: list[str], code: int) -> float:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, timeout=60)
    elapsed = time.perf_counter() - start
    if done.returncode != code:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}, not {code}:\n{done.stderr.decode()}")
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    best = {name: round(min(seconds(*case) for _ in range(arguments.repeat)), 3) for name, case in CASES.items()}
    if arguments.json:
        print(json.dumps({f"{name}_seconds": value for name, value in best.items()}))
    else:
        for name, value in best.items():
            print(f"{name:10} {value:6.3f} s")


if __name__ == "__main__":
    main()
