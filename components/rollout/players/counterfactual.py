"""Counterfactual replay: a recorded episode, continued by the policy after one of its responses, with the recorded
answer of the environment or another one.

The responses up to the branch are the recorded ones, with the tokens that were sampled, and the environment executes
their actions again (`components.rollout.recorded`). Another answer changes what the agent reads; the state of the
environment stays that after the recorded action.
"""

from __future__ import annotations

from components.environments.protocol import Environment
from components.inference.protocol import Engine
from components.rollout.agent import AgentLoop, Episode
from components.rollout.players.player import Player
from components.rollout.recorded import RecordedEngine, recorded_responses
from components.rollout.request import EpisodeRequest
from components.trajectories.schema import Trajectory


class CounterfactualPlayer(Player):
    """Player of a recorded episode that branches off after `step` responses, fewer than it has. answer: text that
    replaces the environment's last message there; None: the recorded one."""

    agent: AgentLoop

    def __init__(self, agent: AgentLoop, recorded: Trajectory, step: int, answer: str | None):
        super().__init__(agent)
        self._recorded, self._step, self._answer = recorded, step, answer

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Return the continued episode. Raises SpecError if the environment does not repeat the recorded one."""
        responses = list(recorded_responses(self._recorded))
        name, recall = type(environment).__name__, getattr(engine, "recall", None)
        again = RecordedEngine(engine, self._recorded.id, responses[: self._step], name, recall)
        episode = Episode(again, environment, request, self.agent.presentation)
        async with episode.within():
            await episode.begin()
            while episode.talk.turns < self._step and not episode.ended:
                await episode.turn()
            again.require_equal(episode.talk.messages, responses[self._step][0])
            if self._answer is not None:
                episode.replace_observation(self._answer)
            while not episode.ended:
                await episode.turn()
        return [episode.trajectory()]
