"""Recipes: programs over stages. A recipe of one's own imports `Policy`, `Run` and `recipe` from here."""

from flows.experiment.flow import recipe
from flows.recipes.episodes import Episodes
from flows.recipes.run import Run
from flows.recipes.stage_calls import Policy

__all__ = ["Episodes", "Policy", "Run", "recipe"]
