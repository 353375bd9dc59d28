"""The speed of the embedded engine, in docs/guides/rollouts.md.

python tests/benchmarks/generation.py --json --vllm-python PYTHON | python -m docs.generation add
python -m docs.generation                                                        write the table
"""

from __future__ import annotations

import sys
from typing import Any

from docs.recorded import Known, Recorded

SIDES = (
    ("shared", "shared prefix read once", None),
    ("apart", "each row by itself", "ratio_vs_before"),
    ("transformers", "`generate` of transformers", "ratio_vs_transformers"),
    ("vllm", "vLLM, CPU build, without compilation", "ratio_vs_vllm"),
    ("products", "all matrix products of a step, by torch alone", "fraction_of_bound"),
    ("linear", "those of linear layers and head", "fraction_of_linear"),
)


def _rows(known: Known) -> list[list[str]]:
    return [
        _row(text, known[f"{side}_ms"], known.get(ratio or "", 1.0))
        for side, text, ratio in SIDES
        if f"{side}_ms" in known
    ]


def _row(text: str, milliseconds: float, ratio: Any) -> list[str]:
    return [text, f"{milliseconds:.0f} ms", f"{ratio:.2f}"]


TABLE = Recorded(
    "guides/rollouts.md",
    "generation",
    "generation.json",
    ["Step of 64 rows", "CPU time of a step", "Times the first row"],
    _rows,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
