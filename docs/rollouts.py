"""What waiting episodes cost, in docs/guides/rollouts.md.

python tests/benchmarks/rollouts.py --json --art PYTHON --verifiers PYTHON | python -m docs.rollouts add
python -m docs.rollouts                                                          write the table
"""

from __future__ import annotations

import sys
from typing import Any

from docs.recorded import Known, Recorded


def _rows(known: Known) -> list[list[str]]:
    return [_row(name, known[name]) for name in sorted(filter(str.isdecimal, known), key=int)]


def _row(name: str, one: dict[str, Any]) -> list[str]:
    ratios = [f"{one[key]:.1f}" if key in one else "–" for key in ("cpu_ratio_vs_art", "cpu_ratio_vs_verifiers")]
    return [
        f"{int(name):,}",
        f"{one['wall_over_ideal']:.2f}",
        f"{one['cpu_ms_per_call']:.2f} ms",
        *ratios,
        f"{one['kb_per_episode']:.0f} kB",
    ]


TABLE = Recorded(
    "guides/rollouts.md",
    "rollouts",
    "rollouts.json",
    [
        "Episodes at once",
        "Wall-clock time over ideal",
        "CPU time of a request",
        "openpipe-art's, times ours",
        "verifiers', times ours",
        "Memory of an episode",
    ],
    _rows,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
