"""Names of the code base: a public class name stands for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.source import MODULES, ROOT, parsed


def test_every_public_class_has_a_name_of_its_own():
    modules: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(modules) > 500
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


EMPTY_NAMES = {"one", "found", "told", "kept", "said", "seen", "made", "given", "rest", "how", "each", "what"}
"""Words that name nothing."""
STORED = {
    ("components/trajectories/schema.py", "kept"),  # column of stored selections
    ("components/rewards/composition/combined.py", "how"),  # key of the configuration
    ("components/pages/comparison.py", "rest"),  # key of the JSON output of flows.compare
    ("components/pages/report.py", "kept"),  # the report's figures of a selection
    ("components/sandbox/cells.py", "kept"),
    ("components/sandbox/remote.py", "given"),
}
"""Names that stored data, configuration or protocols share."""


def test_no_name_is_an_empty_word():
    names = set()
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                    pass
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    pass
                case _:
                    continue
            if name in EMPTY_NAMES:
                names.add((path.relative_to(ROOT).as_posix(), name))
    assert names - STORED == set()


def test_no_docstring_begins_with_a_question_word():
    """Docstrings of tools are descriptions that a model reads; they keep their words."""
    question = re.compile(r"\s*(What|Of|How|Whether|Who|Where|Why|Which|When|Told|That)\b")
    found = []
    for path in MODULES:
        tree = parsed(path)
        tools = {
            id(node.body[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(item) == "tool" for item in node.decorator_list)
        }
        for node in ast.walk(tree):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and id(node) not in tools and question.match(text):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
