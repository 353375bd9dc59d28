"""The stages, by name: plain functions over artifacts."""

from flows.stages import calibrate, collect, deploy, evaluate, feedback, filter, judge, reward_model, train
from flows.stages.base import Stage

STAGES: dict[str, Stage] = {
    module.STAGE.name: module.STAGE
    for module in (collect, judge, filter, feedback, train, reward_model, evaluate, deploy, calibrate)
}
"""Every stage that a request can name."""
