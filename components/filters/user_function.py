"""A filter that is a function of the user: `(trajectory) -> bool`, True keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from components.errors import Problem, SpecError
from components.filters.decisions import decide_each
from components.trajectories.schema import Selection, Trajectory


class Own:
    """The function's name is the reason of what it drops. It is not asked about failed and unscored trajectories.

    What it raises, and an answer that is not true or false, is a mistake in it: a SpecError. To go on would train on
    something else than was asked for.
    """

    def __init__(self, function: Callable[[Trajectory], Any]):
        plain = function.func if isinstance(function, functools.partial) else function
        self.function = function
        self.name = getattr(plain, "__name__", type(plain).__name__)

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda one: None if self._keeps(one) else self.name)

    def _keeps(self, trajectory: Trajectory) -> bool:
        try:
            answer = self.function(trajectory)
        except (Exception, SystemExit) as error:  # whatever it raises is the answer
            raise self._mistake(trajectory, f"raised {type(error).__name__}: {error}") from error
        if type(answer).__name__ not in ("bool", "bool_"):  # bool_ and bool are numpy's
            raise self._mistake(
                trajectory, f"returned {answer!r:.80} ({type(answer).__name__}), expected true or false"
            )
        return bool(answer)

    def _mistake(self, trajectory: Trajectory, what: str) -> SpecError:
        return SpecError([Problem("filter", f"{self.name} {what}, about trajectory {trajectory.id}")])
