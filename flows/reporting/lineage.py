"""Lineage of an artifact as a text tree, as JSON, and for the report.

Steps (`flows.history.lineage_graph`) are listed nearest first. A fact of a step (reward, algorithm, the run that made
it) also applies to the steps below it until they show another value.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flows.history.lineage_graph import TRAINED, Lineage, LineageStep, Node
from flows.terminal.console import printable

if TYPE_CHECKING:
    from components.pages.report import Origin

SHORT = 12
"""Number of characters shown of a key."""


def to_json(lineage: Lineage, key: str) -> dict[str, Any]:
    """Return the ancestors and descendants of an artifact, and their runs, as JSON data."""
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
    """Return the ancestors and descendants of an artifact as a text tree."""
    back, forward = lineage.back(key), lineage.forward(key)
    node = back[0].head
    run = lineage.runs.get(node.run or "")
    lines = [f"{node.kind} {node.label} {node.key}", f"  digest {node.digest or 'unknown'}"]
    if run is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
        lines.append(f"  made by run {run.id} ({run.name} seed {run.seed}), {run.status.lower()}, started {when}")
        lines.append(f"  commit {run.git_commit or 'unknown'}; configuration: {lineage.records.folder / run.id}.json")
        lines += [f"  overrides {' '.join(run.overrides)}"] if run.overrides else []
    else:
        lines.append("  made by an unknown run: no record contains it")
    if not node.present:
        lines.append("  no longer in the store; shown from the records")
    lines += ["", "made from"]
    current: dict[str, str] = {}
    rows = [(_line(lineage, step), _grouped(changed_facts(lineage.facts(step), current))) for step in back]
    ancestors = [(line, [f"{name}  {value}" for name, value in facts.items()]) for line, facts in rows]
    lines += _tree([*ancestors, (_base_model(back), [])])
    descendants = forward[1:]
    if forward[0].others or descendants:
        lines += ["", "made from it"]
        current = {"run": lineage.facts(back[0])["run"]}
        branches: list[tuple[str, list[str]]] = [(_node_text(node), []) for node in forward[0].others]
        for step in descendants:
            fact = changed_facts({"run": lineage.facts(step)["run"]}, current)
            branches.append((_line(lineage, step), [f"run  {fact['run']}"] if fact else []))
        lines += _tree(branches)
    else:
        lines += ["", "nothing was made from it"]
    return "\n".join(printable(line) for line in lines) + "\n"


def changed_facts(facts: Mapping[str, str], current: dict[str, str]) -> dict[str, str]:
    """Return the facts that are new or differ from `current`, and update `current` with them."""
    changed = {name: value for name, value in facts.items() if current.get(name) != value}
    current.update(changed)
    return changed


def origins(lineage: Lineage, key: str) -> list[Origin]:
    """Return the ancestors of a checkpoint for the report."""
    from components.pages.report import Origin

    current: dict[str, str] = {}
    return [
        Origin(
            label=step.head.label,
            key=step.head.key,
            made_of=[(node.label, node.key) for node in step.others],
            goes_on=_parents(lineage, step),
            facts=_grouped(changed_facts(lineage.facts(step), current)),
        )
        for step in lineage.back(key)
    ]


def _parents(lineage: Lineage, step: LineageStep) -> str:
    """Return a step's input checkpoints as text: `train[1] (start, policy), train[sft] (reference)`."""
    roles_by_key: dict[str, list[str]] = {}
    for node in step.nodes:
        for role, key in node.inputs.items():
            if lineage.node(key).kind in TRAINED and role not in roles_by_key.setdefault(key, []):
                roles_by_key[key].append(role)
    nearest = sorted((not {"start", "policy"} & set(roles), roles, key) for key, roles in roles_by_key.items() if roles)
    return ", ".join(f"{lineage.node(key).label} ({', '.join(roles)})" for _, roles, key in nearest)


def _line(lineage: Lineage, step: LineageStep) -> str:
    others = ", ".join(_node_text(node) for node in step.others)
    parents = _parents(lineage, step)
    return f"{_node_text(step.head)}{f'  with {others}' if others else ''}{f'  from {parents}' if parents else ''}"


def _node_text(node: Node) -> str:
    metrics = {"success": node.metrics.get("success")} if node.kind == "evaluation" else {}
    figures = "".join(f" {name} {value:.3f}" for name, value in metrics.items() if value is not None)
    return f"{node.label} {node.key[:SHORT]}{figures}{'' if node.present else ' (deleted)'}"


def _base_model(steps: Sequence[LineageStep]) -> str:
    models = [node.spec["model"] for step in steps for node in step.nodes if "model" in node.spec]
    return f"the model {models[-1]['name']}" if models else "an unknown model"


def _grouped(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the facts with all versions of stages joined into one."""
    prefix = "version of "
    versions = [f"{name.removeprefix(prefix)} {value}" for name, value in facts.items() if name.startswith(prefix)]
    others = {name: value for name, value in facts.items() if not name.startswith(prefix)}
    return others | ({"versions of stages": ", ".join(versions)} if versions else {})


def _tree(branches: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    lines = []
    for number, (title, details) in enumerate(branches):
        last = number == len(branches) - 1
        lines += [f"{'└' if last else '├'}─ {title}", *(f"{' ' if last else '│'}    {detail}" for detail in details)]
    return lines
