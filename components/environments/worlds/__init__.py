"""Environments with a small simulated world of data and tools."""
