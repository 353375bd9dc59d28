"""Comparison of policies on the same scenarios as one self-contained HTML page."""

from __future__ import annotations

from typing import Any

from components.evaluation.policies import ErrorClass, PoliciesComparison, PolicyResult
from components.pages.episodes import view
from components.pages.page import page
from components.trajectories.stored import episodes_of

EXAMPLES = 2
"""Number of example episodes of each error class."""
BREAKDOWNS = {"by_type": "Type", "by_difficulty": "Difficulty"}
"""Breakdowns of a summary by scenario, with their titles."""


def render(comparison: PoliciesComparison) -> str:
    """Return the page as HTML text."""
    policies = comparison.policies
    named = {f"{name} against {comparison.baseline}": paired for name, paired in comparison.success.items()}
    return page(
        "policies.html.j2",
        it=comparison,
        evaluations=[{"label": policy.name, "summary": policy.summary} for policy in policies],
        success={name: paired for name, paired in named.items() if paired is not None},
        reward={name: paired for name, paired in comparison.reward.items() if paired is not None},
        breakdowns=[
            {
                "title": title,
                "kinds": list(dict.fromkeys(kind for policy in policies for kind in policy.summary[name])),
                "rows": [(policy.name, policy.summary[name]) for policy in policies],
            }
            for name, title in BREAKDOWNS.items()
        ],
        errors=[
            {
                "policy": policy,
                "classes": [(error.name, len(error.places), _examples(policy, error)) for error in policy.errors],
            }
            for policy in policies
        ],
    )


def _examples(policy: PolicyResult, error: ErrorClass) -> list[dict[str, Any]]:
    examples = episodes_of(policy.episodes).rows(error.places[:EXAMPLES])
    return [view(episode, policy.scores.get(episode.id)) for episode in examples]
