"""Subcommands of `python -m flows.explain`."""
