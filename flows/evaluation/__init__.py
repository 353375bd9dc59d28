"""Comparison of policies for `flows.evaluate`."""
