"""Checks of the export formats and the deployment target."""

from __future__ import annotations

from collections.abc import Iterator

from components.deployment.spec import DeploySpec
from components.errors import Problem
from components.models.spec import ModelSpec


def formats(deploy: DeploySpec, model: ModelSpec) -> Iterator[Problem]:
    """Check that the exported formats exist for the model and suit the target."""
    if deploy.mode == "none" and deploy.target is not None:
        yield Problem("deploy.target", f"{deploy.target.name}: deploy.mode=none exports nothing; expected export")
    if deploy.target is not None and not deploy.registers(model):
        reason = "null: a model for tests is not registered, and" if deploy.register_model is None else "false:"
        text = f"{reason} only a champion is deployed; expected true or deploy.target=null"
        yield Problem("deploy.register_model", text)
    if "adapter" in deploy.formats and model.lora is None and deploy.mode != "none":
        yield Problem(
            "deploy.formats", "adapter: model.lora=null trains all weights, without an adapter; expected merged"
        )
    if deploy.target is not None and "merged" not in deploy.formats:
        yield Problem(
            "deploy.formats",
            f"{', '.join(deploy.formats)}: deploy.target deploys the merged model; add merged to the formats",
        )
