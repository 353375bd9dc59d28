"""Tokens and cost of an episode, as the servers of its model report them."""

from __future__ import annotations

from components.inference.protocol import ChatCompletion

PROMPT_TOKENS = "prompt_tokens"
PROVIDER_COST = "provider_cost"
"""Metric of an episode: what its model's provider charges for it, in the currency of the prices."""


class ReportedUsage:
    """Sums over the responses of an episode."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._cost: float | None = 0.0
        self._reported = False

    def add(self, completion: ChatCompletion) -> None:
        """Add a response; one without reported usage makes the cost unknown."""
        usage = completion.usage
        if usage is not None:
            self._reported = True
            self._prompt_tokens += usage.prompt_tokens
        cost = usage.cost if usage is not None else None
        self._cost = None if self._cost is None or cost is None else self._cost + cost

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the episode; none if no server reported any usage, and no cost if it is unknown."""
        if not self._reported:
            return {}
        cost = {} if self._cost is None else {PROVIDER_COST: self._cost}
        return {PROMPT_TOKENS: float(self._prompt_tokens), **cost}
