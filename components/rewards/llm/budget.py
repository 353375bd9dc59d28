"""Cost and budget of judge calls.

A call may start only if it fits into the budget: the amount spent, plus, for each call under way and this one, the cost
of the most expensive call so far. Before the first answer, a call counts with the cost of its prompt alone. So only the
completions of the first calls can exceed the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.errors import BudgetExceeded, ResourceError


@dataclass
class Meter:
    """Meter of one stage, in the currency of the prices."""

    budget: float | None = None
    """Maximum amount; None is no limit."""
    spent: float = 0.0
    """Amount spent on new answers, and by interrupted runs of the stage."""
    calls: int = 0
    cached: int = 0
    """Answers from the cache, without a call."""
    unpriced: int = 0
    """Calls with unknown price."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _highest_cost: float = 0.0
    _under_way: int = 0

    def begin(self, label: str, minimum_cost: float | None) -> None:
        """Register the start of a call. label: the model; minimum_cost: None if the price is unknown. Raises
        BudgetExceeded if the budget does not allow the call, ResourceError if the price is unknown and there is a
        budget."""
        if self.budget is not None:
            if minimum_cost is None or self.unpriced:
                raise ResourceError(
                    f"judge.budget={self.budget:g} cannot be kept: the price of {label} is not known. Give it, per "
                    "million tokens: reward.model.price={input: 2.0, output: 8.0}; or judge.budget=null"
                )
            self._highest_cost = max(self._highest_cost, minimum_cost)
            if self.spent + (self._under_way + 1) * self._highest_cost > self.budget or self.spent >= self.budget:
                raise BudgetExceeded(
                    f"judge.budget: {self.spent:.4g} of {self.budget:g} is spent, and the next call may cost "
                    f"{self._highest_cost:.4g}. Finished judgements are cached: "
                    "the same command with a higher judge.budget resumes"
                )
        self._under_way += 1

    def end(self, cost: float | None, prompt_tokens: int, completion_tokens: int) -> None:
        """Register the answer of a call. cost: None if the price is unknown."""
        self._under_way -= 1
        self.calls += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if cost is None:
            self.unpriced += 1
        else:
            self.spent += cost
            self._highest_cost = max(self._highest_cost, cost)

    def gave_up(self) -> None:
        """Register a call that ended without an answer."""
        self._under_way -= 1
