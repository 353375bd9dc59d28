"""Loop of one's own in Python, a script or a notebook: gather rollouts, train on them, evaluate.

    model = loop.TrainableModel("support-agent", base="smollm2_135m", root="runs")
    groups = await loop.gather(loop.group(rollout(model, scenario) for _ in range(8)) for scenario in scenarios)
    await model.train(groups, algorithm="grpo", learning_rate=1e-4)
    await model.evaluate(rollout, heldout)

Each call is a stage of the project, cached by the content of its inputs: a program that is killed and started again
resumes where it was.
"""

from collections.abc import Callable, Iterable
from typing import Any

from components.specs import Target
from flows.loop import collection
from flows.loop.groups import GatheredGroups, RolloutGroup, Transcript, group
from flows.loop.judging import ruler, ruler_score, ruler_score_async
from flows.loop.model import PolicyEvaluation, TrainableModel

__all__ = [
    "GatheredGroups",
    "PolicyEvaluation",
    "RolloutGroup",
    "TrainableModel",
    "Transcript",
    "gather",
    "group",
    "ruler",
    "ruler_score",
    "ruler_score_async",
]


async def gather(
    groups: Iterable[Any],
    after_each: Target | Callable[[RolloutGroup], Any] | None = None,
    max_failures: float | None = None,
) -> GatheredGroups:
    """Play the rollouts of all groups at the same time, score them, and return the groups of trajectories.

    after_each: reward of each group, such as `ruler("openai/o3")`, or a function, `async` or not, of a group that
    returns its rewards, or sets them; None: what the rollout returned. max_failures: share of rollouts (below 1) or
    number that may fail; None: `collect.max_failures`. Raises TooManyFailures above it,
    JudgeError if no episode could be scored, and SpecError for groups that cannot be played."""
    return await collection.gather(groups, after_each, max_failures)
