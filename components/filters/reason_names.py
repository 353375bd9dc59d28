"""Reasons that all filters give."""

KEPT = "kept"
"""Reason of every selection that keeps its trajectory, and of no other."""
FAILED = "failed"
"""Reason of every selection that drops a failed episode. All filters here drop failed episodes."""
UNSCORED = "unscored"
"""Reason of every selection that drops a finished episode without a reward. All filters here drop such episodes."""
