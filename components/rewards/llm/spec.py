"""Union of the judge models, which are the modules of `components.rewards.llm.models`, and the models that a reward
asks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from components.rewards.llm.judge_model import JudgeModelSpec
from components.specs import Spec, Target
from components.specs.declared import discover, union_of

JUDGE_MODELS = discover("components.rewards.llm.models", JudgeModelSpec)  # type: ignore[type-abstract]
"""Judge models by name."""

if TYPE_CHECKING:
    JudgeModel = JudgeModelSpec
else:
    JudgeModel = union_of(JUDGE_MODELS.values())


def several(model: JudgeModel | list[JudgeModel]) -> list[JudgeModel]:
    """Return the models of an argument that takes one or a list."""
    return model if isinstance(model, list) else [model]


def asked_by(target: Any) -> list[JudgeModel]:
    """Return the models that a reward and its parts ask, found in the arguments of its target."""
    if isinstance(target, JudgeModelSpec):
        return [target]
    if isinstance(target, Target):
        return asked_by(target.arguments)
    if isinstance(target, Spec):
        target = {name: getattr(target, name) for name in type(target).model_fields}
    values = target.values() if isinstance(target, Mapping) else target if isinstance(target, list) else ()
    return [model for value in values for model in asked_by(value)]


def asks_policy(target: Target) -> bool:
    """Return True if a reward asks the policy whose episodes it judges."""
    return any(model.asks_policy for model in asked_by(target))


def labels(models: list[JudgeModel]) -> list[str]:
    """Return unique display names of several judges."""
    names: list[str] = []
    for model in models:
        label = re.sub(r"[^\w.-]+", "_", model.label.rpartition("/")[2]).strip("_") or "judge"
        duplicates = sum(existing == label or existing.startswith(f"{label}-") for existing in names)
        names.append(f"{label}-{duplicates + 1}" if duplicates else label)
    return names
