"""Bundles of runs, and their verification by recomputation."""
