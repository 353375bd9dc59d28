"""RLHF from three files, as in InstructGPT (arXiv:2203.02155): demonstrations, preferences and prompts."""

from __future__ import annotations

from flows.experiment.flow import SHARED_KEYS, recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.online_rl import online_rl
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe(*SHARED_KEYS, files=True)
def rlhf(run: Run, spec: ExperimentSpec) -> PolicyVersion:
    """Train on the demonstrations of `data`, train the reward model on the preferences of `reward_model.data`, then
    play rounds on the prompts of `environment`, which it scores. Return the last policy."""
    return online_rl(run, spec)
