"""Sandbox for code written by a model."""

from components.sandbox.bubblewrap import Sandbox
from components.sandbox.limits import Limits, ProgramResult
from components.sandbox.watch import HOME

__all__ = ["HOME", "Limits", "ProgramResult", "Sandbox"]
