"""Rounds per hour by `collect.overlap`, in docs/guides/asynchrony.md.

python -m tests.benchmarks.overlap --overlaps 0 1 2 4 --rounds 10 --seconds 5 --ratio 4 --json | python -m docs.overlap add
python -m docs.overlap                                                           write the table
"""  # noqa: E501  a command

from __future__ import annotations

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


TABLE = Recorded(
    "guides/asynchrony.md",
    "overlap",
    "overlap.json",
    ["`collect.overlap`", "Rounds per hour", "Speedup", "Time of a collection", "Time of a training"],
    _rows,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
