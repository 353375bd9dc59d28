#!/bin/bash
cat > /app/statistics_of_lists.py <<'PYTHON'
"""Statistics of lists of numbers."""


def median(values):
    """Return the median of a list."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
PYTHON
