"""Check of external prerequisites before a run starts: API keys, prices of judges, the Python environment of vLLM,
secrets of remote machines. A run that lacks one fails before it computes or pays for anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
