"""What a target does: puts a release into use, takes it back, lets go of the one before.

The order is the caller's (`flows.release.deployment`): `check` before anything is made; `deploy`, which returns when
the release answers; the canary; then `retire` of the deployment before it, or `take_back` of the new one. So until the
canary has passed, what was in use stays in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Release:
    """A version of a model that is to be put into use."""

    name: str
    version: str
    digest: str
    """Of the export: another digest is another model."""
    folder: Path
    """The merged export."""
    max_length: int
    """Longest conversation in tokens."""

    @property
    def slug(self) -> str:
        """A name of this very model, of letters, digits and dashes, as hosts take it."""
        letters = "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())
        return f"{letters}-{self.digest[:12]}"


@dataclass(frozen=True)
class Deployment:
    """A release in use. Plain data: a later run reads it."""

    target: str
    """Name of the target."""
    version: str
    digest: str
    url: str | None
    """OpenAI's `base_url`; None where nothing answers, as in a repository of models."""
    model: str
    """What the endpoint calls it."""
    key_variable: str | None = None
    """Environment variable with the endpoint's key."""
    details: dict[str, str] = field(default_factory=dict)
    """What the target needs to take it down: ids, no secrets."""


class Target(Protocol):
    def check(self, name: str) -> None:
        """Raises ResourceError where a release called `name` could not be deployed: no key, a name that is taken. Asked
        before the first stage."""
        ...

    def deploy(self, release: Release, root: Path) -> Deployment:
        """Puts the release into use beside what is in use, and returns when it answers. root: folder for what the
        target writes. Raises ResourceError for what the user can mend, DeployError for a failure of the other side,
        WaitTimeout; what was begun is then taken down again."""
        ...

    def alive(self, deployment: Deployment) -> bool:
        """Whether it is still in use."""
        ...

    def take_back(self, deployment: Deployment) -> None:
        """Takes a deployment out of use."""
        ...
