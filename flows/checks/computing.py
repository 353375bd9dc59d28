"""Where stages run."""

from __future__ import annotations

from collections.abc import Iterator

from components.compute.spec import ComputeSpec
from components.errors import Problem
from components.specs import nearest


def places(compute: ComputeSpec) -> Iterator[Problem]:
    """Stages run in places that there are."""
    chosen = {"default": compute.default} | {f"stages.{stage}": name for stage, name in compute.stages.items()}
    for key, name in chosen.items():
        if name not in compute.places:
            message = f"{name!r}: expected one of {', '.join(compute.places)}"
            yield Problem(f"compute.{key}", message, nearest(name, compute.places))
