"""Commands of docs/guides/scale.md: each experiment on one GPU, and on a cluster.

    python -m docs.scale

The overrides that all experiments share are constants; those that an experiment needs besides follow from its
composed spec. `tests/docs/test_scale.py` composes and plans every command.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import yaml

from components.errors import SpecError
from components.models.spec import FrozenModelSpec
from components.specs import validate
from docs.generated import Generated, table
from flows.experiment.compose import check
from flows.experiment.composer import Composer
from flows.experiment.config_loader import CONF
from flows.experiment.spec import ExperimentSpec
from flows.terminal.help import experiments

TESTS = ("quickstart", "smoke")
"""Experiments that are not part of the tables: the quickstart is shown in full, and smoke tests the flow."""
ONE_GPU = [
    "model=qwen3_0_6b",
    "model.dtype=bfloat16",
    "model.max_length=8192",
    "agent.max_tokens=1024",
    "collect.concurrency=256",
    "evaluate.concurrency=256",
    "algorithm.pack_tokens=16384",
]
VLLM = ["inference=vllm"]
CLUSTER = [
    "model=qwen3_8b",
    *ONE_GPU[1:],
    "algorithm.gradient_checkpointing=true",
    "compute=sky",
    "compute.places.sky_h100.accelerators=H100:8",
    "store=s3://BUCKET/PREFIX",
]
SHARDED = ["compute.places.sky_h100.strategy=fsdp"]
TEACHERS = {False: "Qwen/Qwen3-8B", True: "Qwen/Qwen3-32B"}
"""Teacher of the student of one GPU, and of that of the cluster."""
COLLECTED = ["collect.scenarios=256"]
"""Overrides of an experiment with rounds of episodes on the cluster."""


def command(experiment: str, *, cluster: bool) -> list[str]:
    """Return the overrides of an experiment on one GPU or on the cluster, the experiment first."""
    return [f"+experiment={experiment}", *(CLUSTER if cluster else ONE_GPU), *own(experiment, cluster=cluster)]


def own(experiment: str, *, cluster: bool) -> list[str]:
    """Return the overrides that an experiment needs besides the shared ones."""
    return [*_placed(experiment, cluster), *_learning_rates(experiment), *_sources(experiment, cluster)]


def _placed(experiment: str, cluster: bool) -> Iterator[str]:
    """Yield the engine, the sharding and the size of the rounds."""
    spec = _spec(experiment)
    if _trains_adapter(experiment) and spec.model.quantization == "none":
        yield from VLLM  # it loads adapters on weights that are not quantized
        if cluster:
            yield from SHARDED
    if cluster and spec.rounds:
        yield from COLLECTED
        if spec.flow.generates:
            yield "flow.count=320"  # of which 64 are held out


def _learning_rates(experiment: str) -> Iterator[str]:
    """Yield the learning rates of conf/algorithm in place of those of the experiment, which are for its small model; a
    tenth of them for full fine-tuning. A sweep chooses those of its search space itself."""
    spec = _spec(experiment)
    names = {"algorithm": spec.algorithm.name} if spec.rounds or spec.flow.offline else {}
    if spec.warmup is not None:
        names["warmup.algorithm"] = spec.warmup.algorithm.name
    swept = _block(experiment, "hydra").get("sweeper", {}).get("params", {})
    factor = 1.0 if _trains_adapter(experiment) else 0.1
    for path, name in names.items():
        if f"{path}.learning_rate" not in swept:
            yield f"{path}.learning_rate={factor * _default(name):.0e}".replace("e-0", "e-")


def _sources(experiment: str, cluster: bool) -> Iterator[str]:
    """Yield the data and the teachers."""
    spec = _spec(experiment)
    if spec.flow.offline:
        yield "data.path=FILE"
    teachers: dict[str, FrozenModelSpec | None] = {"algorithm.teacher": spec.algorithm.teacher_model}
    if spec.warmup is not None and spec.warmup.teacher is not None:
        teachers["warmup.teacher.model"] = spec.warmup.teacher.model
    for path, teacher in teachers.items():
        if teacher is not None:
            yield from (f"{path}.name={TEACHERS[cluster]}", f"{path}.source=hub", f"{path}.dtype=bfloat16")


@functools.cache
def _spec(experiment: str) -> ExperimentSpec:
    """Return the spec of an experiment. No override of the tables depends on its environment, so another one stands
    in for an environment whose package is not installed."""
    override = f"+experiment={experiment}"
    try:
        return check([override])[0]
    except SpecError:
        data = _composed(override)
        counts = {name: data["environment"][name] for name in ("train", "heldout")}
        data["environment"] = {**_composed("environment=tictactoe")["environment"], **counts}
        return validate(ExperimentSpec, data)


def _composed(override: str) -> dict[str, Any]:
    """Return what Hydra composes, without checks."""
    composer = Composer()
    data, _ = composer.point(composer.parse([override])[0])
    assert data is not None
    return data


@functools.cache
def _block(experiment: str, name: str) -> dict[str, Any]:
    """Return the block of this name in the file of the experiment."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text).get(name) or {}


def _trains_adapter(experiment: str) -> bool:
    """Return False if the experiment trains all weights of any model."""
    return _block(experiment, "model").get("lora", {}) is not None


@functools.cache
def _default(algorithm: str) -> float:
    """Return the learning rate of an option of conf/algorithm."""
    return float(_composed(f"algorithm={algorithm}")["algorithm"]["learning_rate"])


def names() -> list[str]:
    """Return the experiments of the table."""
    return [name for name in experiments() if name not in TESTS]


def shared() -> str:
    """Return the shared overrides as assignments of two shell variables."""
    lines = [f'{name}="{" ".join(overrides)}"' for name, overrides in (("ONE_GPU", ONE_GPU), ("CLUSTER", CLUSTER))]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def commands() -> str:
    """Return the table of the overrides of each experiment, with equal rows merged."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in names():
        cells = [" ".join(own(name, cluster=cluster)) for cluster in (False, True)]
        rows.setdefault((cells[0], cells[1]), []).append(f"`{name}`")
    head = ["Experiments", "One GPU: `$ONE_GPU` and", "Cluster: `$CLUSTER` and"]
    return table(
        head, [[", ".join(labels), *(f"`{cell}`" if cell else "" for cell in cells)] for cells, labels in rows.items()]
    )


PAGES = (
    Generated("guides/scale.md", "scale-shared", shared),
    Generated("guides/scale.md", "scale-commands", commands),
)

if __name__ == "__main__":
    for page in PAGES:
        page.write()
