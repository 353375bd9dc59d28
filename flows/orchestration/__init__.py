"""Prefect: flows and tasks, the server of a run, artifacts in its UI."""
