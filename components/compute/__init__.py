"""Runners and places of stages."""
