"""Lineage of an artifact as a tree, as JSON, and as the report shows it.

Steps (`flows.history.lineage_graph`) are listed nearest first. What holds for a step (reward, algorithm, the run that
made it) holds for the steps below it until another one is named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flows.history.lineage_graph import TRAINED, Lineage, Node, Step
from flows.terminal.console import printable

if TYPE_CHECKING:
    from components.evaluation.report import Origin

SHORT = 12
"""Characters of a key that are shown."""


def to_json(lineage: Lineage, key: str) -> dict[str, Any]:
    """The whole story of an artifact as JSON data."""
    back, forward = lineage.ancestors(key), lineage.descendants(key)
    runs = {node.run: lineage.runs[node.run] for node in (*back, *forward) if node.run}
    return {
        "artifact": asdict(back[0]),
        "made_from": [asdict(node) for node in back[1:]],
        "made_from_it": [asdict(node) for node in forward[1:]],
        "runs": {
            run.id: {
                "name": run.name,
                "seed": run.seed,
                "status": run.status,
                "started": run.started,
                "git_commit": run.git_commit,
                "overrides": run.overrides,
                "config": run.spec,
            }
            for run in runs.values()
        },
    }


def show(lineage: Lineage, key: str) -> str:
    """The whole story of an artifact as a tree."""
    back, forward = lineage.back(key), lineage.forward(key)
    node = back[0].head
    run = lineage.runs.get(node.run or "")
    lines = [f"{node.kind} {node.label} {node.key}", f"  digest {node.digest or 'not known'}"]
    if run is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
        lines.append(f"  made by run {run.id} ({run.name} seed {run.seed}), {run.status.lower()}, started {when}")
        lines.append(f"  commit {run.git_commit or 'not known'}; configuration: {lineage.records.folder / run.id}.json")
        lines += [f"  overrides {' '.join(run.overrides)}"] if run.overrides else []
    else:
        lines.append("  no record says which run made it")
    if not node.present:
        lines.append("  it is not in the store any more; this is what records say")
    lines += ["", "made from"]
    known: dict[str, str] = {}
    rows = [(_line(lineage, step), _grouped(news(lineage.facts(step), known))) for step in back]
    told = [(line, [f"{name}  {value}" for name, value in found.items()]) for line, found in rows]
    lines += _tree([*told, (_beginning(back), [])])
    rest = forward[1:]
    if forward[0].others or rest:
        lines += ["", "made from it"]
        known = {"run": lineage.facts(back[0])["run"]}
        branches: list[tuple[str, list[str]]] = [(_named(one), []) for one in forward[0].others]
        for step in rest:
            fact = news({"run": lineage.facts(step)["run"]}, known)
            branches.append((_line(lineage, step), [f"run  {fact['run']}"] if fact else []))
        lines += _tree(branches)
    else:
        lines += ["", "nothing was made from it"]
    return "\n".join(printable(line) for line in lines) + "\n"


def news(facts: Mapping[str, str], known: dict[str, str]) -> dict[str, str]:
    """Those facts that are not known yet or have changed; `known` has them from now on."""
    found = {name: value for name, value in facts.items() if known.get(name) != value}
    known.update(found)
    return found


def origins(lineage: Lineage, key: str) -> list[Origin]:
    """What a checkpoint was made from, as the report shows it."""
    from components.evaluation.report import Origin

    known: dict[str, str] = {}
    return [
        Origin(
            label=step.head.label,
            key=step.head.key,
            made_of=[(one.label, one.key) for one in step.others],
            goes_on=_goes_on(lineage, step),
            facts=_grouped(news(lineage.facts(step), known)),
        )
        for step in lineage.back(key)
    ]


def _goes_on(lineage: Lineage, step: Step) -> str:
    """The checkpoints that a step goes on from: `train[1] (start, policy), train[sft] (reference)`."""
    names: dict[str, list[str]] = {}
    for node in step.nodes:
        for name, below in node.inputs.items():
            if lineage.node(below).kind in TRAINED and name not in names.setdefault(below, []):
                names[below].append(name)
    nearest = sorted((not {"start", "policy"} & set(found), found, below) for below, found in names.items() if found)
    return ", ".join(f"{lineage.node(below).label} ({', '.join(names[below])})" for _, _, below in nearest)


def _line(lineage: Lineage, step: Step) -> str:
    others = ", ".join(_named(one) for one in step.others)
    goes_on = _goes_on(lineage, step)
    return f"{_named(step.head)}{f'  with {others}' if others else ''}{f'  from {goes_on}' if goes_on else ''}"


def _named(node: Node) -> str:
    shown = {"success": node.metrics.get("success")} if node.kind == "evaluation" else {}
    figures = "".join(f" {name} {value:.3f}" for name, value in shown.items() if value is not None)
    return f"{node.label} {node.key[:SHORT]}{figures}{'' if node.present else ' (gone)'}"


def _beginning(steps: Sequence[Step]) -> str:
    models = [node.spec["model"] for step in steps for node in step.nodes if "model" in node.spec]
    return f"the model {models[-1]['name']}" if models else "a model that is not known"


def _grouped(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts with the versions of stages in one."""
    prefix = "version of "
    versions = [f"{name.removeprefix(prefix)} {value}" for name, value in facts.items() if name.startswith(prefix)]
    found = {name: value for name, value in facts.items() if not name.startswith(prefix)}
    return found | ({"versions of stages": ", ".join(versions)} if versions else {})


def _tree(branches: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    lines = []
    for number, (line, below) in enumerate(branches):
        last = number == len(branches) - 1
        lines += [f"{'└' if last else '├'}─ {line}", *(f"{' ' if last else '│'}    {one}" for one in below)]
    return lines
