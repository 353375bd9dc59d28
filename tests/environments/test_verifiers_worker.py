"""Episodes in the subprocess of verifiers, with an environment in the place of the package's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from components.environments.adapters.verifiers_worker import EpisodeWorker


class PlayedEnvironment:
    """Environment whose episode asks the model once. stubborn: the episode ends normally when it is cancelled."""

    def __init__(self, worker, stubborn):
        self.worker, self.stubborn = worker, stubborn

    async def run_episode(self, task, context):
        self.worker.answers["e"] = asyncio.get_running_loop().create_future()
        if task == "asks":
            self.worker.put_event("e", {"ask": {"messages": [], "tools": []}})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not self.stubborn:
                raise
        return SimpleNamespace(ok=True, errors=[], traces=[])


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_stopped_episode_leaves_nothing(waits, stubborn):
    async def episode():
        worker = EpisodeWorker()
        worker.vf = SimpleNamespace(EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace)
        worker.env, worker.tasks = PlayedEnvironment(worker, stubborn), ["asks", "waits"]
        event = asyncio.create_task(worker.play("e", int(waits)))
        while "e" not in worker.answers:
            await asyncio.sleep(0)
        assert waits or "ask" in await event
        run, answer = worker.playing["e"], worker.answers["e"]
        await worker.stop("e")
        if waits:
            assert (await event)["ended"]["errors"] == ["the episode was stopped"]
        (outcome,) = await asyncio.gather(run, return_exceptions=True)
        assert outcome is None if stubborn else isinstance(outcome, asyncio.CancelledError)
        assert answer.cancelled()
        assert (worker.events, worker.playing, worker.answers) == ({}, {}, {})

    asyncio.run(episode())
