"""Base class of deployment targets. A target is the configuration of a host, which deploys a release and removes a
deployment. Each is a module of this package with a file in `conf/deploy`; `targets.spec` derives the rest.

The caller (`flows.release.deployment`) sets the order: `check` before the run starts; `deploy`, which returns when the
release answers; the canary; then `take_back` of the previous deployment, or of the new one. So the previous deployment
stays in use until the canary has passed.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from components.specs import Spec


@dataclass(frozen=True)
class Release:
    """Version of a model to deploy."""

    name: str
    version: str
    digest: str
    """Digest of the export: another digest is another model."""
    folder: Path
    """Folder of the merged export."""
    max_length: int
    """Longest conversation in tokens."""

    @property
    def slug(self) -> str:
        """Name of this version of the model: letters, digits and dashes, as hosts accept them."""
        letters = "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())
        return f"{letters}-{self.digest[:12]}"


@dataclass(frozen=True)
class Deployment:
    """Deployed release. Plain data, which a later run reads."""

    target: str
    """Name of the target."""
    version: str
    digest: str
    url: str | None
    """Base URL as OpenAI's clients take it (`base_url`); None without an endpoint, as in a repository of models."""
    model: str
    """Name of the model at the endpoint."""
    key_variable: str | None = None
    """Environment variable with the endpoint's key."""
    details: dict[str, str] = field(default_factory=dict)
    """Data that the target needs to remove it: ids, no secrets."""


class DeploymentTarget(Spec):
    """Deployment target. A subclass that is a target has a `name`."""

    name: str

    on_this_machine: ClassVar[bool] = False
    """True if deployments run on the machine of the run; their `details` then hold the target as JSON in `spec`."""
    keeps_previous: ClassVar[bool] = False
    """True if the previous deployment remains beside the new one, without cost."""

    @property
    def fixed_port(self) -> int:
        """Port that every deployment listens on; 0 if each has an address of its own."""
        return 0

    @abstractmethod
    def check(self, name: str, active: Deployment | None = None) -> None:
        """Raise ResourceError if a release called `name` could not be deployed: missing key, name in use. Called before
        the first stage. active: current deployment of that name."""

    @abstractmethod
    def deploy(self, release: Release, root: Path) -> Deployment:
        """Deploy the release beside the current deployment; return when it answers. root: folder for files of the
        target. Raises ResourceError for problems that the user can fix, DeployError for a failure of the host, and
        WaitTimeout; before it raises, the target removes an incomplete deployment."""

    @abstractmethod
    def alive(self, deployment: Deployment) -> bool:
        """Return True if the deployment is still in use."""

    @abstractmethod
    def take_back(self, deployment: Deployment) -> None:
        """Remove a deployment; idempotent."""
