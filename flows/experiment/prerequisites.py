"""Check of external prerequisites before a run starts: API keys, prices of judges, the Python environment of vLLM,
secrets of remote machines. A run that lacks one fails before it computes or pays for anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from components.errors import ResourceError
from components.inference.spec import InferenceSpec, RemoteSpec, VllmSpec
from components.rewards.llm.spec import JudgeModel, LiteLLMJudge, ServedJudge, asked_by
from flows.experiment.spec import ExperimentSpec


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
    yield from lacked_by([*engines, *asked_by(spec.reward), *asked_by(spec.evaluate.reward)], spec.judge.budget)
    for name, place in spec.compute.places_in_use.items():
        yield from (f"compute.places.{name}.{message}" for message in place.prerequisites())


def lacked_by(asked: Iterable[InferenceSpec | JudgeModel], budget: float | None) -> Iterator[str]:
    """Yield a message for each missing prerequisite of the engines and judges. budget: limit on the cost of
    a stage's judges, in the currency of their prices."""
    for engine in asked:
        if isinstance(engine, RemoteSpec | VllmSpec | ServedJudge | LiteLLMJudge):
            try:
                engine.key()
                if isinstance(engine, VllmSpec) and not engine.urls:
                    _ = engine.interpreter
            except ResourceError as error:
                yield str(error)
            else:
                if isinstance(engine, LiteLLMJudge) and engine.price is None and budget is not None:
                    yield from _missing_price(engine.model, budget)


def _missing_price(model: str, budget: float) -> Iterator[str]:
    from components.rewards.llm.litellm_import import listed

    if not listed(model):
        yield (
            f"judge.budget={budget:g} cannot be enforced: LiteLLM has no price for {model}; expected its price per "
            "million tokens, reward.model.price={input: 2.0, output: 8.0}, or judge.budget=null"
        )
