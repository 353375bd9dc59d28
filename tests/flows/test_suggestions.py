"""Every suggestion of the messages about a configuration is applied, and what it gives composes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.errors import Problem, SpecError
from flows.experiment.compose import check

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


@pytest.mark.parametrize("line", MISTAKES)
def test_each_suggestion_composes(line):
    with pytest.raises(SpecError) as caught:
        check(shlex.split(line), named=True)
    suggested = [(problem, suggestion) for problem in caught.value.problems for suggestion in suggestions(problem)]
    assert suggested or "OPTION" in str(caught.value), str(caught.value)
    for problem, suggestion in suggested:
        lines, sweep = applied(line, problem, suggestion)
        try:
            check(lines, multirun=sweep, named=True)
        except SpecError as error:
            pytest.fail(f"{problem}\nsuggests {suggestion}, but {lines}: {error}")


@pytest.mark.parametrize("part", ["zzz", "smoek", "environment._target_=components.environments.shop.Desk"])
def test_what_resembles_nothing_has_no_suggestion(part):
    with pytest.raises(SpecError) as caught:
        check([ONE_EXPERIMENT, part])
    assert [problem.nearest for problem in caught.value.problems] == [None]


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


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("inherited", [False, True], ids=["", "inherited"])
def test_a_wrong_entry_of_a_defaults_list_is_named_with_the_one_that_composes(tmp_path, entry, inherited):
    base = [] if "smo" in entry else ["- smoke"]
    experiment(tmp_path, "mine", *base, entry)
    experiment(tmp_path, "above", "- mine")
    chosen = "+experiment=above" if inherited else "+experiment=mine"
    with pytest.raises(SpecError) as caught:
        check([chosen], config_dir=tmp_path)
    (problem,) = caught.value.problems
    assert f"{tmp_path}/experiment/mine.yaml, defaults: '{entry}'" in problem.message
    assert "Config search path" not in str(caught.value)
    assert problem.nearest == ENTRIES[entry]
    experiment(tmp_path, "mine", *base, problem.nearest)
    assert check([chosen], config_dir=tmp_path)[0].model.source == "random"


def test_an_entry_of_a_group_that_no_option_uses_is_named_without_a_suggestion(tmp_path):
    experiment(tmp_path, "mine", "- smoke", "- override /judge_model@reward.model: served")
    with pytest.raises(SpecError, match=r"first choose one that does, as '- override /reward: …'") as caught:
        check(["+experiment=mine"], config_dir=tmp_path)
    assert caught.value.problems[0].nearest is None


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
