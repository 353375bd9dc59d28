"""Union of the judge models, which are the modules of `components.rewards.llm.models`, and the models that a reward
asks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from components.errors import ResourceError, SpecError
from components.models.spec import FrozenModelSpec
from components.rewards.llm.judge_model import JudgeModelSpec
from components.specs import Spec, Target, validate
from components.specs.declared import discover, union_of

JUDGE_MODELS = discover("components.rewards.llm.models", JudgeModelSpec)  # type: ignore[type-abstract]
"""Judge models by name."""

if TYPE_CHECKING:
    JudgeModel = JudgeModelSpec
else:
    JudgeModel = union_of(JUDGE_MODELS.values())


LISTING_SECONDS = 10.0
"""Time limit of the question which models a server has."""


class _Argument(Spec):
    """An argument that takes a judge model, for messages about its data."""

    judge: JudgeModel


def judge_model(value: Any) -> JudgeModelSpec:
    """Return the judge model that a program names: by a spec or its data, by LiteLLM's name `PROVIDER/MODEL`, or by the
    URL of a server that has a single model. Raises SpecError, and ResourceError if the server does not answer."""
    if isinstance(value, JudgeModelSpec):
        return value
    if isinstance(value, str):
        is_url = value.startswith(("http://", "https://"))
        value = {"name": "served", "url": value, "model": "?"} if is_url else {"name": "litellm", "model": value}
    elif not isinstance(value, Mapping):
        text = (
            f"{type(value).__name__}: expected a name of LiteLLM (PROVIDER/MODEL), a URL, or the data of a judge model"
        )
        raise SpecError.at("judge", text)
    spec: JudgeModelSpec = validate(_Argument, {"judge": dict(value)}).judge
    if value.get("model") == "?":
        return spec.model_copy(update={"model": _only_model(str(value["url"]).rstrip("/"))})
    return spec


def _only_model(url: str) -> str:
    """Return the name of the only model of a server."""
    import httpx

    try:
        reply = httpx.get(f"{url}/models", timeout=LISTING_SECONDS)
        names = [str(model["id"]) for model in reply.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        text = f"judge = {url}: the server did not list its models ({error})"
        raise ResourceError(f"{text}; start it, or name the model: {_with_model(url, 'NAME')}") from None
    if len(names) != 1:
        shown = ", ".join(names[:5]) or "none"
        text = f"{url}: the server has {len(names)} models ({shown}); expected one, or {_with_model(url, 'NAME')}"
        raise SpecError.at("judge", text)
    return names[0]


def _with_model(url: str, model: str) -> str:
    return f'judge={{"name": "served", "url": "{url}", "model": "{model}"}}'


def several(model: Any) -> list[JudgeModel]:
    """Return the models of an argument that takes one or a list, each as `judge_model` accepts it."""
    return [judge_model(item) for item in (model if isinstance(model, list) else [model])]


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


def with_models(target: Any, change: Callable[[FrozenModelSpec], FrozenModelSpec]) -> Any:
    """Return a reward, or a part of it, with another model in place of each that a local judge loads."""
    if isinstance(target, JudgeModelSpec):
        return target.with_model(change)
    if isinstance(target, Target):
        return target.model_copy(update={"arguments": with_models(target.arguments, change)})
    if isinstance(target, Spec):
        fields = {name: getattr(target, name) for name in type(target).model_fields}
        return target.model_copy(update=with_models(fields, change))
    if isinstance(target, Mapping):
        return {name: with_models(value, change) for name, value in target.items()}
    return [with_models(item, change) for item in target] if isinstance(target, list) else target


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
