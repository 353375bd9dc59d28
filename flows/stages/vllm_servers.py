"""The vLLM servers of a run: one for each model, started for the first stage that needs it, ended with the run.

The process that runs stages holds them, among what stays warm. A stage in a process of its own on this machine is told
the address in its request; no stage key knows of it.
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
"""What of a specification decides which server is started."""


def vllm_server(model: ModelSpec, inference: VllmSpec, context: Context) -> VllmServer:
    """The server of this model, started where it is not up. Raises what `VllmServer` raises."""
    from components.inference.vllm.server import VllmServer
    from components.models.weights import prepare

    recipe = [model.base() | model.content(), inference.model_dump(mode="json", include=set(OURS))]

    def build() -> VllmServer:
        logs = context.cache.parent / "logs"
        log = logs / f"vllm-{Path(model.name).name}.log"
        return VllmServer(inference, model, prepare(model, context.cache), log, context.on_wait)

    return context.warm.get(f"vllm {json.dumps(recipe)}", recipe, build)


def told(request: Request, context: Context) -> Request:
    """The same request, with the addresses of the servers that it needs, for a stage in another process."""
    spec = dict(request.spec)
    if "inference" in spec and spec.get("actor") != "solver":
        model = ModelSpec(**spec["model"])
        taught = spec.get("teacher") if spec.get("actor") == "teacher" else None
        if taught:
            model = TeacherSpec(**taught).model(model.max_length)
        spec["inference"] = _served(spec["inference"], model, context)
    beside = (spec.get("collect") or {}).get("teacher")
    if beside and beside.get("model"):
        model = TeacherSpec(**beside["model"]).model(spec["model"]["max_length"])
        beside = {**beside, "inference": _served(beside["inference"], model, context)}
        spec["collect"] = {**spec["collect"], "teacher": beside}
    return replace(request, spec=spec)


def _served(inference: dict[str, Any], model: ModelSpec, context: Context) -> dict[str, Any]:
    if inference.get("name") != "vllm" or inference.get("urls"):
        return inference
    server = vllm_server(model, VllmSpec(**inference), context)
    return {**inference, "urls": [server.url]}
