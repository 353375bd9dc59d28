"""Statistics of lists of numbers."""


def median(values):
    """Return the median of a list."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
