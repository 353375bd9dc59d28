"""Which artifact was made from which, by which run, and how.

Manifests say what an artifact was made from and how; records say which run made it, at which commit, by which version
of the stage. A manifest that is not below the root any more is read from the store that its run was started with; an
artifact that is gone there too is told from the records, as far as they reach. Nothing is changed.

The story is told by steps, the nearest first: a step is a checkpoint, or a reward model, with the trajectories, scores
and selection that it was trained on, so a run is one line for each round.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from components.artifacts import Store
from components.errors import ResourceError
from components.redaction import mask
from flows.history.records import SHORTEST, Records, RunRecord, StageRecord, checkpoints
from flows.history.store_reader import Peek, peek_through, targets
from flows.stages.train import EARLIER

ORDER = ("train", "reward_model", "feedback", "filter", "judge", "collect", "evaluate", "deploy")
"""Stages in the order in which a step names what it consists of."""
TRAINED = ("checkpoint", "reward_model")
"""Kinds of artifacts that are steps of their own."""
FEEDS = ("trajectories", "scores", "selection", "feedback")
"""Kinds of artifacts that training is fed with."""


@dataclass(frozen=True)
class Node:
    """One artifact."""

    key: str
    kind: str
    stage: str
    digest: str
    label: str
    """Name of the stage in the run: `train[3]`; the stage's own where no run recorded it."""
    run: str | None
    """Id of the run that made it; None where no record says so."""
    version: int | None
    """Version of the stage; None where no record says so."""
    inputs: dict[str, str]
    """Name of each input and the key of its artifact."""
    spec: dict[str, Any]
    """What determined it: targets with their arguments, algorithm, model; secrets are masked."""
    metrics: dict[str, float]
    present: bool
    """Whether the store still holds it."""


@dataclass
class Step:
    """A checkpoint, or the artifact that was asked for, with what belongs to it."""

    head: Node
    others: list[Node] = field(default_factory=list)
    """Back to the start: what it was made of. Forward: also what was made from it."""

    @property
    def nodes(self) -> list[Node]:
        return [self.head, *self.others]


class Lineage:
    """Which artifact below one root was made from which, and by which run. With `through`, what is not in the folder is
    looked for in the store that its run was started with; `unread` says which of these cannot be read."""

    def __init__(self, root: str | Path, *, through: bool = False):
        self.records = Records(root)
        self._through = through
        self._peeks: dict[str, Peek] = {}
        """Into remote stores, by URI."""
        self.runs: dict[str, RunRecord] = {}
        self._peek = Peek(Store(self.records.root / "artifacts"))
        self._found: dict[str, tuple[RunRecord, StageRecord]] = {}
        """By key: the latest run that made an artifact, or else the first one that found it."""
        self._nodes: dict[str, Node] = {}
        for run in reversed(self.records.all()):
            for stage in run.stages:
                self.add(run, stage)

    def add(self, run: RunRecord, stage: StageRecord) -> None:
        """A stage that a run has ended."""
        self.runs[run.id] = run
        if stage.status == "ran" or stage.key not in self._found:
            self._found[stage.key] = run, stage
            self._nodes.pop(stage.key, None)

    def resolve(self, reference: str) -> str:
        """The key that a command names. Raises ResourceError where there is no such run, step or artifact, and where
        the text may be one or the other."""
        name, at, step = reference.partition("@")
        if at:
            return self._checkpoint(self.records.get(name), step)
        keys = sorted({key for key in self._keys if key.startswith(reference)}) if len(reference) >= SHORTEST else []
        try:
            run = self.records.get(reference)
        except ResourceError as error:
            if len(keys) == 1:
                return keys[0]
            if keys:
                listed = ", ".join(key[: len(reference) + 8] for key in keys[:10])
                raise ResourceError(
                    f"{len(keys)} artifacts have a key that begins with {reference!r}: {listed}"
                ) from None
            raise ResourceError(f"{error}\nNor has an artifact a key that begins with {reference!r}") from None
        if keys:
            raise ResourceError(f"{reference!r} begins the id of run {run.id} and the key {keys[0]}; give more of it")
        return self._checkpoint(run, "")

    def node(self, key: str) -> Node:
        """The artifact of a key. Of one that neither the store nor a record knows, only the key is told."""
        if key not in self._nodes:
            self._nodes[key] = self._node(key, self._through)
        return self._nodes[key]

    def _node(self, key: str, through: bool) -> Node:
        run, stage = self._found.get(key, (None, None))
        manifest = self._peek.manifest(key) or (self._behind(run).manifest(key) if run and through else None)
        if manifest is not None:
            kind, name, digest, spec = (manifest[part] for part in ("kind", "stage", "digest", "spec"))
            inputs = {input: one["key"] for input, one in manifest["inputs"].items()}
        elif stage is not None:
            kind, name, digest, spec = stage.kind, stage.request["stage"], stage.digest, stage.request["spec"]
            inputs = stage.request["inputs"]
        else:
            kind, name, digest, spec, inputs = "artifact", "not known", "", {}, {}
        return Node(
            key=key,
            kind=kind,
            stage=name,
            digest=digest,
            label=stage.label if stage else name,
            run=run.id if run and stage and stage.status == "ran" else None,
            version=stage.version if stage else None,
            inputs=inputs,
            spec=mask(spec or {}),
            metrics=manifest["metrics"] if manifest else {},
            present=manifest is not None,
        )

    def _behind(self, run: RunRecord) -> Peek:
        uri = run.spec.get("store") or ""
        if uri not in self._peeks:
            self._peeks[uri] = peek_through(self.records.root, uri or None)
        return self._peeks[uri]

    @property
    def unread(self) -> list[str]:
        return [one.unread for one in self._peeks.values() if one.unread]

    def ancestors(self, key: str) -> list[Node]:
        """What an artifact was made from, itself first, each one before what it was made from."""
        return self._walk(key, lambda one: self.node(one).inputs.values())

    def descendants(self, key: str) -> list[Node]:
        """What was made from an artifact, itself first, each one after what it was made from."""
        return self._walk(key, lambda one: self._children.get(one, ()))

    def back(self, key: str) -> list[Step]:
        """The steps that led to an artifact, the nearest first; the first one is its own."""
        nodes = self.ancestors(key)
        steps = {key: Step(nodes[0])}
        belongs = {key: key}
        for node in nodes:
            if node.key not in belongs:  # a checkpoint: what is not one was claimed by its nearest user
                steps[node.key], belongs[node.key] = Step(node), node.key
            elif node.key != belongs[node.key]:
                steps[belongs[node.key]].others.append(node)
            for below in self._fed_by(node.key):
                belongs.setdefault(below, belongs[node.key])
        return [_ordered(step) for step in steps.values()]

    def forward(self, key: str) -> list[Step]:
        """The steps that an artifact led to; the first one is its own: what was made from it besides checkpoints. What
        a checkpoint was trained on belongs to it, what it was evaluated and exported as as well."""
        nodes = self.descendants(key)
        steps = {node.key: Step(node) for node in nodes if node.key == key or node.kind in TRAINED}
        belongs = {one: one for one in steps}
        for node in reversed(nodes):  # what is fed to training is claimed from behind
            if node.kind in FEEDS and node.key not in belongs:
                users = [one for one in self._children.get(node.key, ()) if one in belongs]
                own = [one for one in users if node.key in self._fed_by(one)]  # the others replay it
                belongs[node.key] = belongs[(own or users)[0]] if users else key
        for node in nodes:
            if node.key not in belongs:
                makers = [belongs[one] for one in node.inputs.values() if one in belongs]
                belongs[node.key] = makers[-1] if makers else key
            if node.key not in steps:
                steps[belongs[node.key]].others.append(node)
        return [_ordered(step) for step in steps.values()]

    def tags(self, key: str) -> dict[str, str]:
        """What made a checkpoint, in short, for the tags of a model: the run and its commit, the version of the stage,
        target paths, and the digest of the checkpoint that it went on from."""
        node = self.node(key)
        run = self.runs.get(node.run or "")
        found = {
            "made_by": node.run,
            "git_commit": run.git_commit if run else None,
            "stage_version": None if node.version is None else str(node.version),
            "parent_digest": self.node(node.inputs["start"]).digest if "start" in node.inputs else None,
        }
        for one in self._walk(key, self._fed_by):
            found |= {path.replace(".", "_"): target["_target_"] for path, target in targets(one.spec).items()}
        return {name: value for name, value in found.items() if value}

    def facts(self, step: Step) -> dict[str, str]:
        """What holds for a step, by name: the run that made it, versions of its stages, targets with their arguments,
        model and algorithm."""
        run = self.runs.get(step.head.run or "")
        found = {
            "run": f"{run.short} {run.name} seed {run.seed}, commit {run.git_commit or 'not known'}"
            if run
            else "not known"
        }
        for node in step.nodes:
            if node.version is not None and node.stage in ORDER:
                found.setdefault(f"version of {node.stage}", str(node.version))
        for node in step.nodes:
            for name, value in node.spec.items():
                if isinstance(value, Mapping) and name != "experiment":
                    found.setdefault(name, _said(value))
                elif name == "actor":
                    found.setdefault(name, str(value))
        return found

    def _fed_by(self, key: str) -> list[str]:
        """What belongs to an artifact: not the checkpoint before it, nor what was replayed of earlier rounds."""
        inputs = self.node(key).inputs.items()
        return [below for name, below in inputs if not EARLIER.fullmatch(name) and self.node(below).kind not in TRAINED]

    @cached_property
    def _keys(self) -> set[str]:
        return {*self._peek.keys(), *self._found}

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        """By key: what was made from it, directly."""
        found: dict[str, list[str]] = {}
        for key in sorted(self._keys):
            node = self._nodes.get(key) or self._node(key, through=False)  # of all keys: no store is asked so much
            for below in dict.fromkeys(node.inputs.values()):
                found.setdefault(below, []).append(key)
        return found

    def _walk(self, start: str, following: Callable[[str], Iterable[str]]) -> list[Node]:
        """Everything that follows from `start`, each after all that lead to it; of equals the one found first."""
        leads: dict[str, int] = {start: 0}
        waiting = deque([start])
        while waiting:
            for one in dict.fromkeys(following(waiting.popleft())):
                if one not in leads:
                    waiting.append(one)
                leads[one] = leads.get(one, 0) + 1
        ready, found = deque([start]), []
        while ready:
            found.append(self.node(key := ready.popleft()))
            for one in dict.fromkeys(following(key)):
                leads[one] -= 1
                if leads[one] == 0:
                    ready.append(one)
        return found

    def _checkpoint(self, run: RunRecord, step: str) -> str:
        """Of a step; where none is given, of the final policy."""
        known = checkpoints(run)
        if not known:
            raise ResourceError(f"run {run.short} has trained nothing yet")
        if step and not (step.isdecimal() and int(step) in known):
            steps = ", ".join(map(str, sorted(known)))
            raise ResourceError(f"run {run.short} has no checkpoint of step {step}; expected one of {steps}")
        return known[int(step)] if step else _final_policy(run) or known[max(known)]


def _final_policy(run: RunRecord) -> str | None:
    """Key of the checkpoint that a run evaluated as its final one; None where it has not come so far."""
    return next((one.request["inputs"].get("policy") for one in run.stages if one.label == "evaluate[final]"), None)


def _ordered(step: Step) -> Step:
    step.others.sort(key=lambda node: ORDER.index(node.stage) if node.stage in ORDER else len(ORDER))
    return step


def _said(value: Mapping[str, Any]) -> str:
    """A part of a spec on one line: `components.rewards.rules.outcome.Outcome turn_cost=0.1`, `grpo epochs=1`."""
    title = next((name for name in ("_target_", "name") if name in value), None)
    arguments = [
        f"{name}={item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)}"
        for name, item in value.items()
        if name != title
    ]
    return " ".join([*([str(value[title])] if title else []), *arguments])
