"""The keys that a run will need, looked for before it begins: whoever lacks one learns it before anything is played or
paid for."""

from __future__ import annotations

from collections.abc import Iterator

from components.errors import ResourceError
from components.inference.spec import RemoteSpec
from components.rewards.asking.spec import LiteLLMJudge, ServedJudge, asked_by
from flows.spec import ExperimentSpec


def check_keys(*specs: ExperimentSpec) -> None:
    """Raises ResourceError, which names every key that is not in the environment."""
    if missing := list(dict.fromkeys(text for spec in specs for text in missing_keys(spec))):
        raise ResourceError("\n".join(missing))


def missing_keys(spec: ExperimentSpec) -> Iterator[str]:
    """What is missing for the remote engines and the judges of an experiment."""
    teachers = [one for one in (spec.warmup and spec.warmup.teacher, spec.collect.teacher) if one]
    engines = [spec.inference, *(one.inference for one in teachers)]
    judges = [*asked_by(spec.reward), *asked_by(spec.evaluate.reward)]
    for one in [*engines, *judges]:
        if isinstance(one, RemoteSpec | ServedJudge | LiteLLMJudge):
            try:
                one.key()
            except ResourceError as error:
                yield str(error)
