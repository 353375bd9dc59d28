"""Trained weights of a policy as a LoRA adapter for each role of an episode (`model.lora.roles`), on one frozen base.

A pack has the sequences of one role (`packing`). `select` activates the adapter of a pack's role for its forward pass,
and leaves it active for the backward pass: with gradient checkpointing, layers are computed again there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from components.algorithms.policy.adapter import LEARNING, Adapter
from components.errors import ArtifactError, ResourceError
from components.models.spec import ModelSpec
from components.models.trained_weights import ADAPTERS, role_folders

Source = Literal["trained", "reference", "base"]
"""Weights that compute: the trained adapters, those of the reference, or none."""


class RoleAdapters(Adapter):
    """LoRA adapters on `model`, one for each of `spec.lora.roles`, all drawn from `seed`."""

    folder = ADAPTERS

    def __init__(self, model: Any, spec: ModelSpec, seed: int):
        assert spec.lora is not None
        assert spec.lora.roles is not None
        self.roles = tuple(spec.lora.roles)
        self._role = self.roles[0]
        self._source: Source = "trained"
        super().__init__(model, spec, seed, [_trained(role) for role in self.roles])
        self._activate()

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of all roles, by name."""
        return {name: p for name, p in self.model.named_parameters() if name.split(".")[-2] in self.names}

    def select(self, role: str) -> None:
        """Activate the adapter of a role. Raises ArtifactError for a role without one."""
        if role not in self.roles:
            raise ArtifactError(
                f"model.lora.roles = [{', '.join(self.roles)}]: the episodes have tokens of the role {role!r}, which "
                "has no adapter; expected all roles of the agent, or null for one adapter"
            )
        self._role = role
        self._activate()

    def load(self, folder: Path, name: str = LEARNING) -> None:
        """Load the adapters of all roles, or one with a PEFT name. Raises ArtifactError if they do not fit."""
        if name != LEARNING:
            super().load(folder, name)
            return
        for role, saved in self._folders(folder).items():
            super().load(saved, _trained(role))

    def save(self, folder: Path, name: str = LEARNING) -> None:
        """Write a PEFT folder for each role."""
        for role in self.roles:
            super().save(folder / role, _trained(role))

    def check_saved(self, folder: Path, base_dir: Path, name: str = LEARNING) -> None:
        """Check the folder of each role."""
        for role in self.roles:
            super().check_saved(folder / role, base_dir, _trained(role))

    def use_reference(self, folder: Path | None) -> None:
        """Set the reference: saved adapters of the roles, or the base model if `folder` is None."""
        if folder is not None:
            for role, saved in self._folders(folder).items():
                self._load_frozen(saved, _reference(role))
            self._activate()
        self._reference = folder

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute with the reference within the context: with its adapter of the role of each pack."""
        role = self._role
        try:
            if self._reference is not None:
                self._source = "reference"
                yield
            else:
                self._source = "base"
                with self.model.disable_adapter():
                    yield
        finally:
            self._role, self._source = role, "trained"
            self._activate()

    def copy_to(self, name: str) -> None:
        raise ResourceError(
            f"model.lora.roles = [{', '.join(self.roles)}]: {name} cannot be a copy of several adapters"
        )

    def _activate(self) -> None:
        if self._source == "base":
            return
        self.model.set_adapter((_trained if self._source == "trained" else _reference)(self._role))
        for parameter in self.parameters.values():  # PEFT froze those of the other roles
            parameter.requires_grad_(True)

    def _folders(self, folder: Path) -> dict[str, Path]:
        """Return the folder of each role. Raises ArtifactError if the saved roles are others."""
        saved = role_folders(folder)
        if set(saved) != set(self.roles):
            raise ArtifactError(
                f"{folder} holds {f'adapters of {sorted(saved)}' if saved else 'no adapters of roles'}, but "
                f"model.lora.roles = [{', '.join(self.roles)}]. Start from a checkpoint of these roles, or set "
                "model.lora.roles to its own"
            )
        return {role: saved[role] for role in self.roles}


def _trained(role: str) -> str:
    """Return PEFT's name of the trained adapter of a role: a prefix, because PEFT's containers reserve some names."""
    return f"role_{role}"


def _reference(role: str) -> str:
    return f"reference_{role}"
