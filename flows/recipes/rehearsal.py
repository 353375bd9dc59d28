"""Rehearsal of a user's recipe before its run starts: the recipe is executed with stages that do nothing, so that a
mistake in it is found before the first stage."""

from __future__ import annotations

from pathlib import Path

from components.artifacts import Artifact
from components.errors import EspalierError
from components.exceptions import described
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.recipes.episodes import order_error
from flows.recipes.run import Run
from flows.stages import STAGES
from flows.stages.base import Request

MAX_STAGES = 10_000
"""Maximum number of stages of a recipe, besides STAGES_PER_ROUND for each round."""
STAGES_PER_ROUND = 100


def rehearse(spec: ExperimentSpec, start: StartingPoint) -> None:
    """Execute the recipe of an experiment without running stages, if it is a user's.

    Raises SpecError for a recipe that raises an exception, returns no policy, calls stages in an impossible order, or
    does not end while the results of its stages are unknown."""
    if spec.flow.is_built_in:
        return
    count, limit = 0, MAX_STAGES + STAGES_PER_ROUND * spec.rounds

    def call(label: str, step: int, request: Request) -> Artifact:
        nonlocal count
        count += 1
        if count > limit:
            raise order_error(
                f"{spec.flow.target} called more than {limit} stages while their results are unknown; end its loops by "
                "a number, such as that of run.rounds"
            )
        return placeholder(label, request.stage)

    try:
        Run(spec, call, start=start).execute()
    except EspalierError:
        raise
    except Exception as error:
        raise order_error(f"{spec.flow.target} raises {described(error)}") from error


def placeholder(label: str, stage: str) -> Artifact:
    """Return a stand-in for the artifact of a pending stage, without a digest and metrics."""
    return Artifact(label, STAGES[stage].kind, stage, 0, "", Path(label), {}, {}, (), 0.0)
