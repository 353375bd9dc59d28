"""The stages, by name: plain functions over artifacts."""

from flows.stages import collect, deploy, evaluate, filter, judge, train
from flows.stages.base import Stage

STAGES: dict[str, Stage] = {
    stage.name: stage for stage in (collect.STAGE, judge.STAGE, filter.STAGE, train.STAGE, evaluate.STAGE, deploy.STAGE)
}
"""Every stage that a request can name."""
