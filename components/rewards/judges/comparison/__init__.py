"""Scores from comparisons of two: which pairs are compared, and what strengths explain who won."""
