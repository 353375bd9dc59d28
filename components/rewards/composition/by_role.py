"""A reward for each role of an episode, such as planner and worker.

    R = Σ r_role      r_role: the reward of the role, which sees the histories of that role alone; 0 without a turn

The step rewards hold r_role at the last turn of the role and 0 elsewhere. `algorithm.credit=roles` credits the tokens
of a role with it, and compares it within the role.
"""

from __future__ import annotations

from typing import Any

from components.errors import JudgeError, Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts
from components.specs.registered import registered
from components.trajectories.roles import restrict, role_names, role_turns
from components.trajectories.schema import Trajectory


@registered("reward.by_role")
class ByRole(ComposedPerEpisode):
    """A reward for each role.

    Args:
        roles: Rewards by the name of the agent (`History.agent`): `{planner: {_target_: ...}, worker: {_target_:
            ...}}`. Each sees the outcome of the episode, and the histories of its role alone.

    Components: the reward of each role that took a turn. An episode with a role without a reward is unscored.
    """

    def __init__(self, roles: dict[str, Any]):
        if not roles:
            text = "is empty; expected rewards by role, such as {planner: {_target_: …}, worker: {_target_: …}}"
            raise SpecError([Problem("reward.roles", text)])
        super().__init__(roles, "reward.roles")

    def applies_to(self, name: str, trajectory: Trajectory, parts: Parts) -> bool:
        return name in role_turns(trajectory)

    def part_of_episode(self, name: str, trajectory: Trajectory) -> Trajectory:
        return restrict(trajectory, [name])

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        if missing := [role for role in role_names(trajectory) if role not in self.parts]:
            raise JudgeError(f"the role {missing[0]!r} has no reward; reward.roles has {', '.join(self.parts)}")
        turns = role_turns(trajectory)
        rewards = {role: score.reward for role, score in parts.items() if score.reward is not None}
        steps = [rewards[role] if role not in turns[at + 1 :] else 0.0 for at, role in enumerate(turns)]
        return CompositionResult(sum(rewards.values()), steps)
