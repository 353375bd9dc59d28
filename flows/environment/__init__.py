"""Subcommands of `python -m flows.environment`."""
