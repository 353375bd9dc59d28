from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.algorithms.builders import MODEL, train_in, write_start

if TYPE_CHECKING:
    from tests.algorithms.gradients import Bench


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def start(base_dir, tmp_path_factory) -> Path:
    """Write a checkpoint with a non-zero adapter."""
    return write_start(base_dir, tmp_path_factory.mktemp("start") / "checkpoint")


@pytest.fixture(scope="session")
def bench(base_dir, tmp_path_factory) -> Bench:
    from tests.algorithms.gradients import Bench

    return Bench(base_dir, tmp_path_factory.mktemp("bench"))


@pytest.fixture
def run(base_dir, start, tmp_path):
    """Return a function train(spec, trajectories, ...) -> (folder of the new checkpoint, metrics, logs by step)."""
    count = iter(range(100))

    def call(spec, trajectories, *, begin: Path | None = start, **more):
        return train_in(tmp_path / str(next(count)), spec, base_dir, trajectories, start=begin, **more)

    return call
