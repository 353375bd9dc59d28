"""Subcommands of `python -m flows.runs`."""
