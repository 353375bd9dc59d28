"""The tiny model, an adapter for it, and transformers' own model on the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.deployment.tiny import TINY, write_adapter


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(TINY, tmp_path_factory.getbasetemp() / "models")


@pytest.fixture(scope="session")
def adapter_dir(base_dir, tmp_path_factory) -> Path:
    return write_adapter(base_dir, tmp_path_factory.mktemp("adapters") / "trained", seed=1)


@pytest.fixture(scope="session")
def reference(base_dir):
    """The model as transformers runs it, one sequence at a time, without a cache."""
    from components.models.weights import load_model

    return load_model(base_dir)


@pytest.fixture
def make_engine(base_dir):
    """Makes engines on the tiny model."""
    from components.inference.transformers.engine import TransformersEngine

    def make(folder: Path = base_dir, *, max_length: int = 512, **options):
        return TransformersEngine(folder, max_length=max_length, device="cpu", **options)

    return make


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture(scope="session")
def adapters(adapter_dir, tmp_path_factory) -> Path:
    """A folder with the adapter, `trained`, and damaged ones beside it."""
    from tests.inference.malformed import damaged_adapters

    folder = tmp_path_factory.mktemp("attacked") / "adapters"
    shutil.copytree(adapter_dir, folder / "trained")
    damaged_adapters(folder / "trained", folder)
    return folder


@pytest.fixture(scope="session")
def attacked(base_dir, adapters, tmp_path_factory):
    """Our server on the tiny model, in a process of its own; `adapters` is its folder of adapters."""
    from tests.inference.victim import victim

    with victim(base_dir, adapters, tmp_path_factory.mktemp("attacked") / "server.log") as running:
        yield running
