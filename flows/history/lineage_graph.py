"""Lineage of artifacts: inputs, producing run and settings of each artifact.

Manifests contain the inputs and the settings of an artifact; records contain the run that produced it, its commit and
the version of the stage. A manifest that is no longer below the root is read from the store of its run. If it is
deleted there too, the records provide what they contain. This module is read-only.

The lineage consists of steps, nearest first. A step is a checkpoint or a reward model, with the trajectories, scores
and selection that it was trained on, so each round of a run is one step.
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
from flows.history.store_reader import StoreReader, targets
from flows.history.trust import recorded_reader
from flows.stages import STAGES

_BY_ROLE = {role: [stage for stage in STAGES.values() if stage.lineage == role] for role in ("step", "input", "result")}
ORDER = [stage.name for stage in (*_BY_ROLE["step"], *reversed(_BY_ROLE["input"]), *_BY_ROLE["result"])]
"""Order of the stages within a step: training data from the last stage back to the first."""
TRAINED = [stage.kind for stage in _BY_ROLE["step"]]
"""Kinds of artifacts that form a step."""
FEEDS = [stage.kind for stage in _BY_ROLE["input"]]
"""Kinds of artifacts that are inputs of training."""


@dataclass(frozen=True)
class Node:
    """Artifact in the lineage."""

    key: str
    kind: str
    stage: str
    digest: str
    label: str
    """Name of the stage in the run, such as `train[3]`; the name of the stage if no run recorded it."""
    run: str | None
    """Id of the run that produced it; None if no record contains it."""
    version: int | None
    """Version of the stage; None if no record contains it."""
    inputs: dict[str, str]
    """Keys of the input artifacts, by input name."""
    spec: dict[str, Any]
    """Settings that determine it: targets with their arguments, algorithm, model; secrets are masked."""
    metrics: dict[str, float]
    present: bool
    """True if the store still has it."""


@dataclass
class LineageStep:
    """Checkpoint, or the queried artifact, with the artifacts that belong to it."""

    head: Node
    others: list[Node] = field(default_factory=list)
    """Inputs of the head; in the forward direction also artifacts produced from it."""

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the step, the head first."""
        return [self.head, *self.others]


class Lineage:
    """Lineage graph of the artifacts below one root. With `through`, artifacts missing in the folder are looked up in
    the store of their run; `unread` contains the errors of unreachable stores."""

    def __init__(self, root: str | Path, *, through: bool = False, trust: bool = False):
        self.records = Records(root)
        self._through, self._trust = through, trust
        self._readers: dict[str, StoreReader] = {}
        """Views of remote stores, by URI."""
        self.runs: dict[str, RunRecord] = {}
        self._reader = StoreReader(Store(self.records.root / "artifacts"))
        self._recorded: dict[str, tuple[RunRecord, StageRecord]] = {}
        """Latest run that produced an artifact, or else the first run that had it cached, by key."""
        self._nodes: dict[str, Node] = {}
        for run in reversed(self.records.all()):
            for stage in run.stages:
                self.add(run, stage)

    def add(self, run: RunRecord, stage: StageRecord) -> None:
        """Add a finished stage of a run."""
        self.runs[run.id] = run
        if stage.status == "ran" or stage.key not in self._recorded:
            self._recorded[stage.key] = run, stage
            self._nodes.pop(stage.key, None)

    def resolve(self, reference: str) -> str:
        """Return the key of the artifact that `reference` names: RUN, RUN@STEP or a prefix of a key. Raises
        ResourceError if it does not exist or is ambiguous."""
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
            raise ResourceError(f"{error}\nNo artifact has a key that begins with {reference!r} either") from None
        if keys:
            raise ResourceError(
                f"{reference!r} is a prefix of the run id {run.id} and of the key {keys[0]}; give more characters"
            )
        return self._checkpoint(run, "")

    def node(self, key: str) -> Node:
        """Return the artifact of a key; a node with the key only if neither the store nor a record contains it."""
        if key not in self._nodes:
            self._nodes[key] = self._node(key, self._through)
        return self._nodes[key]

    def _node(self, key: str, through: bool) -> Node:
        run, stage = self._recorded.get(key, (None, None))
        manifest = self._reader.manifest(key) or (self._remote(run).manifest(key) if run and through else None)
        if manifest is not None:
            kind, stage_name, digest, spec = (manifest[part] for part in ("kind", "stage", "digest", "spec"))
            inputs = {name: entry["key"] for name, entry in manifest["inputs"].items()}
        elif stage is not None:
            kind, stage_name, digest, spec = stage.kind, stage.request["stage"], stage.digest, stage.request["spec"]
            inputs = stage.request["inputs"]
        else:
            kind, stage_name, digest, spec, inputs = "artifact", "not known", "", {}, {}
        return Node(
            key=key,
            kind=kind,
            stage=stage_name,
            digest=digest,
            label=stage.label if stage else stage_name,
            run=run.id if run and stage and stage.status == "ran" else None,
            version=stage.version if stage else None,
            inputs=inputs,
            spec=mask(spec or {}),
            metrics=manifest["metrics"] if manifest else {},
            present=manifest is not None,
        )

    def _remote(self, run: RunRecord) -> StoreReader:
        """Return the view of the store of a run."""
        uri = run.spec.get("store") or ""
        if uri not in self._readers:
            self._readers[uri] = recorded_reader(self.records.root, run, self._trust)
        return self._readers[uri]

    @property
    def unread(self) -> list[str]:
        """Errors of unreachable stores."""
        return [reader.unread for reader in self._readers.values() if reader.unread]

    def ancestors(self, key: str) -> list[Node]:
        """Return an artifact and all its inputs, direct and indirect, in topological order, itself first."""
        return self._walk(key, lambda current: self.node(current).inputs.values())

    def descendants(self, key: str) -> list[Node]:
        """Return an artifact and all artifacts produced from it, directly and indirectly, in topological order."""
        return self._walk(key, lambda current: self._children.get(current, ()))

    def back(self, key: str) -> list[LineageStep]:
        """Return the steps that led to an artifact, nearest first, beginning with its own."""
        nodes = self.ancestors(key)
        steps = {key: LineageStep(nodes[0])}
        belongs = {key: key}
        for node in nodes:
            if node.key not in belongs:  # a checkpoint; other artifacts belong to the step of their nearest user
                steps[node.key], belongs[node.key] = LineageStep(node), node.key
            elif node.key != belongs[node.key]:
                steps[belongs[node.key]].others.append(node)
            for below in self._training_inputs(node.key):
                belongs.setdefault(below, belongs[node.key])
        return [_ordered(step) for step in steps.values()]

    def forward(self, key: str) -> list[LineageStep]:
        """Return the steps that an artifact led to, beginning with its own, which contains the artifacts produced from
        it besides checkpoints. A checkpoint's training data, evaluations and exports belong to its step."""
        nodes = self.descendants(key)
        steps = {node.key: LineageStep(node) for node in nodes if node.key == key or node.kind in TRAINED}
        belongs = {head: head for head in steps}
        for node in reversed(nodes):  # training inputs belong to the step of their user
            if node.kind in FEEDS and node.key not in belongs:
                users = [child for child in self._children.get(node.key, ()) if child in belongs]
                own = [user for user in users if node.key in self._training_inputs(user)]  # the other users replay it
                belongs[node.key] = belongs[(own or users)[0]] if users else key
        for node in nodes:
            if node.key not in belongs:
                sources = [belongs[source] for source in node.inputs.values() if source in belongs]
                belongs[node.key] = sources[-1] if sources else key
            if node.key not in steps:
                steps[belongs[node.key]].others.append(node)
        return [_ordered(step) for step in steps.values()]

    def tags(self, key: str) -> dict[str, str]:
        """Return the origin of a checkpoint as tags of a model: the run and its commit, the version of the stage, paths
        of targets, and the digest of the checkpoint that was trained further."""
        node = self.node(key)
        run = self.runs.get(node.run or "")
        tags = {
            "made_by": node.run,
            "git_commit": run.git_commit if run else None,
            "stage_version": None if node.version is None else str(node.version),
            "parent_digest": self.node(node.inputs["start"]).digest if "start" in node.inputs else None,
        }
        for source in self._walk(key, self._training_inputs):
            tags |= {path.replace(".", "_"): target["_target_"] for path, target in targets(source.spec).items()}
        return {name: value for name, value in tags.items() if value}

    def facts(self, step: LineageStep) -> dict[str, str]:
        """Return the facts of a step by name: the run that produced it, versions of its stages, targets with their
        arguments, model and algorithm."""
        run = self.runs.get(step.head.run or "")
        facts = {
            "run": f"{run.short} {run.name} seed {run.seed}, commit {run.git_commit or 'not known'}"
            if run
            else "not known"
        }
        for node in step.nodes:
            if node.version is not None and node.stage in ORDER:
                facts.setdefault(f"version of {node.stage}", str(node.version))
        for node in step.nodes:
            for name, value in node.spec.items():
                if isinstance(value, Mapping) and name != "experiment":
                    facts.setdefault(name, _one_line(value))
                elif name == "actor":
                    facts.setdefault(name, str(value))
        return facts

    def _training_inputs(self, key: str) -> list[str]:
        """Return the inputs that belong to an artifact's step: neither its starting checkpoint nor replayed data of
        earlier rounds."""
        node = self.node(key)
        current = [
            below
            for name, below in node.inputs.items()
            if node.stage not in STAGES or not STAGES[node.stage].rounds_ago(name)
        ]
        return [below for below in current if self.node(below).kind not in TRAINED]

    @cached_property
    def _keys(self) -> set[str]:
        """Keys of all artifacts in the folder and in the records."""
        return {*self._reader.keys(), *self._recorded}

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        """Keys of the artifacts produced directly from each artifact, by its key."""
        children: dict[str, list[str]] = {}
        for key in sorted(self._keys):
            node = self._nodes.get(key) or self._node(key, through=False)  # remote requests for all keys are too slow
            for source in dict.fromkeys(node.inputs.values()):
                children.setdefault(source, []).append(key)
        return children

    def _walk(self, start: str, successors: Callable[[str], Iterable[str]]) -> list[Node]:
        """Return all nodes reachable from `start` in topological order (Kahn's algorithm), breadth first."""
        in_degree: dict[str, int] = {start: 0}
        waiting = deque([start])
        while waiting:
            for successor in dict.fromkeys(successors(waiting.popleft())):
                if successor not in in_degree:
                    waiting.append(successor)
                in_degree[successor] = in_degree.get(successor, 0) + 1
        ready, ordered = deque([start]), []
        while ready:
            ordered.append(self.node(key := ready.popleft()))
            for successor in dict.fromkeys(successors(key)):
                in_degree[successor] -= 1
                if in_degree[successor] == 0:
                    ready.append(successor)
        return ordered

    def _checkpoint(self, run: RunRecord, step: str) -> str:
        """Return the key of the checkpoint of a step; of the final policy if `step` is empty. Raises ResourceError."""
        keys = checkpoints(run)
        if not keys:
            raise ResourceError(f"run {run.short} has no checkpoint yet")
        if step and not (step.isdecimal() and int(step) in keys):
            steps = ", ".join(map(str, sorted(keys)))
            raise ResourceError(f"run {run.short} has no checkpoint of step {step}; expected one of {steps}")
        return keys[int(step)] if step else _final_policy(run) or keys[max(keys)]


def _final_policy(run: RunRecord) -> str | None:
    """Return the key of the checkpoint of the final evaluation; None if there is none yet."""
    final = next((stage for stage in run.stages if stage.label == "evaluate[final]"), None)
    return final.request["inputs"].get("policy") if final is not None else None


def _ordered(step: LineageStep) -> LineageStep:
    step.others.sort(key=lambda node: ORDER.index(node.stage) if node.stage in ORDER else len(ORDER))
    return step


def _one_line(value: Mapping[str, Any]) -> str:
    """Return a part of a spec on one line: `components.rewards.rules.outcome.Outcome turn_cost=0.1`, `grpo
    epochs=1`."""
    title = next((name for name in ("_target_", "name") if name in value), None)
    arguments = [
        f"{name}={item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)}"
        for name, item in value.items()
        if name != title
    ]
    return " ".join([*([str(value[title])] if title else []), *arguments])
