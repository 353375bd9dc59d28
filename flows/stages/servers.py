"""Servers of a run, which stages in other processes on this machine use too: their requests carry the URLs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from components.inference.spec import ENGINES
from components.models.spec import FrozenModelSpec, ModelSpec
from flows.stages.base import Context, Request


def with_server_urls(request: Request, context: Context) -> Request:
    """Return the request with the URLs of the servers that it needs, for a stage in another process."""
    spec = dict(request.spec)
    if "inference" in spec and spec.get("actor") != "solver":
        model = ModelSpec(**spec["model"])
        teacher = spec.get("teacher") if spec.get("actor") == "teacher" else None
        if teacher:
            model = FrozenModelSpec(**teacher).model(model.max_length)
        spec["inference"] = _served(spec["inference"], model, context)
    collect_teacher = (spec.get("collect") or {}).get("teacher")
    if collect_teacher and collect_teacher.get("model"):
        model = FrozenModelSpec(**collect_teacher["model"]).model(spec["model"]["max_length"])
        collect_teacher = {**collect_teacher, "inference": _served(collect_teacher["inference"], model, context)}
        spec["collect"] = {**spec["collect"], "teacher": collect_teacher}
    return replace(request, spec=spec)


def _served(inference: dict[str, Any], model: ModelSpec, context: Context) -> dict[str, Any]:
    engine = ENGINES[inference["name"]].model_validate(inference)
    shared = engine.share(model, context)
    return inference if shared is engine else shared.model_dump(mode="json")
