"""Sandbox for code written by a model."""

from components.sandbox.bubblewrap import Sandbox
from components.sandbox.limits import Limits, Result
from components.sandbox.watch import HOME

__all__ = ["HOME", "Limits", "Result", "Sandbox"]
