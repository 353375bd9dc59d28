"""Recipes: programs over stages. A recipe of one's own imports `PolicyVersion`, `Run` and `recipe` from here."""

from flows.experiment.flow import recipe
from flows.recipes.episodes import Episodes
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

__all__ = ["Episodes", "PolicyVersion", "Run", "recipe"]
