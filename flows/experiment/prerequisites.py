"""Check of external prerequisites before a run starts: API keys, prices of judges, the Python environment of vLLM,
secrets of remote machines, what the model's files allow. A run that lacks one fails before it computes or pays for
anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from components.compute.local.spec import LocalPlace
from components.compute.place import Place
from components.errors import ResourceError
from components.inference.spec import InferenceSpec
from components.rewards.llm.spec import JudgeModel, asked_by
from flows.experiment.checks import computing
from flows.experiment.spec import ExperimentSpec
from flows.stages import DISTRIBUTED, PLACED, PLAYING


def check_keys(*specs: ExperimentSpec) -> None:
    """Raise ResourceError with all missing API keys and, if there is a budget, all judges without a known price."""
    refuse(text for spec in specs for text in lacking(spec))


def refuse(lacks: Iterable[str]) -> None:
    """Raise ResourceError if there is any message, with all messages without duplicates."""
    if missing := list(dict.fromkeys(lacks)):
        raise ResourceError("\n".join(missing))


def lacking(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message for each missing prerequisite of the engines, judges and places of an experiment."""
    teachers = [teacher for teacher in (spec.warmup and spec.warmup.teacher, spec.collect.teacher) if teacher]
    engines = [spec.inference, *(teacher.inference for teacher in teachers)]
    judges = [*asked_by(spec.reward), *asked_by(spec.evaluate.reward)]
    yield from _lacked_by_engines(spec, engines, PLAYING)
    yield from lacked_by(judges, spec.judge.budget)
    authors = [model for model in asked_by(spec.flow) if model not in judges]
    yield from (text.replace("reward.model", "flow.author") for text in lacked_by(authors, spec.judge.budget))
    yield from _lacked_by_places(spec, PLACED)
    yield from _unsuitable_dtypes(spec)
    yield from _graphs_without_gpu(spec)


def _graphs_without_gpu(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message if CUDA graphs are requested for a stage that computes on a CPU."""
    if not spec.model.cuda_graphs:
        return
    from components.models.cuda_graphs import require_gpu
    from components.models.weights import pick_device

    for stage in ("collect", "train", "evaluate"):
        hardware = spec.compute.place(stage).hardware
        try:
            if hardware in ("this machine", "cpu"):
                require_gpu(pick_device(spec.model.device) if hardware == "this machine" else hardware)
        except ResourceError as error:
            yield str(error)


def _unsuitable_dtypes(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message for each place of a training that does not support what `model.dtype=auto` is there."""
    stages = {spec.compute.placement(stage): stage for stage in DISTRIBUTED} if spec.model.dtype == "auto" else {}
    for place, stage in stages.items():
        try:
            model = spec.resolve_dtypes(spec.model, stage)
        except ResourceError as error:
            yield str(error)
            return
        yield from map(str, computing.training(spec.compute, place, spec.algorithm, model, spec.ewc, spec.collect))


def check_used(
    spec: ExperimentSpec, engines: Iterable[InferenceSpec], judges: Iterable[JudgeModel], stages: Iterable[str] = ()
) -> None:
    """Raise ResourceError with all missing prerequisites of these engines and judges, and of the places where these
    stages run."""
    stages = list(stages)
    playing = [stage for stage in stages if stage in PLAYING]
    refuse(
        [
            *_lacked_by_engines(spec, engines, playing),
            *lacked_by(judges, spec.judge.budget),
            *_lacked_by_places(spec, stages),
        ]
    )


def _lacked_by_places(spec: ExperimentSpec, stages: Iterable[str]) -> Iterator[str]:
    """Yield a message for each missing prerequisite of the places where stages run."""
    used = {spec.compute.placement(stage) for stage in stages}
    for name, place in ((name, place) for name, place in spec.compute.places.items() if name in used):
        yield from (f"compute.places.{name}.{message}" for message in place.prerequisites())


def _lacked_by_engines(spec: ExperimentSpec, engines: Iterable[InferenceSpec], stages: Iterable[str]) -> Iterator[str]:
    """Yield a message for each missing prerequisite of engines on the places of these stages; of this process without a
    stage."""
    compute = spec.compute
    places: dict[str, Place] = {compute.placement(stage): compute.place(stage) for stage in stages}
    for engine in engines:
        for name, place in (places or {LocalPlace().name: LocalPlace()}).items():
            try:
                place.check_engine(name, engine)
            except ResourceError as error:
                yield str(error)


def lacked_by(judges: Iterable[JudgeModel], budget: float | None) -> Iterator[str]:
    """Yield a message for each missing prerequisite. budget: limit on the cost of a stage's judges, in the currency of
    their prices."""
    for judge in judges:
        try:
            judge.check_prerequisites(budget)
        except ResourceError as error:
            yield str(error)


def check_model(spec: ExperimentSpec, cache: Path) -> None:
    """Raise ResourceError if the model is in `cache` and has no layers of the adapter's names, is not exact for
    sequences of the maximum length, or cannot be sampled from by the engine, sharded by the strategy or exported in the
    requested formats. A model that is not there yet is checked after the download."""
    from components.models import targets
    from components.models.weights import check_length, folder

    base_dir = folder(spec.model, cache)
    if not (base_dir / "config.json").is_file():
        return
    if spec.model.lora is not None:
        targets.check(base_dir, spec.model.lora)
    spec.inference.check_model(spec.resolve_dtypes(spec.model, "collect"), base_dir)
    check_length(spec.model, base_dir)
    _check_sharding(spec, base_dir)
    if spec.deploy.mode != "none" and "gguf" in spec.deploy.formats:
        from components.deployment.gguf import check_architecture

        check_architecture(base_dir)


def _check_sharding(spec: ExperimentSpec, base_dir: Path) -> None:
    """Raise ResourceError if a training shards a model whose layers cannot be sharded."""
    for stage in DISTRIBUTED:
        group = spec.compute.place(stage).group
        if group is not None and group.size > 1 and group.strategy != "ddp":
            from components.algorithms.policy import sharded
            from components.models.stored_names import skeleton

            sharded.check(skeleton(base_dir), spec.model, group.strategy)
            return
