"""Every regular expression of the project on adversarial text: none takes longer than linear time.

Patterns are found in the syntax trees of all modules, so a new one is tested without being listed. One that is put
together from local names needs an entry in SAMPLES.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.data.spec import DataSpec
from components.environments.service import airline, retail
from components.inference.vllm.start_errors import REMEDIES
from tests.pumping import texts
from tests.source import MODULES, parsed

pytestmark = pytest.mark.security

ROOT = Path(__file__).parents[1]
METHODS = ("search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer")
SMALL = [*range(22, 40, 2), *(round(40 * 1.15**n) for n in range(1, 24))]
SIZE = 10_000
LARGE = 100_000

SAMPLES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("components.environments.service.customer", "f'{before}{re.escape(words)}{after}'"): [
        {"before": r"(?<!\w)(?<!\d[.:])(?<!\w-)", "words": "45", "after": r"(?!\w)(?!\.\d*[1-9]|[:-]\d)"},
        {"before": r"(?<!\w)", "words": "a red lamp", "after": r"(?!\w)"},
    ],
    ("components.environments.service.customer", "f'\\\\b({words})\\\\b'"): [
        {"words": words} for desk in (airline.Airline, retail.Retail) for words in desk.topics.values()
    ],
    ("components.environments.worlds.shop", "f'\\\\b{re.escape(words)}\\\\b'"): [{"words": "15 days"}],
    ("components.rewards.rules.accuracy", "f'\\\\W*({letter})\\\\W*'"): [{"letter": "[ABCDEabcde]"}],
    ("components.rewards.rules.accuracy", "marked"): [{"letter": "[ABCDEabcde]"}],
    ("components.rewards.rules.followed", "f'(?<!\\\\w){re.escape(written.strip())}(?!\\\\w)'"): [{"written": "5"}],
    ("components.inference.vllm.start_errors", "pattern"): [{"pattern": pattern} for pattern, _ in REMEDIES],
    **{
        (f"components.{module}", "text"): [{"text": "[0-9]{4}"}]  # of the operator
        for module in ("data.served.spec", "inference.recording")
    },
    ("components.models.targets", "wanted"): [{"wanted": r".*\.(?:q|v)_proj"}],
    **{
        ("components.trajectories.call_forms.elements", name): [{"start": ""}, {"start": "｜DSML｜"}]
        for name in ("head", "argument")
    },
    ("components.trajectories.special_tokens", "pattern"): [{"tokens": {"<|im_end|>", "<|im_start|>", "</s>"}}],
    ("flows.stages.import_data", "keys"): [{"fields": ("path",)}, {"fields": tuple(DataSpec.model_fields)}],
    ("flows.stages.base", "input_pattern(declared)"): [{"declared": "[anchored-]scores[+K][-N]"}, {"declared": "*"}],
}
"""Values of local names, by module and pattern (its source, or the name to which it is assigned)."""
TIMED = {
    ("components.rewards.rules.patterns", "pattern"): "the operator's, matched with a limit of time",
    ("components.specs.schemas", "expression"): "an environment server's, matched with a limit of time",
    ("components.rewards.rules.language", "f'[{inside}]'"): "one class of characters, for one character",
    (
        "components.rewards.rules.language",
        "f'\\\\p{{Script={name}}}'",
    ): "compiled only, to see whether the script is known",
    ("components.rewards.rules.language", "'[\\\\p{L}--\\\\p{Script=Common}--\\\\p{Script=Inherited}]'"): "one class",
}
"""Patterns of the package `regex`, and the reason why they are bounded."""


@dataclass(frozen=True)
class Use:
    """Regular expression, and the methods by which it is applied."""

    place: str
    pattern: str
    flags: int
    methods: tuple[str, ...]

    def calls(self) -> Iterator[tuple[str, Callable[[str], Any]]]:
        compiled = re.compile(self.pattern, self.flags)
        for method in self.methods:
            if method in ("sub", "subn"):
                yield method, lambda text: compiled.sub("", text)
            elif method == "finditer":
                yield method, lambda text: sum(1 for _ in compiled.finditer(text))
            else:
                yield method, getattr(compiled, method)


@functools.cache
def _modules() -> list[tuple[str, ast.Module]]:
    plugins = sorted((ROOT / "hydra_plugins").rglob("*.py"))
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in [*MODULES, *plugins]}
    return [(name.removesuffix(".__init__"), parsed(path)) for path, name in names.items()]


@functools.cache
def _calls(tree: ast.Module) -> list[tuple[str, ast.Call, str]]:
    """Return the package, the call, and the name or parameter to which its result is assigned."""
    calls = []
    assigned = {
        id(assignment.value): ast.unparse(assignment.targets[0])
        for assignment in ast.walk(tree)
        if isinstance(assignment, ast.Assign)
    }
    assigned |= {id(node.value): node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            known = isinstance(owner, ast.Name) and owner.id in ("re", "regex")
            if known and node.func.attr in (*METHODS, "compile"):
                calls.append((owner.id, node, assigned.get(id(node), "")))
    return calls


@functools.cache
def _package(module: str) -> list[ast.Module]:
    """Return the modules of a package, in which a pattern may be an attribute."""
    packages = {module, module.rpartition(".")[0]}
    return [tree for name, tree in _modules() if name == module or name.rpartition(".")[0] in packages]


def _uses(module: str, tree: ast.Module) -> Iterator[Use]:
    for package, node, name in _calls(tree):
        source = ast.unparse(node.args[0])
        key = (module, source)
        if package == "regex":
            assert key in TIMED, f"{module}:{node.lineno}: {source}: say in TIMED why this is bounded"
            continue
        method = node.func.attr  # type: ignore[attr-defined]
        methods: tuple[str, ...] = (method,)
        if method == "compile":
            applied = {
                inner.attr
                for other in _package(module)
                for inner in ast.walk(other)
                if isinstance(inner, ast.Attribute) and inner.attr in METHODS
                if ast.unparse(inner.value) in ((name, f"self.{name}") if other is tree else (f"self.{name}",))
            }
            methods = tuple(sorted(applied)) or ("search", "fullmatch", "finditer")  # used elsewhere
        names = vars(importlib.import_module(module))
        flags = 0
        for argument in [*node.args[1:], *(inner.value for inner in node.keywords if inner.arg == "flags")]:
            if re.match(r"re\.[A-Z]", ast.unparse(argument)):
                flags = int(eval(ast.unparse(argument), names))
        samples = SAMPLES.get(key) or SAMPLES.get((module, name.rpartition("_")[2])) or [{}]
        for number, sample in enumerate(samples):
            try:
                pattern = eval(source, {**names, **sample})
            except NameError as error:
                raise AssertionError(
                    f"{module}:{node.lineno}: {source}: {error}; give values of its local names in SAMPLES"
                ) from None
            if isinstance(pattern, bytes):  # the same engine; the attacks are texts
                pattern = pattern.decode("latin-1")
            yield Use(f"{module}:{node.lineno}:{number}", pattern, flags, methods)


@pytest.fixture(scope="module")
def uses():
    return [use for module, tree in _modules() for use in _uses(module, tree)]


def test_patterns_are_found(uses):
    assert len(uses) > 100
    assert {use.place.split(":")[0] for use in uses} >= {
        "components.rewards.llm.answers", "components.rollout.formats", "components.trajectories.call_forms.pythonic",
        "components.environments.worlds.shop", "flows.serve",
    }  # fmt: skip


def test_exemptions_name_existing_patterns():
    sources = {(module, ast.unparse(node.args[0])) for module, tree in _modules() for _, node, _ in _calls(tree)}
    named = {(module, name.rpartition("_")[2]) for module, tree in _modules() for _, _, name in _calls(tree) if name}
    assert TIMED.keys() <= sources
    assert SAMPLES.keys() <= sources | named


def test_patterns_of_specs_are_matched_by_an_engine_without_backtracking():
    """`Field(pattern=...)` is matched by pydantic's Rust engine, in linear time, unless configured otherwise."""
    for module, tree in _modules():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.keyword) and node.arg == "regex_engine"), module


def _seconds(call: Callable[[str], Any], text: str, runs: int = 1) -> float:
    """Return the CPU time of this thread: other processes do not count."""
    best = float("inf")
    for _ in range(runs):
        began = time.thread_time()
        call(text)
        best = min(best, time.thread_time() - began)
    return best


def superlinear(use: Use, size: int) -> str:
    """Return how a pattern takes superlinear time on texts of this length; empty if none was found."""
    for method, call in use.calls():
        for small in SMALL:  # a little longer each time: exponential work passes the limit before it takes minutes
            for text in texts(use.pattern, small, use.flags):
                if _seconds(call, text) > 0.2:
                    return f"{method} on {small} characters: {text[:60]!r}"
        pairs = zip(texts(use.pattern, size // 4, use.flags), texts(use.pattern, size, use.flags), strict=True)
        for quarter, text in pairs:
            if _seconds(call, text) < 0.004 * size / SIZE:
                continue  # 400 ns a character: no quadratic work is that quick
            ratio = _seconds(call, text, 3) / _seconds(call, quarter, 3)
            if ratio > 9:  # linear: 4; quadratic: 16
                return f"{method} on {size} characters takes {ratio:.0f} times as long as on a quarter: {text[:60]!r}"
    return ""


@pytest.mark.timeout(1800)
def test_every_pattern_takes_linear_time(uses):
    assert {use.place: why for use in uses if (why := superlinear(use, SIZE))} == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_pattern_takes_linear_time_on_much_text(uses):
    assert {use.place: why for use in uses if (why := superlinear(use, LARGE))} == {}


@pytest.mark.parametrize(
    ("pattern", "flags", "method"),
    [
        (r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE, "sub"),
        (r"<(?=\s*/?\s*(?:tools|rubric)\b)", re.IGNORECASE, "sub"),
        (r"^\s*Observation:", re.MULTILINE, "split"),
        (r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL, "fullmatch"),
        (r"(a+)+$", 0, "search"),
        (r"\w+@", 0, "search"),
        (r"-?(\d+\.?\d*|\.\d+)", 0, "fullmatch"),
    ],
)
def test_the_check_finds_slow_patterns(pattern, flags, method):
    assert superlinear(Use("here", pattern, flags, (method,)), SIZE // 2)
