"""Check of code that Hydra would import and call before the spec is validated: callbacks, and logging factories and
classes. Launchers and sweepers must be installed as plugins; Hydra itself rejects others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from components.errors import Problem

HYDRA_MAY_CALL = {
    "_target_": ("hydra.experimental.", "hydra_plugins."),
    "class": ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter"),
    "()": ("logging.Formatter", "colorlog.ColoredFormatter"),
}
"""Classes and packages that Hydra's own config may name, by key."""


def foreign_code(config: DictConfig) -> Iterator[Problem]:
    """Yield a problem for each class or function in Hydra's config that is not allowed."""
    for part in ("callbacks", "job_logging", "hydra_logging"):
        node = config.get(part)
        plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
        for path, name in _called(plain, f"hydra.{part}"):
            allowed = HYDRA_MAY_CALL[path.rpartition(".")[2]]
            if not any(name == entry or (entry.endswith(".") and str(name).startswith(entry)) for entry in allowed):
                message = f"Hydra would call {name!r} before validation; expected {', '.join(allowed)}, or omit the key"
                yield Problem(path, message)


def _called(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the names in a section of Hydra's config that Hydra imports and calls, with their key paths."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if key in HYDRA_MAY_CALL:
            yield f"{path}.{key}", value
        yield from _called(value, f"{path}.{key}")
