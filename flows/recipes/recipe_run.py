"""Run of a recipe: what a recipe needs from its surroundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from components.artifacts import Artifact
from flows.execution.overlap import BackgroundRunner
from flows.experiment.early_stopping import EvaluatedPolicy
from flows.experiment.requests import StageRunner
from flows.experiment.starting_point import StartingPoint
from flows.history.records import Notice
from flows.recipes.outcome import RunOutcome
from flows.stages.base import Request

OnRound = Callable[[int, dict[str, Artifact]], None]
"""Callback after each finished round, with its number and its artifacts by stage."""
OnNotice = Callable[[Notice], None]
"""Callback for notices of guards and for decisions from evaluations."""
Prune = Callable[[EvaluatedPolicy], str | None]
"""Callback for each policy evaluated before the last round. Returns the reason to prune the run, or None."""
Approve = Callable[[RunOutcome, Request], str | None]
"""Callback before the deployment, with the outcome and the request. Returns the reason for a rejection, or None."""


@dataclass
class RecipeRun:
    """Run of a recipe: runs its stages, receives its events, takes the decisions that are not the recipe's, and holds
    its outcome."""

    call: StageRunner
    """Runs one stage: a Prefect task in a run, a lookup in a plan, a plain call in a benchmark."""
    beside: BackgroundRunner | None = None
    """Runs background work; None runs everything sequentially."""
    start: StartingPoint = field(default_factory=StartingPoint)
    on_round: OnRound = lambda number, artifacts: None
    on_notice: OnNotice = lambda notice: None
    prune: Prune = lambda measured: None
    """If it returns a reason, the run ends with the policy that was evaluated last."""
    approve: Approve = lambda outcome, request: None
    outcome: RunOutcome = field(default_factory=RunOutcome)
    """Filled while the stages run, also if a guard ends the run."""
