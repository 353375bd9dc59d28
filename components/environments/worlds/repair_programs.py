"""Small Python packages with planted faults, generated from a seed.

A function is assembled from parts: lines of code, their words in the docstring, and the same lines with a fault. Its
structure is its code without names and numbers. A structure belongs to one split, by its digest, so held-out functions
differ from those of training in more than names and numbers.

A case is an expression and its value. The cases of a program come from running the correct and the faulty functions,
which is trusted code: every fault fails at least one visible and two hidden cases.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Fault = Literal["operator", "off_by_one", "branch", "missing_case"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
"""Another operator, a bound or number that is one off, the wrong branch, a case that is not treated."""
Level = Literal[1, 2, 3]
LEVELS: tuple[Level, ...] = get_args(Level)
TESTS = "tests.py"
_SUMMARY = "shop/summary.py"
_CALLS = 40
"""Calls of each function from which its tests are drawn."""
_ITEMS = ("age", "bid", "cost", "debt", "fee", "grade", "length", "mark", "price", "rate", "score", "size", "speed",
           "step", "term", "weight")  # fmt: skip


@dataclass(frozen=True)
class Lines:
    """Lines of a function."""

    text: str
    doc: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Lines with a fault, by its kind; empty if the lines are missing."""
    parameters: tuple[str, ...] = ()


_LOOPS = (
    Lines("for {item} in {items}:", "the {items}", {}, ("{items}",)),
    Lines("for {item} in {items}[{k}:]:", "the {items} after the first {k}",
         {"off_by_one": "for {item} in {items}[{k} - 1:]:"}, ("{items}",)),
    Lines("for {item} in {items}[:{k}]:", "the first {k} {items}",
         {"off_by_one": "for {item} in {items}[:{k} - 1]:", "branch": "for {item} in {items}[{k}:]:"}, ("{items}",)),
    Lines("for {item} in {items}[:-1]:", "the {items} before the last",
         {"off_by_one": "for {item} in {items}[:-2]:", "branch": "for {item} in {items}[1:]:"}, ("{items}",)),
    Lines("for {item} in range(start, stop + 1):", "the numbers from start to stop, both included,",
         {"off_by_one": "for {item} in range(start, stop):"}, ("start", "stop")),
    Lines("for {item} in range(start, stop):", "the numbers from start to stop, without stop,",
         {"off_by_one": "for {item} in range(start, stop + 1):"}, ("start", "stop")),
)  # fmt: skip
_CONDITIONS = (
    Lines("{item} > limit", "are above limit", {"operator": "{item} >= limit", "branch": "{item} < limit"}, ("limit",)),
    Lines("{item} >= limit", "are at least limit", {"operator": "{item} > limit", "branch": "{item} <= limit"},
         ("limit",)),
    Lines("{item} < limit", "are below limit", {"operator": "{item} <= limit", "branch": "{item} > limit"}, ("limit",)),
    Lines("{item} <= limit", "are at most limit", {"operator": "{item} < limit", "off_by_one": "{item} <= limit + 1"},
         ("limit",)),
    Lines("{item} != limit", "differ from limit", {"operator": "{item} == limit"}, ("limit",)),
    Lines("{item} % {m} == 0", "are multiples of {m}",
         {"operator": "{item} // {m} == 0", "off_by_one": "{item} % {m} == 1", "branch": "{item} % {m} != 0"}),
    Lines("{item} % 2 == 1", "are odd", {"operator": "{item} // 2 == 1", "branch": "{item} % 2 == 0"}),
    Lines("low <= {item} <= high", "are from low to high, both included",
         {"operator": "low < {item} <= high", "off_by_one": "low <= {item} <= high - 1"}, ("low", "high")),
    Lines("low < {item} < high", "are above low and below high", {"operator": "low < {item} <= high"}, ("low", "high")),
)  # fmt: skip
_MEASURES = {
    "count": Lines("result += 1", "the number of", {"operator": "result -= 1", "off_by_one": "result += 2"}),
    "sum": Lines(
        "result += {item}", "the sum of", {"operator": "result -= {item}", "off_by_one": "result += {item} + 1"}
    ),
    "scale": Lines("result += {m} * {item}", "{m} times the sum of", {"operator": "result += {m} + {item}"}),
    "square": Lines(
        "result += {item} * {item}", "the sum of the squares of", {"operator": "result += {item} + {item}"}
    ),
    "largest": Lines("result = max(result, {item})", "the largest of", {"operator": "result = min(result, {item})"}),
}
_OTHERWISE = Lines("result -= 1", ", minus 1 for each of the others")
_GUARDS = (
    Lines("if not {items}:\n    return -1", "; -1 without {items}", {"missing_case": ""}, ("{items}",)),
    Lines("if len({items}) < {k}:\n    return -1", "; -1 with fewer than {k} {items}",
         {"missing_case": "", "operator": "if len({items}) <= {k}:\n    return -1"}, ("{items}",)),
    Lines("if stop < start:\n    return -1", "; -1 if stop is below start",
         {"missing_case": "", "operator": "if stop <= start:\n    return -1"}, ("start", "stop")),
)  # fmt: skip
_ENDS = (
    Lines("return result"),
    Lines("return result + {m}", ", plus {m}", {"operator": "return result - {m}"}),
    Lines("return result // {m}", ", divided by {m} and rounded down", {"operator": "return result % {m}"}),
    Lines("if result > {cap}:\n    return {cap}\nreturn result", ", but at most {cap}",
         {"missing_case": "return result", "branch": "if result < {cap}:\n    return {cap}\nreturn result"}),
)  # fmt: skip


@dataclass(frozen=True)
class DrawnFunction:
    """Generated function."""

    path: str
    name: str
    parameters: tuple[str, ...]
    source: str
    faulty: dict[str, list[str]] = field(default_factory=dict)
    """Sources with a fault, by its kind."""


def split_of(structure: str) -> str:
    """Return the split of a structure: a quarter of them is held out."""
    return "train" if hashlib.sha256(structure.encode()).digest()[0] % 4 else "heldout"


def draw_function(rng: random.Random, path: str, item: str, split: str, kind: str | None) -> DrawnFunction:
    """Draw a function over values that are called `item`, whose structure is of a split. kind: a fault that it must be
    able to have."""
    while True:
        loop, condition, (verb, measure) = rng.choice(_LOOPS), rng.choice(_CONDITIONS), rng.choice([*_MEASURES.items()])
        guard = rng.choice([Lines(""), *(guard for guard in _GUARDS if guard.parameters == loop.parameters)])
        end, otherwise = rng.choice(_ENDS), verb != "largest" and rng.random() < 0.3
        test = Lines(f"if {condition.text}:", faults={name: f"if {text}:" for name, text in condition.faults.items()})
        parts = [(4, guard), (4, Lines("result = 0")), (4, loop), (8, test)]
        parts += [(8, _with_else(measure))] if otherwise else [(12, measure)]
        parts.append((4, end))
        parameters = (*loop.parameters, *condition.parameters)
        doc = f"{measure.doc} {loop.doc} that {condition.doc}{', minus 1 for each of the others' * otherwise}"
        top = f'def {verb}_{{items}}({", ".join(parameters)}):\n    """Return {doc}{end.doc}{guard.doc}."""'
        structure = _code(top, parts)
        faulty = [(name, _code(top, parts, part, text)) for _, part in parts for name, text in part.faults.items()]
        if split_of(structure) == split and (kind is None or kind in dict(faulty)):
            break
    names = {"item": item, "items": f"{item}s", "k": rng.randrange(2, 4), "m": rng.randrange(2, 6)}
    names["cap"] = rng.randrange(5, 15)
    filled: dict[str, list[str]] = {}
    for name, text in faulty:
        filled.setdefault(name, []).append(text.format(**names))
    arguments = tuple(parameter.format(**names) for parameter in parameters)
    return DrawnFunction(path, f"{verb}_{item}s", arguments, structure.format(**names), filled)


def _with_else(measure: Lines) -> Lines:
    """Return the lines after a test that has an else."""
    measured, other = f"    {measure.text}", "    result -= 1"
    return Lines(
        f"{measured}\nelse:\n{other}", faults={"branch": f"{other}\nelse:\n{measured}", "missing_case": measured}
    )


def _code(top: str, parts: Sequence[tuple[int, Lines]], replaced: Lines | None = None, text: str = "") -> str:
    """Return the code of a function, with other lines for one part."""
    code = [(indent, text if part is replaced else part.text) for indent, part in parts]
    return "\n".join([top, *(" " * indent + line for indent, lines in code for line in lines.split("\n") if line)])


def draw_task(rng: random.Random, level: int, split: str, faults: Sequence[Fault]) -> tuple[str, dict[str, Any]]:
    """Draw a task: its type, and its input. level: 1 one function, 2 two modules of two functions each, 3 such modules
    behind a third one, with two faults. faults: kinds to draw from."""
    while (task := _draw(rng, level, split, faults)) is None:
        pass
    return task


def _draw(rng: random.Random, level: int, split: str, faults: Sequence[Fault]) -> tuple[str, dict[str, Any]] | None:
    """Return a task; None if two functions have the same name, or a fault shows too rarely."""
    items = rng.sample(_ITEMS, 1 if level == 1 else 2)
    places = [(f"{'shop/' * (level > 1)}{item}s.py", item) for item in items for _ in range(1 if level == 1 else 2)]
    kinds = dict(zip(rng.sample(range(len(places)), 2 if level == 3 else 1), rng.choices(faults, k=2), strict=False))
    functions = [draw_function(rng, *place, split, kinds.get(index)) for index, place in enumerate(places)]
    if len({function.name for function in functions}) < len(functions):
        return None
    planted = {index: rng.choice(functions[index].faulty[kind]) for index, kind in kinds.items()}
    functions += [_summary(functions)] if level == 3 else []
    targets = functions[-1:] if level == 3 else functions
    sources = [function.source for function in functions]
    expected = _values(sources, [_call(rng, target) for target in targets for _ in range(_CALLS)])
    visible: list[str] = []
    hidden: list[str] = []
    for index, source in planted.items():
        values = _values([*sources[:index], source, *sources[index + 1 :]], expected)
        failing = [call for call in expected if values[call] != expected[call] and call not in visible]
        if len(failing) < 3:
            return None
        visible, hidden = [*visible, failing[0]], [*hidden, *failing[1:4]]
    for target in targets:
        others = [call for call in expected if call.startswith(f"{target.name}(") and call not in (*visible, *hidden)]
        visible, hidden = [*visible, *others[: 2 if level == 1 else 1]], [*hidden, *others[2:6]]
    faulty = [planted.get(index, source) for index, source in enumerate(sources)]
    value, right = _values(faulty, visible[:1])[visible[0]], expected[visible[0]]
    if value == right:  # one fault hides the other
        return None
    files, repaired = _files(functions, faulty), _files(functions, sources)
    happens = "raises" if isinstance(value, str) else "returns"
    asserts = [f"assert {call} == {expected[call]}\n" for call in visible]
    task = {
        "issue": f"{places[0][0] if level == 1 else 'shop'}: {visible[0]} {happens} {value}; it should return {right}.",
        "files": files | {TESTS: f"{_imports(targets)}\n\n{''.join(asserts)}"},
        "visible": {call: expected[call] for call in visible},
        "hidden": {call: expected[call] for call in hidden},
        "solution": _solution(files, repaired, [functions[index] for index in planted]),
    }
    return "several" if level == 3 else next(iter(kinds.values())), task


def _summary(functions: Sequence[DrawnFunction]) -> DrawnFunction:
    """Return a function that calls all others."""
    parameters = tuple(dict.fromkeys(parameter for function in functions for parameter in function.parameters))
    calls = ", ".join(f"{function.name}({', '.join(function.parameters)})" for function in functions)
    source = f'def summary({", ".join(parameters)}):\n    """Return all results as a list."""\n    return [{calls}]'
    return DrawnFunction(_SUMMARY, "summary", parameters, source)


def _call(rng: random.Random, function: DrawnFunction) -> str:
    """Draw a call of a function. Numbers are small, so that they often meet a bound."""
    ranges = {"limit": (2, 11), "low": (1, 6), "high": (6, 11), "start": (0, 6), "stop": (3, 13)}
    values = (
        rng.randrange(*ranges[name]) if name in ranges else rng.choices(range(13), k=rng.randrange(6))
        for name in function.parameters
    )
    return f"{function.name}({', '.join(map(str, values))})"


def _values(sources: Sequence[str], calls: Iterable[str]) -> dict[str, Any]:
    """Return the values of calls; the name of the exception of one that raises."""
    names: dict[str, Any] = {}
    exec("\n".join(sources), names)
    values: dict[str, Any] = {}
    for call in calls:
        try:
            values[call] = eval(call, names)
        except ArithmeticError as error:
            values[call] = type(error).__name__
    return values


def _imports(functions: Sequence[DrawnFunction]) -> str:
    modules = [function.path.removesuffix(".py").replace("/", ".") for function in functions]
    return "\n".join(f"from {module} import {at.name}" for module, at in zip(modules, functions, strict=True))


def _files(functions: Sequence[DrawnFunction], sources: Sequence[str]) -> dict[str, str]:
    """Return the modules of a program by path."""
    texts: dict[str, list[str]] = {}
    for function, source in zip(functions, sources, strict=True):
        imports = [_imports(functions[:-1])] if function.path == _SUMMARY else []
        texts.setdefault(function.path, imports).append(source)
    return {path: "\n\n\n".join(parts) + "\n" for path, parts in sorted(texts.items())}


def _solution(files: dict[str, str], repaired: dict[str, str], faulty: Sequence[DrawnFunction]) -> list[list[Any]]:
    """Return the calls that repair a program: tool and arguments."""
    calls: list[list[Any]] = []
    if _SUMMARY in files:
        calls.append(["read", {"path": _SUMMARY}])
    elif len(files) > 1:
        calls.append(["search", {"text": f"def {faulty[0].name}"}])
    for path in dict.fromkeys(function.path for function in faulty):
        calls.append(["read", {"path": path}])
        text, blocks = files[path], zip(*(version[path].split("\n\n\n") for version in (files, repaired)), strict=True)
        for before, after in [pair for pair in blocks if pair[0] != pair[1]]:
            edit = _edit(text, before.split("\n"), after.split("\n"))
            calls.append(["edit", {"path": path, **edit}])
            text = text.replace(edit["old"], edit["new"])
    return [*calls, ["test", {}]]


def _edit(text: str, old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Return the shortest replacement of lines, unique in the text, that turns one function into the other."""
    top = next(index for index, lines in enumerate(zip(old, new, strict=False)) if lines[0] != lines[1])
    end = next(index for index, lines in enumerate(zip(old[::-1], new[::-1], strict=False)) if lines[0] != lines[1])
    windows = [
        ["\n".join(lines[first : len(lines) - last]) for lines in (old, new)]
        for first in range(top + 1)
        for last in range(min(end, len(old) - top, len(new) - top) + 1)
    ]
    aligned = [[part.lstrip() for part in window] for window in windows if len({*map(_indent, window)}) == 1]
    replaced, by = min((window for window in aligned if text.count(window[0]) == 1), key=lambda window: len(window[0]))
    return {"old": replaced, "new": by}


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
