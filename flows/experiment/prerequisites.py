"""What a run will need and may lack: keys, prices, the environment of vLLM. It is looked for before the run begins, so
that it is known before anything is played or paid for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from components.errors import ResourceError
from components.inference.spec import InferenceSpec, RemoteSpec, VllmSpec
from components.rewards.llm.spec import JudgeModel, LiteLLMJudge, ServedJudge, asked_by
from flows.experiment.spec import ExperimentSpec


def check_keys(*specs: ExperimentSpec) -> None:
    """Raises ResourceError, which names every key that is not in the environment, and every judge whose price nobody
    knows though a budget is to be kept."""
    refuse(text for spec in specs for text in lacking(spec))


def refuse(lacks: Iterable[str]) -> None:
    """Raises ResourceError where anything is lacking."""
    if missing := list(dict.fromkeys(lacks)):
        raise ResourceError("\n".join(missing))


def lacking(spec: ExperimentSpec) -> Iterator[str]:
    """What the remote engines and the judges of an experiment lack."""
    teachers = [one for one in (spec.warmup and spec.warmup.teacher, spec.collect.teacher) if one]
    engines = [spec.inference, *(one.inference for one in teachers)]
    return lacked_by([*engines, *asked_by(spec.reward), *asked_by(spec.evaluate.reward)], spec.judge.budget)


def lacked_by(asked: Iterable[InferenceSpec | JudgeModel], budget: float | None) -> Iterator[str]:
    """What these lack. budget: of a stage, for its judges."""
    for one in asked:
        if isinstance(one, RemoteSpec | VllmSpec | ServedJudge | LiteLLMJudge):
            try:
                one.key()
                if isinstance(one, VllmSpec) and not one.urls:
                    _ = one.interpreter
            except ResourceError as error:
                yield str(error)
            else:
                if isinstance(one, LiteLLMJudge) and one.price is None and budget is not None:
                    yield from _unpriced(one.model, budget)


def _unpriced(model: str, budget: float) -> Iterator[str]:
    from components.rewards.llm.litellm_import import listed

    if not listed(model):
        yield (
            f"judge.budget={budget:g} cannot be kept: LiteLLM knows no price of {model}; give it, for a million "
            "tokens: reward.model.price={input: 2.0, output: 8.0}; or judge.budget=null"
        )
