"""How long the command takes to answer: help, a mistake, the composed config, a run of which every stage is cached; and
until the first stage of a new run starts.

    python tests/benchmarks/startup.py [--json] [--repeat 5]

The best of several starts of a new process, in seconds, beside that of an interpreter that does nothing. The runs are
those of `+experiment=smoke` (12 stages).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
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


def runs(repeat: int) -> dict[str, float]:
    """Return the seconds of runs whose stages are all cached, and until the first stage of a new run starts."""
    with tempfile.TemporaryDirectory() as folder:
        first = min(first_stage(Path(folder) / str(index)) for index in range(repeat))
        command = [*COMMAND, "+experiment=smoke", f"root={folder}/0"]
        seconds(command, 0)
        return {"cached_run": min(seconds(command, 0) for _ in range(repeat)), "first_stage": first}


def first_stage(root: Path) -> float:
    """Return the seconds from the start of a new run until its first stage makes its folder in the store."""
    start = time.perf_counter()
    command = [sys.executable, *COMMAND, "+experiment=smoke", f"root={root}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not any((root / "artifacts" / ".scratch").glob("*")):
            if process.poll() is not None:
                sys.exit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.01)
        elapsed = time.perf_counter() - start
        process.terminate()
        process.communicate()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    best = {name: round(min(seconds(*case) for _ in range(arguments.repeat)), 3) for name, case in CASES.items()}
    best |= {name: round(value, 3) for name, value in runs(arguments.repeat).items()}
    if arguments.json:
        print(json.dumps({f"{name}_seconds": value for name, value in best.items()}))
    else:
        for name, value in best.items():
            print(f"{name:10} {value:6.3f} s")


if __name__ == "__main__":
    main()
