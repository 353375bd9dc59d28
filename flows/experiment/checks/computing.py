"""Where stages run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from components.algorithms.spec import AlgorithmSpec, EWCSpec, PPOSpec
from components.compute.sky.spec import SkyPlace
from components.compute.spec import AcceleratePlace, ComputeSpec, StageName
from components.compute.torchrun import TOGETHER
from components.errors import Problem
from components.models.spec import ModelSpec
from components.rollout.spec import CollectSpec
from components.specs import nearest

STAGES: tuple[StageName, ...] = get_args(StageName)


def places(compute: ComputeSpec) -> Iterator[Problem]:
    """Stages run in places that there are."""
    chosen = {"default": compute.default} | {f"stages.{stage}": name for stage, name in compute.stages.items()}
    for key, name in chosen.items():
        if name not in compute.places:
            message = f"{name!r}: expected one of {', '.join(compute.places)}"
            yield Problem(f"compute.{key}", message, nearest(name, compute.places))


def elsewhere(compute: ComputeSpec, store: str | None) -> Iterator[Problem]:
    """A machine that is not ours reaches the artifacts."""
    for name in sorted({compute.default, *compute.stages.values()}):
        place = compute.places.get(name)
        if isinstance(place, SkyPlace):
            yield from reached(name, place, store, "stages")


def reached(name: str, place: SkyPlace, store: str | None, what: str) -> Iterator[Problem]:
    """The store is one that the machines of a place reach. what: runs there."""
    if store is None:
        example = "file:///SHARED/FOLDER" if place.shares_folders else "s3://BUCKET/PREFIX"
        message = f"null, but {what} run on other machines ({name}); expected a URI that both reach: store={example}"
        yield Problem("store", message)
    elif store.startswith(("file:", "memory:", "local:")) and not place.shares_folders:
        message = (
            f"{store!r} is on this machine, and {place.infra or 'a cloud'} does not reach it ({name}); expected an "
            "object store: store=s3://BUCKET/PREFIX. Folders are shared with slurm, kubernetes and ssh only"
        )
        yield Problem("store", message)


def together(
    compute: ComputeSpec, algorithm: AlgorithmSpec, model: ModelSpec, ewc: EWCSpec | None, collect: CollectSpec
) -> Iterator[Problem]:
    """What several processes train, they can."""
    for stage in STAGES:
        name = compute.placement(stage)
        place = compute.places.get(name)
        if not isinstance(place, AcceleratePlace):
            continue
        if stage not in TOGETHER:
            key = f"compute.stages.{stage}" if stage in compute.stages else "compute.default"
            message = (
                f"{name!r} runs {' and '.join(TOGETHER)} in several processes, and no other stage; expected another"
            )
            yield Problem(key, f"{message} place, as compute.stages.train={name}")
    used = {compute.placement(stage) for stage in STAGES if stage in TOGETHER}
    for name, place in compute.places.items():
        if name not in used or not isinstance(place, AcceleratePlace | SkyPlace) or place.group == 1:
            continue
        key = f"compute.places.{name}"
        if place.group > collect.scenarios:
            nodes = f" on each of {place.nodes} nodes" if isinstance(place, SkyPlace) and place.nodes > 1 else ""
            yield Problem(
                f"{key}.processes",
                f"{place.processes}{nodes}, and a round has collect.scenarios={collect.scenarios}: there would be "
                f"processes without a group to compute; expected at most {collect.scenarios}{' in all' * bool(nodes)}",
            )
        if place.strategy == "ddp":
            continue
        if model.quantization != "none":
            yield Problem(f"{key}.strategy", f"{place.strategy}: model.quantization={model.quantization}; expected ddp")
        if model.lora is None and model.dtype != "float32":
            yield Problem(
                f"{key}.strategy",
                f"{place.strategy}: all weights learn (model.lora=null), and model.dtype={model.dtype}; expected "
                "model.dtype=float32, model.lora with a rank, or ddp",
            )
        if model.lora is None and (ewc is not None or isinstance(algorithm, PPOSpec)):
            what = "ewc" if ewc is not None else algorithm.name
            yield Problem(
                f"{key}.strategy",
                f"{place.strategy}: all weights learn (model.lora=null), and {what} is not distributed in parts then; "
                "expected ddp, or model.lora with a rank",
            )
