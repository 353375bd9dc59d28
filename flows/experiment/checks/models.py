"""Which models are named, and whether what is named on this machine is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.algorithms.spec import DistillSpec
from components.errors import ArtifactError, Problem
from components.inference.spec import RemoteSpec
from components.models.spec import ModelSpec
from components.rollout.spec import CollectSpec
from flows.experiment.sections import WarmupSpec


def local_model(model: ModelSpec) -> Iterator[Problem]:
    if model.source != "hub" or Path(model.name).is_dir():
        return
    if model.name.startswith(("/", ".", "~")) or model.name.count("/") > 1:
        yield Problem(
            "model.name", f"there is no folder {model.name!r}; expected one, or a name on the Hugging Face hub"
        )


def teachers(algorithm: Any, warmup: WarmupSpec | None, collect: CollectSpec) -> Iterator[Problem]:
    found = {"algorithm.teacher": algorithm.teacher} if isinstance(algorithm, DistillSpec) else {}
    playing = {"warmup.teacher": warmup.teacher if warmup else None, "collect.teacher": collect.teacher}
    for path, one in playing.items():
        if one is None:
            continue
        embedded = not isinstance(one.inference, RemoteSpec)
        if path == "warmup.teacher" and one.samples > 1 and one.temperature == 0:
            yield Problem(
                f"{path}.samples",
                f"{one.samples}: {path}.temperature=0 plays each of them alike; expected 1, or a temperature above 0",
            )
        if embedded and one.model is None:
            yield Problem(f"{path}.model", f"null, and inference.name={one.inference.name} plays a model: name one")
        elif one.model is not None and not embedded:
            yield Problem(f"{path}.model", "given, but a server plays; expected null, or inference.name=embedded")
        elif one.model is not None:
            found[f"{path}.model"] = one.model
    for path, teacher in found.items():
        try:
            teacher.adapter_dir()
        except ArtifactError as error:
            yield Problem(f"{path}.adapter", str(error).removeprefix("teacher.adapter: "))
        for problem in local_model(teacher.model(max_length=16)):
            yield Problem(f"{path}.{problem.path.removeprefix('model.')}", problem.message)
