"""Prefect flows and command-line entry points; the only place that imports prefect or hydra."""
