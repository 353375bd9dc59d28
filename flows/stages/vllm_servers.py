"""vLLM servers of a run: one for each model, started for the first stage that needs it, stopped at the end of the run.

`Context.warm` of the main process holds them. A stage in another process on this machine receives the URL in its
request; the URL is not part of the stage key.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.inference.spec import VllmSpec
from components.models.spec import ModelSpec, TeacherSpec
from flows.stages.base import Context, Request

if TYPE_CHECKING:
    from components.inference.vllm.server import VllmServer

OURS = ("python", "port", "max_lora_rank", "max_loras", "gpu_memory", "cpu_cache_gb", "sleep", "arguments")
"""Fields of the spec that identify a server of the run."""


def vllm_server(model: ModelSpec, inference: VllmSpec, context: Context) -> VllmServer:
    """Return the server of this model; start it if it is not running. Raises the errors of `VllmServer`."""
    from components.inference.vllm.server import VllmServer
    from components.models.weights import prepare

    recipe = [model.base() | model.content(), inference.model_dump(mode="json", include=set(OURS))]

    def build() -> VllmServer:
        logs = context.cache.parent / "logs"
        log = logs / f"vllm-{Path(model.name).name}.log"
        return VllmServer(inference, model, prepare(model, context.cache), log, context.on_wait)

    return context.warm.get(f"vllm {json.dumps(recipe)}", recipe, build)


def with_server_urls(request: Request, context: Context) -> Request:
    """Return the request with the URLs of the servers that it needs, for a stage in another process."""
    spec = dict(request.spec)
    if "inference" in spec and spec.get("actor") != "solver":
        model = ModelSpec(**spec["model"])
        teacher = spec.get("teacher") if spec.get("actor") == "teacher" else None
        if teacher:
            model = TeacherSpec(**teacher).model(model.max_length)
        spec["inference"] = _served(spec["inference"], model, context)
    collect_teacher = (spec.get("collect") or {}).get("teacher")
    if collect_teacher and collect_teacher.get("model"):
        model = TeacherSpec(**collect_teacher["model"]).model(spec["model"]["max_length"])
        collect_teacher = {**collect_teacher, "inference": _served(collect_teacher["inference"], model, context)}
        spec["collect"] = {**spec["collect"], "teacher": collect_teacher}
    return replace(request, spec=spec)


def _served(inference: dict[str, Any], model: ModelSpec, context: Context) -> dict[str, Any]:
    if inference.get("name") != "vllm" or inference.get("urls"):
        return inference
    server = vllm_server(model, VllmSpec(**inference), context)
    return {**inference, "urls": [server.url]}
