"""A run on an AgentGym server, demonstrations and all."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_smoke import Place
from tests.environments.agentgym_server import FakeAgentGym, trajectories

pytestmark = pytest.mark.timeout(1800)


def test_a_run_collects_trains_and_evaluates_on_a_server(tmp_path, finished):
    demonstrations = tmp_path / "agenttraj.json"
    demonstrations.write_text(json.dumps(trajectories("textcraft", range(16))))
    with FakeAgentGym("textcraft") as server:
        done = finished(
            Place(tmp_path),
            "environment=agentgym",
            "environment.kind=textcraft",
            f"environment.url={server.url}",
            f"environment.train={demonstrations}",
            f"environment.demonstrations={demonstrations}",
            "environment.heldout=8",
        )
        assert set(done.result["stages"].values()) == {"ran"}
        assert done.result["episodes"] == 3 * 8 + 8 + 4
        # One process, and one instance for each episode at a time; every one of them began with a reset, and so did the
        # try of the solver before the first stage.
        assert len(server.instances) == len(server.paths("/create")) <= 8
        assert len(server.paths("/reset")) == done.result["episodes"] + 1
        # The demonstrations, if no more, were carried out.
        assert sum("get 1 " in str(body) for _, path, body in server.log if path == "/step") >= 16
