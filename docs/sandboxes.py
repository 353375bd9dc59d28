"""Time and memory of many sandboxes at once, in docs/reference/environments/code.md.

python -m tests.benchmarks.sandboxes --json | python -m docs.sandboxes add       keep the results
python -m docs.sandboxes                                                         write the table
"""

from __future__ import annotations

import sys

from docs.recorded import Known, Recorded


def _rows(known: Known) -> list[list[str]]:
    return [
        [
            count,
            f"{measured['seconds']:.1f} s",
            f"{measured['processes']:.0f}",
            f"{measured['mb']:.1f} MB",
            f"{measured['mb'] * int(count):,.0f} MB",
            f"{measured['gone_seconds']:.1f} s",
            "; ".join(measured["left"]) or "nothing",
        ]
        for count, measured in sorted(known.items(), key=lambda item: int(item[0]))
    ]


TABLE = Recorded(
    "reference/environments/code.md",
    "sandboxes",
    "sandboxes.json",
    [
        "Sandboxes at once",
        "64 test runs of `repair`",
        "Processes of a sandbox",
        "Memory of a sandbox",
        "Memory of all",
        "All ended after `kill -9`",
        "Left after it",
    ],
    _rows,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
