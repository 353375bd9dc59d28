"""Checks of the places where stages run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from components.algorithms.continual.spec import EWCSpec
from components.algorithms.spec import AlgorithmSpec
from components.compute.sky.spec import SkyPlace
from components.compute.spec import AcceleratePlace, ComputeSpec, StageName
from components.compute.torchrun import TOGETHER
from components.errors import Problem
from components.models.spec import ModelSpec
from components.rollout.spec import CollectSpec
from components.specs import nearest

STAGES: tuple[StageName, ...] = get_args(StageName)


def places(compute: ComputeSpec) -> Iterator[Problem]:
    """Check that `compute.places` defines each place that a stage uses."""
    chosen = {"default": compute.default} | {f"stages.{stage}": name for stage, name in compute.stages.items()}
    for key, name in chosen.items():
        if name not in compute.places:
            message = f"{name!r}: expected one of {', '.join(compute.places)}"
            yield Problem(f"compute.{key}", message, nearest(name, compute.places))


def remote_store(compute: ComputeSpec, store: str | None) -> Iterator[Problem]:
    """Check that remote machines can reach the artifact store."""
    for name in sorted({compute.default, *compute.stages.values()}):
        place = compute.places.get(name)
        if isinstance(place, SkyPlace):
            yield from unreachable_store(name, place, store, "stages")


def unreachable_store(name: str, place: SkyPlace, store: str | None, workload: str) -> Iterator[Problem]:
    """Yield a problem if the machines of a place cannot reach the store. workload: what runs there, for the message."""
    if store is None:
        example = "file:///SHARED/FOLDER" if place.shares_folders else "s3://BUCKET/PREFIX"
        message = (
            f"null, but {workload} run on remote machines ({name}); expected a URI that both machines reach: "
            f"store={example}"
        )
        yield Problem("store", message)
    elif store.startswith(("file:", "memory:", "local:")) and not place.shares_folders:
        message = (
            f"{store!r} is on this machine, and {place.infra or 'a cloud'} cannot reach it ({name}); expected an "
            "object store: store=s3://BUCKET/PREFIX. Only slurm, kubernetes and ssh share folders"
        )
        yield Problem("store", message)


def several_processes(
    compute: ComputeSpec, algorithm: AlgorithmSpec, model: ModelSpec, ewc: EWCSpec | None, collect: CollectSpec
) -> Iterator[Problem]:
    """Check that stages, the number of groups, and the model support training in several processes."""
    for stage in STAGES:
        name = compute.placement(stage)
        place = compute.places.get(name)
        if not isinstance(place, AcceleratePlace):
            continue
        if stage not in TOGETHER:
            key = f"compute.stages.{stage}" if stage in compute.stages else "compute.default"
            message = (
                f"{name!r} runs in several processes, which only {' and '.join(TOGETHER)} support; expected another "
            )
            yield Problem(key, f"{message}place. Assign it to a single stage: compute.stages.train={name}")
    used = {compute.placement(stage) for stage in STAGES if stage in TOGETHER}
    for name, place in compute.places.items():
        if name not in used or not isinstance(place, AcceleratePlace | SkyPlace) or place.group == 1:
            continue
        key = f"compute.places.{name}"
        if place.group > collect.scenarios:
            nodes = f" on each of {place.nodes} nodes" if isinstance(place, SkyPlace) and place.nodes > 1 else ""
            yield Problem(
                f"{key}.processes",
                f"{place.processes}{nodes}, but a round has collect.scenarios={collect.scenarios} groups: some "
                f"processes would have none; expected at most {collect.scenarios}{' in total' * bool(nodes)}",
            )
        if place.strategy == "ddp":
            continue
        if model.quantization != "none":
            yield Problem(
                f"{key}.strategy",
                f"{place.strategy}: cannot shard a quantized model (model.quantization={model.quantization}); expected "
                "ddp",
            )
        if model.lora is None and model.dtype != "float32":
            yield Problem(
                f"{key}.strategy",
                f"{place.strategy}: trains all weights (model.lora=null) in float32 only, but "
                f"model.dtype={model.dtype}; expected model.dtype=float32, model.lora with a rank, or ddp",
            )
        if model.lora is None and (ewc is not None or algorithm.has_critic):
            feature = "ewc" if ewc is not None else algorithm.name
            yield Problem(
                f"{key}.strategy",
                f"{place.strategy}: {feature} does not support sharded training of all weights (model.lora=null); "
                "expected ddp, or model.lora with a rank",
            )
