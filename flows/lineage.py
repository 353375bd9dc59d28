"""`python -m flows.lineage KEY|RUN@STEP|RUN`: what made an artifact, back to the start, and what was made from it.

RUN@STEP is the checkpoint that a run had after round STEP (0: after its warmup), KEY any artifact by the beginning of
its key. RUN alone is the final policy of the run, the one that it deploys: what its `evaluate[final]` measured, so with
`deploy.policy=best` the one that was chosen. Of a run that has not come so far it is the last checkpoint.

The story is told by steps (`flows.ancestry`), the nearest first. What holds for a step (reward, algorithm, the run that
made it) holds for the steps below it until another one is named.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError
from flows.ancestry import TRAINED, Lineage, Node, Step
from flows.arguments import RootParser
from flows.console import printable

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


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the command."""
    parser = RootParser(
        prog="python -m flows.lineage", description="Says what made an artifact, and what was made from it."
    )
    parser.add_argument(
        "artifact",
        metavar="KEY|RUN@STEP|RUN",
        help="an artifact by the beginning of its key; a run's checkpoint after round STEP; or a run's final policy, "
        "which it deploys: with deploy.policy=best the one that was chosen (its last checkpoint if it has none yet)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        lineage = Lineage(options.root, through=True)
        key = lineage.resolve(options.artifact)
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(to_json(lineage, key)) if options.json else show(lineage, key), end="\n" if options.json else "")
    for why in lineage.unread:
        print(f"what is only in this store counts as gone: {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
