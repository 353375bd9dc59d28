"""Union of the deployment targets, which are the modules of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.deployment.targets.base import Deployment, DeploymentTarget
from components.specs.discovery import discover, union_of

TARGETS = discover("components.deployment.targets", DeploymentTarget)  # type: ignore[type-abstract]
"""Deployment targets by name."""

if TYPE_CHECKING:
    TargetSpec = DeploymentTarget
else:
    TargetSpec = union_of(TARGETS.values())


def local_target(deployment: Deployment) -> DeploymentTarget | None:
    """Return the target of a deployment on this machine; None for one on another host."""
    target = TARGETS.get(deployment.target)
    if target is None or not target.on_this_machine:
        return None
    return target.model_validate_json(deployment.details.get("spec", "{}"))
