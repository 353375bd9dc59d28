"""Sizes of the code base: files that hold one concept, functions with few parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.source import MODULES, ROOT, parsed

MOST_LINES = 400
ONE_TEXT = {"components/sandbox/remote.py"}
"""Files that another program receives as one text."""
MOST_PARAMETERS = 8


def test_no_file_is_longer_than_one_concept_needs():
    assert len(MODULES) > 400
    files = [*MODULES, *(ROOT / "flows").rglob("*.js"), *(ROOT / "components").rglob("*.js")]
    long = {path.relative_to(ROOT).as_posix() for path in files if len(path.read_text().splitlines()) > MOST_LINES}
    assert long == ONE_TEXT


def test_only_specs_have_many_parameters():
    """The parameters of a class with a registered name are keys of a configuration."""
    functions = [function for path in MODULES for function in undeclared(parsed(path))]
    assert len(functions) > 3000
    assert [function.name for function in functions if parameters(function) > MOST_PARAMETERS] == []


def undeclared(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module, without the constructors of registered classes."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue  # an expression holds no statement
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        if isinstance(node, ast.ClassDef) and any("registered" in ast.unparse(name) for name in node.decorator_list):
            for method in node.body:
                if getattr(method, "name", None) != "__init__":
                    yield from undeclared(ast.Module([method], []))
        else:
            yield from undeclared(node)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters, without `self` and `cls`."""
    arguments = function.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return len(named) + len(rest) - (named[:1] in (["self"], ["cls"]))
