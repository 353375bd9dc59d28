"""Where stages run."""

from __future__ import annotations

from collections.abc import Iterator

from components.compute.sky.spec import SkyPlace
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


def elsewhere(compute: ComputeSpec, store: str | None) -> Iterator[Problem]:
    """A machine that is not ours reaches the artifacts."""
    for name in sorted({compute.default, *compute.stages.values()}):
        place = compute.places.get(name)
        if not isinstance(place, SkyPlace):
            continue
        if store is None:
            example = "file:///SHARED/FOLDER" if place.shares_folders else "s3://BUCKET/PREFIX"
            message = (
                f"null, but stages run on other machines ({name}); expected a URI that both reach: store={example}"
            )
            yield Problem("store", message)
        elif store.startswith(("file:", "memory:", "local:")) and not place.shares_folders:
            message = (
                f"{store!r} is on this machine, and {place.infra or 'a cloud'} does not reach it ({name}); expected an "
                "object store: store=s3://BUCKET/PREFIX. Folders are shared with slurm, kubernetes and ssh only"
            )
            yield Problem("store", message)
