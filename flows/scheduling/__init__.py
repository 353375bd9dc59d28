"""Experiments served as Prefect deployments."""
