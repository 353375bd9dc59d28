"""The model registry: its versions, which of them an alias names, and what is known of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.redaction import mask_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_TAG = 5000
"""Longest value of a version's tag in characters (a limit of MLflow)."""


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    number: str
    source: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    """Known only of what `Registry.versions` returns."""


def clean(name: str) -> str:
    """A name as the registry takes it."""
    return re.sub(r"[/:'\"]", "-", name)


class Registry:
    """Versions, aliases and tags of registered models."""

    def __init__(self, client: MlflowClient):
        self._client = client

    def aliased(self, name: str, alias: str) -> Version | None:
        """The version that an alias names; None where it names none, or one that was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_model_version_by_alias(clean(name), alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return Version(found.name, str(found.version), found.source, dict(found.tags))

    def versions(self) -> list[Version]:
        """Return every version that was not deleted."""
        aliases: dict[tuple[str, str], list[str]] = {}
        for model in _pages(self._client.search_registered_models):
            for alias, number in model.aliases.items():
                aliases.setdefault((model.name, str(number)), []).append(alias)
        return [
            Version(
                found.name,
                str(found.version),
                found.source,
                dict(found.tags),
                tuple(sorted(aliases.get((found.name, str(found.version)), ()))),
            )
            for found in _pages(self._client.search_model_versions)
        ]

    def delete(self, version: Version) -> None:
        """Mark a version as deleted; its aliases go with it. What it points to stays."""
        self._client.delete_model_version(version.name, version.number)

    def alias(self, name: str, alias: str, version: str | None) -> None:
        """Gives the alias to a version, away from any other; None takes it from all."""
        if version is None:
            self._client.delete_registered_model_alias(clean(name), alias)
        else:
            self._client.set_registered_model_alias(clean(name), alias, version)

    def tag(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self._client.set_model_version_tag(clean(name), version, key, mask_text(value)[:MAX_TAG])


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Yield the results of a search of MLflow, page by page."""
    token = None
    while True:
        page = search(page_token=token)
        yield from page
        token = page.token
        if not token:
            return
