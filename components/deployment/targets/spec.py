"""Union of the deployment targets, which are the modules of this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from components.deployment.targets.base import Deployment, DeploymentTarget
from components.errors import ResourceError, SpecError
from components.specs import validate
from components.specs.declared import discover, union_of

TARGETS = discover("components.deployment.targets", DeploymentTarget)  # type: ignore[type-abstract]
"""Deployment targets by name."""

if TYPE_CHECKING:
    TargetSpec = DeploymentTarget
else:
    TargetSpec = union_of(TARGETS.values())


def local_target(deployment: Deployment) -> DeploymentTarget | None:
    """Return the target of a deployment on this machine, for `alive` and `take_back`; None for one on another host.

    Stored fields that are no longer valid are not validated: the server can still be listed and stopped."""
    target = TARGETS.get(deployment.target)
    if target is None or not target.on_this_machine:
        return None
    stored = deployment.details.get("spec", "{}")
    try:
        return target.model_validate_json(stored)
    except ValidationError:
        return target.model_construct(**json.loads(stored))


def restart_target(deployment: Deployment, ledger: Path) -> DeploymentTarget:
    """Return the target that starts a deployment on this machine again. ledger: file that stores it, for the message.

    Raises ResourceError if the stored fields are no longer valid."""
    try:
        return validate(TARGETS[deployment.target], json.loads(deployment.details.get("spec", "{}")))
    except SpecError as error:
        raise ResourceError(
            f"{ledger}: the stored target of the deployment is no longer valid "
            f"({'; '.join(map(str, error.problems))}); stop the deployment, and deploy the model again with a new run"
        ) from None
