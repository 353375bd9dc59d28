"""Code that Hydra would import and call before the spec is validated: callbacks, and the factories and classes of
logging. Launchers and sweepers have to be installed as plugins; Hydra itself refuses others."""

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
"""By key: the classes, or packages, that the config of Hydra itself may name."""


def foreign_code(config: DictConfig) -> Iterator[Problem]:
    """Yield what a config of Hydra names that may not be called."""
    for part in ("callbacks", "job_logging", "hydra_logging"):
        node = config.get(part)
        plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
        for path, name in _called(plain, f"hydra.{part}"):
            known = HYDRA_MAY_CALL[path.rpartition(".")[2]]
            if not any(name == one or (one.endswith(".") and str(name).startswith(one)) for one in known):
                message = f"{name!r} would be called by Hydra itself; expected {', '.join(known)}, or leave it out"
                yield Problem(path, message)


def _called(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The names in a part of Hydra's own config that are imported and called, with their key paths."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if key in HYDRA_MAY_CALL:
            yield f"{path}.{key}", value
        yield from _called(value, f"{path}.{key}")
