"""Model registry: versions, aliases and tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.redaction import mask_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_TAG = 5000
"""Maximum length of a version's tag in characters (a limit of MLflow)."""


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    number: str
    source: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    """Aliases of the version; only set by `Registry.versions`."""


def clean(name: str) -> str:
    """Return a name with characters that the registry rejects replaced."""
    return re.sub(r"[/:'\"]", "-", name)


class Registry:
    """Access to versions, aliases and tags of registered models."""

    def __init__(self, client: MlflowClient):
        self._client = client

    def aliased(self, name: str, alias: str) -> Version | None:
        """Return the version with an alias; None without one, or if that version was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            version = self._client.get_model_version_by_alias(clean(name), alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return Version(version.name, str(version.version), version.source, dict(version.tags))

    def versions(self) -> list[Version]:
        """Return every version that was not deleted."""
        aliases: dict[tuple[str, str], list[str]] = {}
        for model in _pages(self._client.search_registered_models):
            for alias, number in model.aliases.items():
                aliases.setdefault((model.name, str(number)), []).append(alias)
        return [
            Version(
                version.name,
                str(version.version),
                version.source,
                dict(version.tags),
                tuple(sorted(aliases.get((version.name, str(version.version)), ()))),
            )
            for version in _pages(self._client.search_model_versions)
        ]

    def delete(self, version: Version) -> None:
        """Mark a version as deleted, with its aliases. Its source remains."""
        self._client.delete_model_version(version.name, version.number)

    def alias(self, name: str, alias: str, version: str | None) -> None:
        """Move the alias to a version; None removes the alias."""
        if version is None:
            self._client.delete_registered_model_alias(clean(name), alias)
        else:
            self._client.set_registered_model_alias(clean(name), alias, version)

    def tag(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
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
