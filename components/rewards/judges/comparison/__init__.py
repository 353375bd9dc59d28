"""Scores from pairwise comparisons: selection of pairs, and strengths fitted to the results."""
