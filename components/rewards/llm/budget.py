"""What asking has cost, and when no more may be asked.

A call is let through only where it fits: what is spent, and for each call under way as much as the dearest so far,
stay within the budget. Before any answer is there, as much as it costs to have the question read. So only what the
first answers cost to be written can carry the sum beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.errors import BudgetSpent, ResourceError


@dataclass
class Meter:
    """Of one stage, in the currency of the prices."""

    budget: float | None = None
    """Most that may be spent; None is no limit."""
    spent: float = 0.0
    """On answers that were asked for now, and on those of an earlier try of the stage."""
    calls: int = 0
    kept: int = 0
    """Answers that were kept from before: no call was made."""
    unpriced: int = 0
    """Calls of which the price is not known."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _dearest: float = 0.0
    _under_way: int = 0

    def begin(self, who: str, least: float | None) -> None:
        """A call begins. least: what it costs at least; None where the price is not known. Raises BudgetSpent where it
        may not, ResourceError where nobody can know whether it may."""
        if self.budget is not None:
            if least is None or self.unpriced:
                raise ResourceError(
                    f"judge.budget={self.budget:g} cannot be kept: the price of {who} is not known. Give it, per "
                    "million tokens: reward.model.price={input: 2.0, output: 8.0}; or judge.budget=null"
                )
            self._dearest = max(self._dearest, least)
            if self.spent + (self._under_way + 1) * self._dearest > self.budget or self.spent >= self.budget:
                raise BudgetSpent(
                    f"judge.budget: {self.spent:.4g} of {self.budget:g} is spent, and the next call may cost "
                    f"{self._dearest:.4g}. What was judged is kept: the same command with a higher judge.budget goes on"
                )
        self._under_way += 1

    def end(self, cost: float | None, prompt_tokens: int, completion_tokens: int) -> None:
        """A call that began was answered. cost: None where the price is not known."""
        self._under_way -= 1
        self.calls += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if cost is None:
            self.unpriced += 1
        else:
            self.spent += cost
            self._dearest = max(self._dearest, cost)

    def gave_up(self) -> None:
        """A call that began was not answered."""
        self._under_way -= 1
