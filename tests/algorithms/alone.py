"""Training in a fresh process, as `python -m tests.algorithms.alone BASE FOLDER`, with a report of its side effects.

For each algorithm, runs the second round of tests.algorithms.test_checkpoint, from FOLDER/<algorithm>/first to
FOLDER/<algorithm>/alone. The last line on stderr is JSON: hosts that were resolved or connected to, files opened for
writing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HOSTS: list[str] = []
WRITTEN: list[str] = []


def note(event: str, arguments: tuple) -> None:
    if event in ("socket.getaddrinfo", "socket.connect"):
        HOSTS.append(str(arguments))
    elif event == "open" and isinstance(arguments[0], str) and set(str(arguments[1])) & set("wax+"):
        WRITTEN.append(arguments[0])


def main(base_dir: Path, folder: Path) -> None:
    sys.addaudithook(note)
    from tests.algorithms.test_checkpoint import ROUNDS, one_round

    for name in ROUNDS:
        one_round(base_dir, name, folder / name / "first", folder / name / "alone", warm=None)
    print(json.dumps({"hosts": HOSTS, "written": WRITTEN}), file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
