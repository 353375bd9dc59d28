"""Message on the engine that samples the episodes of a run sooner, by the speeds that the engines declare.

The model is simple: an engine starts once, and then samples at a constant rate, which is inversely proportional to the
number of layers of the model. The tokens of a run are at most those of all turns of all its episodes, so a run whose
responses are short may be faster with the engine that starts sooner: the message names the number at which they take
equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from components.compute.place import Place
from components.errors import EspalierError
from components.inference.engine_spec import MEASURED_LAYERS, EngineSpec
from components.inference.engines.embedded import EmbeddedSpec
from components.inference.engines.vllm import VllmSpec
from components.models.gpus import visible_gpus
from components.models.trained_weights import shapes
from components.models.training_memory import ModelSize
from components.models.weights import CACHE, folder
from flows.experiment.spec import ExperimentSpec
from flows.stages import STAGES
from flows.stages.base import Request
from flows.terminal.console import duration


def engine_notes(spec: ExperimentSpec, pending: Iterable[Request]) -> Iterator[str]:
    """Yield a message if stages sample with an engine of known speed, on a GPU, or on a CPU with the slower engine.
    pending: requests of the stages that are not cached."""
    chosen, root = spec.inference, Path(spec.root)
    gpu = _on_gpu(spec.compute.place("collect"), spec)
    sampling = [request for request in pending if request.spec.get("actor") == "policy"]
    episodes = sum(STAGES[request.stage].episodes(request) or 0 for request in sampling)
    if chosen.speed(root, gpu=gpu) is None or not episodes:
        return
    engines: list[EngineSpec] = [EmbeddedSpec(), VllmSpec()]
    speeds = {engine.name: speed for engine in engines if (speed := engine.speed(root, gpu=gpu)) is not None}
    scale = _layers(spec) / MEASURED_LAYERS
    tokens = episodes * spec.agent.max_turns * spec.agent.max_tokens
    seconds = {name: speed.start + scale * tokens / speed.rate for name, speed in speeds.items()}
    fastest = min(seconds, key=seconds.__getitem__)
    if not gpu and fastest == chosen.name:
        return
    estimates = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    text = (
        f"inference={fastest} is the faster engine here: for up to {tokens:,} tokens in {episodes:,} episodes the "
        f"estimates, with starts, are {estimates}"
    )
    soonest, later = sorted(speeds.values(), key=lambda speed: speed.start)
    if later.rate > soonest.rate:
        equal = (later.start - soonest.start) / scale / (1 / soonest.rate - 1 / later.rate)
        text += f"; they are equal for {equal:,.0f} tokens"
    yield text


def _on_gpu(place: Place, spec: ExperimentSpec) -> bool:
    """Return True if stages on a place compute on a GPU."""
    here = place.hardware == "this machine" and bool(visible_gpus())
    return spec.model.device == "cuda" or (spec.model.device == "auto" and (here or place.hardware == "gpu"))


def _layers(spec: ExperimentSpec) -> int:
    """Return the number of layers of the model; that of the measured one if its weights are not on this machine."""
    try:
        return ModelSize.of(shapes(folder(spec.model, Path(spec.root) / CACHE))).layers or MEASURED_LAYERS
    except (EspalierError, ValueError):
        return MEASURED_LAYERS
