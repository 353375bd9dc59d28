"""Tokens and cost of an episode, as the servers of its model report them, and the tokens of its reasoning."""

from __future__ import annotations

from components.inference.protocol import ChatCompletion

PROMPT_TOKENS = "prompt_tokens"
PROVIDER_COST = "provider_cost"
"""Metric of an episode: what its model's provider charges for it, in the currency of the prices."""

REASONING_TOKENS = "reasoning_tokens"
"""Metric of an episode: number of its sampled tokens that are reasoning; missing if there are none."""


class ReportedUsage:
    """Sums over the responses of an episode."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._cost: float | None = 0.0
        self._reported = False
        self._reasoning = 0

    def add(self, completion: ChatCompletion) -> None:
        """Add a response; one without reported usage makes the cost unknown."""
        self._reasoning += completion.reasoning_tokens
        usage = completion.usage
        if usage is not None:
            self._reported = True
            self._prompt_tokens += usage.prompt_tokens
        cost = usage.cost if usage is not None else None
        self._cost = None if self._cost is None or cost is None else self._cost + cost

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the episode: those that are known. The cost of an unreported response is not."""
        metrics = {REASONING_TOKENS: float(self._reasoning)} if self._reasoning else {}
        if self._reported:
            metrics[PROMPT_TOKENS] = float(self._prompt_tokens)
            if self._cost is not None:
                metrics[PROVIDER_COST] = self._cost
        return metrics
