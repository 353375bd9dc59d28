"""Every suggestion of the messages about a configuration is applied, and what it gives composes."""

from __future__ import annotations

import ast
import copy
import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.errors import Problem, SpecError
from components.specs import names_below
from flows.experiment.compose import check
from flows.experiment.composer import Composer
from flows.experiment.spec import ExperimentSpec
from flows.terminal.arguments import CODE
from tests.source import MODULES, parsed

ONE_EXPERIMENT = "+experiment=smoke"

MISTAKES = [
    "experiment=smoke",
    "smoke",
    "+smoke",
    "quikstart",
    "sft",
    "+experiment=smoke +experiment=quickstart",
    "+experiment=smoke experiment=quickstart",
    "experiment=[smoke,quickstart]",
    f"{ONE_EXPERIMENT} tiny",
    f"{ONE_EXPERIMENT} model",
    f"{ONE_EXPERIMENT} learning_rate",
    f"{ONE_EXPERIMENT} rounds==3",
    f"{ONE_EXPERIMENT} 'rounds: 3'",
    f"{ONE_EXPERIMENT} modle=tiny",
    f"{ONE_EXPERIMENT} model=tinny",
    f"{ONE_EXPERIMENT} +model=tiny",
    f"{ONE_EXPERIMENT} +rounds=4",
    f"{ONE_EXPERIMENT} ~rounds=5",
    f"{ONE_EXPERIMENT} ~model=small",
    f"{ONE_EXPERIMENT} ~collect.temprature",
    f"{ONE_EXPERIMENT} +algorithm.clip_hihg=0.3",
    f"{ONE_EXPERIMENT} environment.heldut=40",
    f"{ONE_EXPERIMENT} compute.stages.train=proces",
    f"{ONE_EXPERIMENT} early_stopping.patience=2 evaluate.every=1",
    f"{ONE_EXPERIMENT} warmup=null",
    f"{ONE_EXPERIMENT} environment=[shop,guess]",
    f"{ONE_EXPERIMENT} collect.group_size=1",
    f"{ONE_EXPERIMENT} environment._target_=components.environments.worlds.shopp.Shop",
    f"{ONE_EXPERIMENT} environment._target_=components.environments.worlds.shop.Shopp",
    f"{ONE_EXPERIMENT} collect.refills=2 filter=everything",
    f"{ONE_EXPERIMENT} agent.format=code collect.opponent=policy",
    f"{ONE_EXPERIMENT} collect.opponent=policy",
    f"{ONE_EXPERIMENT} ewc.coefficien=1",
    f"{ONE_EXPERIMENT} reward_model.adversarial=true",
    f"{ONE_EXPERIMENT} deploy.target={{name:local}}",
    f"{ONE_EXPERIMENT} guards.reward_hacking=stop",
    f"{ONE_EXPERIMENT} compute.shards=2 compute=local",
    f"{ONE_EXPERIMENT} evaluate.stop=decided evaluate.batch=1000",
    "+experiment=sft algorithm=grpo",
    "+experiment=tic_tac_toe environment=shop",
    "+experiment=quickstart algorithm=dpo",
]
"""Command lines with mistakes."""

OVERRIDE = r"(?:-m )?[+~]?[a-z_][\w./@]*=(?:\{[^}]*\}|\[[^\]]*\]|[\w./-]+(?:,\w+)*)"
TOGETHER = re.compile(rf"{OVERRIDE}(?: (?:with|and) {OVERRIDE})*|~[a-z_][\w.]*")
"""Overrides in the text of a message; those joined by `with` or `and` belong together."""
VALUE = re.compile(r"^(?:at (?:most|least) )?(null|true|false|none|never|everything|environment|\d+)(?=$|[,;.]| or )")
"""Value that a message expects for its own key."""
ADVICE = re.compile(r".*(?:expected |sweep over them: |sweep: |add ')(?P<advice>.*)")


def suggestions(problem: Problem) -> Iterator[list[str]]:
    """Yield the overrides of each suggestion of a message."""
    if problem.nearest is not None:
        path = problem.path.lstrip("~+")
        is_override = re.search("[=~]", problem.nearest)
        below = path.rpartition(".")[0]
        is_key = not is_override and problem.nearest.startswith(f"{below}." if below else "")
        yield [
            f"{path} -> {problem.nearest}"
            if is_key
            else problem.nearest
            if is_override
            else f"{path}={problem.nearest}"
        ]
    advice = match["advice"] if (match := ADVICE.match(problem.message)) else ""
    if advice.startswith(("key=value", "one of")):
        return
    for match in TOGETHER.finditer(re.sub(r"\S+=(?:OPTION|NAME)", "", advice)):
        yield re.split(" (?:with|and) ", match[0])
    for match in VALUE.finditer(advice):
        yield [f"{problem.path}={match[1]}"]


def key(part: str) -> str:
    return part.partition("=")[0].lstrip("+~")


def applied(line: str, problem: Problem, suggestion: list[str]) -> tuple[list[str], bool]:
    """Return the command line with a suggestion in place of what it replaces, and True for a sweep."""
    parts = shlex.split(line)
    if " -> " in suggestion[0]:
        old, new = suggestion[0].split(" -> ")
        return [part.replace(old, new).lstrip("+") if old in part else part for part in parts], False
    sweep = suggestion[0].startswith("-m ")
    new = [part.removeprefix("-m ").replace("=VALUE", "=1") for part in suggestion]
    replaced = {problem.path, *map(key, new)}
    corrected = {problem.path.lstrip("+~")} if suggestion[0] == problem.nearest else set()
    return [part for part in parts if part not in replaced and key(part) not in replaced | corrected] + new, sweep


def problems_of(lines: list[str], *, sweep: bool = False, folder: Path | None = None) -> list[Problem]:
    """Return the problems of a command line; none if it composes."""
    try:
        check(lines, multirun=sweep, named=True, config_dir=folder)
    except SpecError as error:
        return error.problems
    return []


def test_each_suggestion_composes():
    unhelpful, wrong = [], []
    for line in MISTAKES:
        problems = problems_of(shlex.split(line))
        suggested = [(problem, suggestion) for problem in problems for suggestion in suggestions(problem)]
        if not suggested and not any("OPTION" in str(problem) for problem in problems):
            unhelpful.append((line, problems))
        for problem, suggestion in suggested:
            lines, sweep = applied(line, problem, suggestion)
            wrong += [(str(problem), suggestion, lines, str(other)) for other in problems_of(lines, sweep=sweep)]
    assert (unhelpful, wrong) == ([], [])


def test_a_key_of_a_group_without_an_option_names_the_options():
    for line, group, options in (
        ("reward_model.adversarial=true", "reward_model", "bradley_terry, process"),
        ("+reward_model.algorithm.epochs=2", "reward_model", "bradley_terry, process"),
        ("warmup.demonstrations=8", "warmup", "sft, sft_short, teacher"),
    ):
        (problem,) = problems_of([ONE_EXPERIMENT, "warmup=none", line])
        expected = f"{group} is null; expected {group}=OPTION beside it, with one of {options}"
        assert (problem.message, problem.nearest) == (expected, None)


def test_what_resembles_nothing_has_no_suggestion():
    parts = ["zzz", "smoek", "environment._target_=components.environments.shop.Desk"]
    problems = {part: problems_of([ONE_EXPERIMENT, part]) for part in parts}
    assert [(part, [problem.nearest for problem in problems[part]]) for part in parts] == [
        (part, [None]) for part in parts
    ]


# --- files ----------------------------------------------------------------------------------------------------------

ENTRIES = {
    "- model: tiny": "- override /model: tiny",
    "- override model: tiny": "- override /model: tiny",
    "- /model: tiny": "- override /model: tiny",
    "- override /models: tiny": "- override /model: tiny",
    "- override /model: tinny": "- override /model: tiny",
    "- override /reward_model: proces": "- override /reward_model: process",
    "- smoek": "- smoke",
    "- /experiment/smoek": "- /experiment/smoke",
}
"""Entries of a defaults list, and what the message suggests."""


def experiment(folder: Path, name: str, *entries: str) -> None:
    lines = ["# @package _global_", "defaults:", *(f"  {entry}" for entry in entries), "  - _self_", f"name: {name}"]
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def test_a_wrong_entry_of_a_defaults_list_is_named_with_the_one_that_composes(tmp_path):
    """Also where another experiment inherits it."""
    for number, (entry, correct) in enumerate(ENTRIES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        base = [] if "smo" in entry else ["- smoke"]
        experiment(folder, "mine", *base, entry)
        experiment(folder, "above", "- mine")
        chosen = ["+experiment=above" if number % 2 else "+experiment=mine"]
        (problem,) = problems_of(chosen, folder=folder)
        assert f"{folder}/experiment/mine.yaml, defaults: '{entry}'" in problem.message
        assert "Config search path" not in str(problem)
        assert problem.nearest == correct
        experiment(folder, "mine", *base, correct)
        assert problems_of(chosen, folder=folder) == []
        assert check(chosen, config_dir=folder)[0].model.source == "random", entry


def test_an_entry_of_a_group_that_no_option_uses_is_named_without_a_suggestion(tmp_path):
    experiment(tmp_path, "mine", "- smoke", "- override /judge_model@reward.model: served")
    (problem,) = problems_of(["+experiment=mine"], folder=tmp_path)
    assert "first choose one that does, as '- override /reward: …'" in problem.message
    assert problem.nearest is None


def test_an_experiment_beside_its_folder_is_named_with_its_place(tmp_path):
    experiment(tmp_path, "mine", "- smoke")
    with pytest.raises(SpecError, match=re.escape(f"expected --config-dir {tmp_path}")):
        check(["+experiment=mine"], config_dir=tmp_path / "experiment")
    check(["+experiment=mine"], config_dir=tmp_path)

    beside = tmp_path / "beside"
    beside.mkdir()
    moved = beside / "mine.yaml"
    moved.write_text((tmp_path / "experiment" / "mine.yaml").read_text())
    target = beside / "experiment" / "mine.yaml"
    with pytest.raises(SpecError, match=re.escape(f"move it to {target}")):
        check(["+experiment=mine"], config_dir=beside)
    target.parent.mkdir()
    moved.rename(target)
    check(["+experiment=mine"], config_dir=beside)


# --- overrides in the source ------------------------------------------------------------------------------------------

WRITTEN = re.compile(
    r"(?<![\w./\\?&-])(?P<key>[+~]{0,2}[a-z_][\w/]*(?:[.@][a-z_]\w*)*)="
    r"(?P<value>\{[^{}]*\}|\[[^\[\]]*\]|(?:[^\s,;:()'\"`|{}\[\]]|[:,](?=[^\s,;:'\"]))*)"
)
"""Override in a text of the source."""
PLACEHOLDER = "\0"
OPEN = re.compile(rf"[{PLACEHOLDER}%\\$<]|^[A-Z]|^$")
"""Value that is no literal: computed, a name in capitals, a format, or empty."""
COMPOSER = Composer()


def text_of(node: ast.AST) -> str | None:
    """Return a text of the source with placeholders for computed parts; None for another node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def overrides_in(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, key and value of each override in the texts of a module, without docstrings, and of each value
    that a `Problem` expects for its own key."""
    nodes = list(ast.walk(tree))
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    left_out |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem" and len(node.args) > 1:
            path, message = map(text_of, node.args[:2])
            advice = ADVICE.match(message or "")
            for match in VALUE.finditer(advice["advice"] if advice else ""):
                if path and PLACEHOLDER not in path:
                    yield node.lineno, path.lstrip("+~"), match[1]
        elif id(node) not in left_out and (text := text_of(node)):
            for match in WRITTEN.finditer(text):
                yield node.lineno, match["key"].lstrip("+~"), match["value"].rstrip(".")


def written() -> dict[tuple[str, str | None], str]:
    """Return the overrides in the source, (key, literal value or None), with the place of the first one. Other texts
    with an equals sign do not begin with a key of a configuration; the keys of a `Problem` in components are relative
    to their spec."""
    places: dict[tuple[str, str | None], str] = {}
    for path in MODULES:
        for line, name, value in overrides_in(parsed(path)):
            first = re.split("[.@]", name)[0]
            if first in ExperimentSpec.model_fields or (first != "hydra" and COMPOSER.tree.is_group(first)):
                literal = None if OPEN.search(value) else value
                places.setdefault((name, literal), f"{path.relative_to(CODE)}:{line}")
    return places


@functools.cache
def configuration(line: str | None) -> dict[str, Any]:
    parsed, problems = COMPOSER.parse([line] if line else [])
    data, _ = COMPOSER.point(parsed)
    assert not problems
    assert data is not None
    return data


def accepted(name: str, literal: str | None) -> bool:
    """Return True if the key exists in the default configuration or with an option of its group, and has the value as
    far as it alone determines that."""
    group, _, package = name.partition("@")
    if COMPOSER.tree.is_group(group):
        return literal is None or literal in COMPOSER.tree.options(group) or literal == "null" or literal[0] in "[{"
    top, *below = name.split(".")
    files = sorted((CODE / "conf" / top).glob("*.yaml"))
    lines = [f"{top}={file.stem}" for file in files if any(f"{part}:" in file.read_text() for part in below)]
    return not package and any(_accepts(configuration(line), [top, *below], literal) for line in [None, *lines])


def _accepts(data: dict[str, Any], path: list[str], literal: str | None) -> bool:
    data = copy.deepcopy(data)
    parent = data
    for length, part in enumerate(path[:-1]):
        if part not in parent and part not in names_below(ExperimentSpec, data, path[:length]):
            return False
        if parent.get(part) is None:
            parent[part] = {}  # a block that is null by default
        parent = parent[part]
        if not isinstance(parent, dict):
            return False
    names = names_below(ExperimentSpec, data, path[:-1])
    if names and path[-1] not in {*parent, *names}:
        return False
    if literal is None:
        return True
    (override,), _ = COMPOSER.parse([f"++{'.'.join(path)}={literal}"])
    parent[path[-1]] = override.value()
    try:
        ExperimentSpec.model_validate(data, context={"allow": [], "overrides": True})
    except ValidationError as error:
        return not any(_is_below(path, detail["loc"]) for detail in error.errors(include_url=False))
    return True


def _is_below(path: list[str], location: Sequence[int | str]) -> bool:
    """Return True if the location of an error, which also names members of unions, contains the key path."""
    parts = iter(map(str, location))
    return all(part in parts for part in path)


def test_each_override_in_a_text_of_the_source_has_a_key_and_a_value_that_exist():
    """A message, a hint or a generated command that names `key=value` would otherwise fail when it is followed."""
    places = written()
    assert len(places) > 200
    refused = [
        f"{place}: {name}={value or 'VALUE'}" for (name, value), place in places.items() if not accepted(name, value)
    ]
    assert refused == []


def test_an_override_with_a_wrong_key_or_value_is_recognised():
    for text in ("colect.group_size=4", "collect.group_sise=4", "model.dtype=float8", "algorithm=grpoo"):
        name, _, value = text.partition("=")
        assert not accepted(name, value), text
        assert not accepted(name, None) or name in ("model.dtype", "algorithm"), text
