from __future__ import annotations

from pathlib import Path

import pytest

from tests.algorithms.builders import MODEL, write_start


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def start(base_dir, tmp_path_factory) -> Path:
    """A checkpoint whose adapter changes the model."""
    return write_start(base_dir, tmp_path_factory.mktemp("start") / "checkpoint")
