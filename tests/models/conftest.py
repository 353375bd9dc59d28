"""The tiny model and an adapter for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.deployment.tiny import TINY, write_adapter
from tests.models.simulated_device import WAITED, SimulatedDevice


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(TINY, tmp_path_factory.getbasetemp() / "models")


@pytest.fixture
def adapter_dir(base_dir, tmp_path) -> Path:
    return write_adapter(base_dir, tmp_path / "adapter", seed=1)


@pytest.fixture
def on_device(monkeypatch):
    """Let the embedded engine compute on the simulated device; its passes run in a thread, without inference mode,
    which wrapped tensors do not support."""
    from components.inference.transformers import engine as engines

    monkeypatch.setattr(engines, "pick_device", lambda device: device)
    sample = engines.TransformersEngine._pass.__wrapped__

    def computed(self):
        before = Counter(WAITED)
        with SimulatedDevice(), torch.no_grad():
            WAITED.update(before)
            return sample(self)

    def use():
        monkeypatch.setattr(engines.TransformersEngine, "_pass", computed)

    return use
