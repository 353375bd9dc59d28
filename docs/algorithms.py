"""Tables of the algorithms, in docs/reference/algorithms.md.

python -m docs.algorithms     write the tables

Names and formulas come from the files in conf/algorithm: the formula is the line of the opening comment that begins
with `loss =` or `A =`. Papers are those that the docstring of the spec cites. Settings are those of the composed
configuration.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from docs.generated import Generated, one_line, table
from flows.advice.needs import algorithm_needs, passes
from flows.experiment.compose import compose
from flows.experiment.config_loader import CONF
from flows.terminal.help import describe
from tests.test_configs import needed

FORMULA = re.compile(r"^# ((?:loss|A) = .+)$", re.MULTILINE)
PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
SETTINGS = ("baseline", "scale", "ratio", "objective", "normalization")
"""Keys by which the variants of GRPO differ."""


def files() -> list[Path]:
    """Return the files of the algorithms."""
    return sorted((CONF / "algorithm").glob("*.yaml"))


def spec(path: Path) -> Any:
    """Return the composed spec of an algorithm."""
    return compose([f"algorithm={path.stem}", *needed("algorithm", path.stem)]).algorithm


def overview() -> str:
    """Return the table of all algorithms: name, purpose, formula, paper."""
    rows = []
    for path in files():
        formula = FORMULA.search(path.read_text(encoding="utf-8"))
        assert formula, f"{path}: expected a comment line '# loss = FORMULA' below the first line"
        papers = dict.fromkeys(PAPER.findall(one_line(inspect.getdoc(type(spec(path))))))
        links = ", ".join(f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        rows.append([f"`{path.stem}`", describe(path), f"`{formula[1]}`", links])
    return table(["`algorithm=`", "Purpose", "Formula", "Paper"], rows)


def variants() -> str:
    """Return the table of the policy gradients without a critic: the settings by which they differ."""
    rows = []
    for path in files():
        algorithm = spec(path)
        if not all(hasattr(algorithm, name) for name in SETTINGS):
            continue
        kl = f"`{algorithm.kl_in}`" if algorithm.kl_coefficient else "none"
        clip = f"{algorithm.clip_low:g}, {algorithm.clip_high:g}"
        rows.append([f"`{path.stem}`", *(f"`{getattr(algorithm, name)}`" for name in SETTINGS), clip, kl])
    heads = ["`algorithm=`", *(f"`{name}`" for name in SETTINGS), "`clip_low`, `clip_high`", "KL (`kl_in`)"]
    return table(heads, rows)


def needs() -> str:
    """Return the table of what each algorithm needs besides the policy, and of its passes over each trained token."""
    algorithms = {path.stem: spec(path) for path in files()}
    rows = []
    for name, algorithm in algorithms.items():
        needed = ["yes" if value else "" for value in algorithm_needs(algorithm).values()]
        rows.append([f"`{name}`", *needed, *map(str, passes(algorithm))])
    heads = ["`algorithm=`", *algorithm_needs(algorithms["grpo"]), "passes forward and backward", "passes forward only"]
    return table(heads, rows)


PAGES = [
    Generated("reference/algorithms.md", "algorithms", overview),
    Generated("reference/algorithms.md", "variants", variants),
    Generated("reference/algorithms.md", "needs", needs),
]

if __name__ == "__main__":
    for part in PAGES:
        part.write()
