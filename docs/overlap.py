"""Rounds per hour by `collect.overlap` and by `collect.partial`, in docs/guides/asynchrony.md.

python -m tests.benchmarks.overlap --overlaps 0 1 2 4 --rounds 10 --seconds 5 --ratio 4 --json | python -m docs.overlap add
python -m tests.benchmarks.overlap --tail 10 --rounds 8 --seconds 2 --json | python -m docs.overlap add
python -m docs.overlap                                                           write the tables
"""  # noqa: E501  a command

from __future__ import annotations

import json
import sys

from docs.recorded import Known, Recorded


def _rows(known: Known) -> list[list[str]]:
    return [
        [
            str(measured["overlap"]),
            f"{measured['rounds_per_hour']:,.0f}",
            f"{measured['speedup']:.2f}",
            f"{measured['collect_seconds']:.1f} s",
            f"{measured['train_seconds']:.1f} s",
        ]
        for measured in known.get("measured", [])
    ]


def _tail_rows(known: Known) -> list[list[str]]:
    return [
        [
            str(measured["overlap"]),
            f"`{json.dumps(measured['partial']).replace(chr(34), '')}`",
            f"{measured['rounds_per_hour']:,.0f}",
            f"{measured['groups_per_hour']:,.0f}",
            f"{measured['speedup']:.2f}",
            f"{measured['mean_age']:.2f}",
            str(measured["largest_age"]),
        ]
        for measured in known.get("tail", {}).get("measured", [])
    ]


TABLE = Recorded(
    "guides/asynchrony.md",
    "overlap",
    "overlap.json",
    ["`collect.overlap`", "Rounds per hour", "Speedup", "Time of a collection", "Time of a training"],
    _rows,
)

TAIL = Recorded(
    "guides/asynchrony.md",
    "tail",
    "overlap.json",
    [
        "`collect.overlap`",
        "`collect.partial`",
        "Rounds per hour",
        "Groups per hour",
        "Speedup",
        "Age of a token, mean",
        "Largest",
    ],
    _tail_rows,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
    TAIL.main([])
