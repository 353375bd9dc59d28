"""The tiny model and an adapter for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployment.tiny import TINY, write_adapter


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(TINY, tmp_path_factory.getbasetemp() / "models")


@pytest.fixture
def adapter_dir(base_dir, tmp_path) -> Path:
    return write_adapter(base_dir, tmp_path / "adapter", seed=1)
