"""Tiny model, adapter and held-out episodes, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.trajectories.schema import History, Message, Scenario, Trajectory
from tests.deployment.tiny import TINY, write_adapter

TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds an order.", "parameters": {}}}


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def adapter_dir(base_dir, tmp_path_factory) -> Path:
    return write_adapter(base_dir, tmp_path_factory.mktemp("adapters") / "trained", seed=1)


@pytest.fixture(scope="session")
def held_out() -> list[Trajectory]:
    """Return two episodes of each of four scenarios."""
    trajectories = []
    for index in range(8):
        scenario = Scenario(f"order-{index // 2}", {}, "heldout")
        messages = [
            Message("system", "You work in a shop."),
            Message("user", f"Where is my order {index // 2}? Grüße"),
            Message("assistant", "On its way."),
            Message("user", "Thanks."),
        ]
        trajectories.append(Trajectory(f"{scenario.id}/{index % 2}", scenario, index % 2, [History(messages)], [TOOL]))
    return trajectories
