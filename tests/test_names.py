"""Names of the code base: a public class name stands for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_public_class_has_a_name_of_its_own():
    modules: dict[str, list[str]] = defaultdict(list)
    for package in ("components", "flows"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(modules) > 500
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
