"""What is exported, and where it is put into use."""

from __future__ import annotations

from collections.abc import Iterator

from components.deployment.spec import DeploySpec
from components.errors import Problem
from components.models.spec import ModelSpec


def formats(deploy: DeploySpec, model: ModelSpec) -> Iterator[Problem]:
    if deploy.mode == "none" and deploy.target is not None:
        yield Problem("deploy.target", f"{deploy.target.name}: deploy.mode=none exports nothing; expected export")
    if "adapter" in deploy.formats and model.lora is None and deploy.mode != "none":
        yield Problem("deploy.formats", "adapter: model.lora is null, and all weights are trained; expected merged")
    if deploy.target is not None and "merged" not in deploy.formats:
        yield Problem(
            "deploy.formats", f"{', '.join(deploy.formats)}: deploy.target takes the merged model; expected merged too"
        )
