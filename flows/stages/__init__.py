"""Stages: plain functions over artifacts, by name."""

from flows.stages import calibrate, collect, deploy, evaluate, feedback, filter, judge, reward_model, train
from flows.stages.base import Stage

STAGES: dict[str, Stage] = {
    module.STAGE.name: module.STAGE
    for module in (collect, judge, filter, feedback, train, reward_model, evaluate, deploy, calibrate)
}
"""All stages that a request can name."""
