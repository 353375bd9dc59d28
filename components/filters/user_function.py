"""Filter made from a user's function `(trajectory) -> bool`; True keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from components.errors import Problem, SpecError
from components.exceptions import described, log_traceback
from components.filters.decisions import decide_each
from components.trajectories.schema import Selection, Trajectory


class UserFunction:
    """Filter that calls a user's function with each scored trajectory. The function's name is the reason for a drop.

    An exception or a result that is not a bool raises SpecError: continuing would train on a different selection than
    configured.
    """

    def __init__(self, function: Callable[[Trajectory], Any]):
        plain = function.func if isinstance(function, functools.partial) else function
        self.function = function
        self.name = getattr(plain, "__name__", type(plain).__name__)

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda trajectory: None if self._keeps(trajectory) else self.name)

    def _keeps(self, trajectory: Trajectory) -> bool:
        try:
            answer = self.function(trajectory)
        except (Exception, SystemExit) as error:  # user code may raise anything
            log_traceback(error)
            raise self._function_error(trajectory, f"raised {described(error)}") from error
        if type(answer).__name__ not in ("bool", "bool_"):  # bool_ and bool are numpy's
            raise self._function_error(
                trajectory, f"returned {answer!r:.80} ({type(answer).__name__}), expected True or False"
            )
        return bool(answer)

    def _function_error(self, trajectory: Trajectory, mistake: str) -> SpecError:
        return SpecError([Problem("filter", f"{self.name} {mistake}, for trajectory {trajectory.id}")])
