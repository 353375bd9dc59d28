"""Rewards of a user, right and wrong, for the tests of the preflight."""

from __future__ import annotations

import statistics

from components.trajectories.schema import Score


def success(trajectory):
    return float(trajectory.success)


def constant(trajectory):
    return 1.0


def divides(trajectory):
    return 1 / 0


def forgets(trajectory):
    float(trajectory.success)


def demands_an_answer(trajectory):
    answers = [message.content for message in trajectory.histories[-1].messages if message.role == "assistant"]
    return float(answers[-1][0] == "1")


class Deviations:
    """Reward that compares: one episode alone has no standard deviation."""

    def score_group(self, group):
        rewards = [float(trajectory.success) for trajectory in group]
        return [
            Score(trajectory.id, reward - statistics.stdev(rewards))
            for trajectory, reward in zip(group, rewards, strict=True)
        ]
