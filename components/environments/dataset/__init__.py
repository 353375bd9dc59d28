"""Prompts from files and datasets as an environment."""
